"""A judge without training is one file and one line of the registry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parse_infer.decoding.block_length import REPLAYED
from parse_infer.engine import ParseEngine
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried, TokenScores
from parse_infer.judge.floor import FlooredJudge
from parse_infer.judge.judge import Reading, Verdict, token_verdict
from parse_infer.judge.registry import RULES, find_rule
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.text.cuts import CutPolicy

PROMPT = "Tom has 5 apples."
EVERY = CutPolicy("tokens", every=1)
RULES_OF_TOKENS = [name for name, rule in RULES.items() if issubclass(rule, TokenRule)]


@dataclass(frozen=True)
class TopK:
    """Keep draft tokens among the target's first `k` choices: a rule of a stranger's."""

    k: float = 3

    def load(self, tokenizer: Any, model: object = None) -> TopKJudge:
        return TopKJudge(tokenizer, int(self.k))


class TopKJudge:
    by_token, first_tokens, tokens_per_cut, fingerprint = True, 0, 0, "top-k"

    def __init__(self, tokenizer: Any, k: int) -> None:
        self.k = k
        reference = MinP().load(tokenizer).config.logprobs
        self.config = ValidityConfig(target={}, logprobs=reference, threshold=0.5)

    def scorer(self, tokenizer: Any, end_ids: Collection[int], model: object = None) -> TopKJudge:
        return self

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> None:
        return None

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        def scores(found: TokenLogprobs) -> TokenScores:
            outside = (found.ids[:, None] != found.top_ids[:, : self.k]).all(-1).float() * 20
            doubt = torch.cat([outside.new_tensor([max(carried.doubt, 0.0)]), outside]).cummax(0).values[1:]
            return TokenScores(10 - doubt, doubt)

        return token_verdict(reading, self.k, scores, torch.sigmoid)


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.setitem(RULES, "top_k", TopK)  # the line of the registry
    return find_rule("top_k:k=4")


def test_a_registered_judge_answers_in_this_process_and_over_servers(make_engine, connect, rule):
    given = make_engine()
    engine = ParseEngine.from_models(given.target, given.draft, rule.load(given.target.tokenizer))
    coordinator, *_ = connect(engine)
    for settings in ({}, {"block_tokens": 6}, {"block_tokens": "whole"}):
        found = [each.generate(PROMPT, max_new_tokens=30, **settings) for each in (engine, coordinator)]
        assert found[0].token_ids == found[1].token_ids and found[0].stats.accepted_tokens
    assert engine.score(PROMPT, "He has 5.").validity is not None


@pytest.mark.parametrize("judge", [*RULES_OF_TOKENS, "fly:entropy=0.05,window=1"])
def test_a_rule_answers_in_this_process_and_over_servers(make_engine, connect, judge: str):
    given = make_engine(noise=0.2)
    rule = find_rule(judge)
    engine = ParseEngine.from_models(given.target, given.draft, rule.load(given.target.tokenizer))
    coordinator, *_ = connect(engine)
    for settings in ({"block_tokens": 6}, {"block_tokens": "whole"}):
        found = [each.generate(PROMPT, max_new_tokens=24, **settings) for each in (engine, coordinator)]
        assert found[0].token_ids == found[1].token_ids and found[0].stats.accepted_tokens
    lengths = {each.backend.replayable("auto") for each in (engine, coordinator)}
    assert lengths == {REPLAYED if judge.startswith("fly") else "auto"}, "FLy's verdicts depend on where blocks end"
    assert engine.threshold == rule.threshold and engine.describe()["adapter"] == rule.fingerprint


@pytest.mark.slow
def test_a_floor_below_a_trained_judge(make_engine, connect):
    """A kept token needs both, in this process and over servers."""
    given = make_engine(noise=0.3)
    adapter, floor = given.backend.judge, find_rule("min_p:ratio=0.4")
    engine = ParseEngine.from_models(given.target, given.draft, FlooredJudge(adapter, floor))
    coordinator, *_ = connect(engine)
    rule = ParseEngine.from_models(given.target, given.draft, floor.load(given.target.tokenizer))
    differs = 0
    for threshold in (0.3, 0.5):
        settings = {"max_new_tokens": 30, "threshold": threshold, "block_tokens": 6}
        answers = [each.generate(PROMPT, **settings) for each in (engine, coordinator)]
        assert answers[0].token_ids == answers[1].token_ids
        scores = {}
        for name, each in (("both", engine), ("adapter", given), ("floor", rule)):
            scores[name] = [s.validity for s in each.score(PROMPT, answers[0].text, cut_policy=EVERY).segments]
        for both, own, ratio in zip(*scores.values(), strict=True):
            assert both == (pytest.approx(own, abs=1e-6) if ratio >= 0.4 else 0.0)
        differs += sum(ratio < 0.4 for ratio in scores["floor"])
        free = given.generate(PROMPT, **settings)
        differs += free.token_ids != answers[0].token_ids
    assert differs, "the floor must reject something"
    described = engine.describe()["adapter"]
    assert described == f"{adapter.fingerprint}, min-p at 0.4" and engine.threshold == given.threshold
    assert engine.train_problems == given.train_problems


def test_names_and_options_are_read(rule):
    assert rule == TopK(k=4) and find_rule("top_k") == TopK() and find_rule(None) is None
    with pytest.raises(ValueError, match="'top' is not a judge; did you mean 'top_k'"):
        find_rule("top")
    with pytest.raises(ValueError, match="'kk' is no option of the judge top_k"):
        find_rule("top_k:kk=1")
    with pytest.raises(ValueError, match="k of the judge top_k is 'many'; it must be a number"):
        find_rule("top_k:k=many")
    with pytest.raises(ValueError, match="k of the judge top_k was given twice: give one"):
        find_rule("top_k:k=1,k=2")
    with pytest.raises(ValueError, match=r"judge is 0\.3; give a name such as"):
        find_rule(0.3)
