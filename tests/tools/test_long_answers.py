"""Joined drafts: scored as one text, and right only if all of them are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_tools.labels.logprobs import ReadDraft
from data_tools.labels.rows import LabelledDraft
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig, LogprobScorer
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts
from parse_infer.models.names import resolve
from tools.long_answers import JOINED, held_out, join, main, measure, validities

CONFIG = ValidityConfig(target={}, logprobs={})


def draft(number: int, *, right: bool, length: int = 6) -> ReadDraft:
    """Tokens that are the target's first choice, but for one: a likely one if the draft is right."""
    ids, first = torch.full((length,), 12), torch.full((length, 1), 12)
    first[2] = 13
    own = torch.full((length,), -0.1)
    own[2] = -0.5 if right else -12.0
    top = torch.tensor([-0.1, -2.0, -3.0]).expand(length, 3)
    row = LabelledDraft("here", f"p{number}", ["x"], [right], [None], [1.0], draft_ids=ids.tolist(), cuts=[length])
    return ReadDraft(row, TokenLogprobs(ids, own, torch.cat([first, torch.tensor([[1, 2]] * length)], 1), top))


@pytest.fixture
def judge(tokenizer: PreTrainedTokenizerFast) -> LogprobScorer:
    return LogprobScorer(LogprobHead(LogprobHeadConfig(k=2)), TokenTexts(tokenizer, (), 8192))


def test_joined_drafts_are_scored_as_one_text(judge: LogprobScorer) -> None:
    drafts = [draft(i, right=i != 1, length=4 + i) for i in range(4)]
    found = validities(judge, CONFIG, drafts)
    assert found == sorted(found, reverse=True) and found[0] > 0.5 > found[1]
    for n in range(1, 5):
        text = join(drafts[:n], judge.k)
        assert len(text.ids) == sum(4 + i - 1 for i in range(n)), "the end tokens stay out"
        assert text.top.shape[1] == 2
        whole = judge.token_scores(text, Carried(usual=True)).logits[-1].sigmoid()
        assert found[n - 1] == pytest.approx(float(whole), abs=1e-5)


@pytest.mark.slow
def test_a_text_is_right_if_all_its_drafts_are(judge: LogprobScorer) -> None:
    rows = measure(judge, CONFIG, [draft(i, right=i % 5 > 0) for i in range(100)], texts=400)
    assert [int(row[0]) for row in rows] == list(JOINED)
    assert [float(row[1]) for row in rows] == [5 * n for n in JOINED]
    for n, row in zip(JOINED, rows, strict=True):
        assert float(row[2]) == pytest.approx(100 * 0.8**n, abs=8)
        assert row[-1] in ("", "100.0"), "a text with a wrong draft counts as likely"
    assert int(rows[0][5]) == pytest.approx(4 * float(rows[0][2]), abs=0.5), "a right draft does not count as likely"


def test_only_whole_drafts_of_problems_that_the_judge_never_saw_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again, cut, learnt = (draft(i, right=True) for i in (0, 0, 1, 2))
    cut, learnt = (
        replace(cut, row=replace(cut.row, cuts=[4])),
        replace(learnt, row=replace(learnt.row, prompt="learnt")),
    )
    monkeypatch.setattr("tools.long_answers.read_drafts", lambda folder: iter([whole, cut, learnt, again]))
    (found,) = held_out(["one", "two"], frozenset({prompt_hash("learnt")}))
    assert found is whole
    assert held_out(["one"], frozenset({prompt_hash("learnt"), whole.row.problem})) == [], "older adapters list ids"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--adapter", "zoo:adapter"], "nowhere"),
        (["empty", "--adapter", "zoo:adapter"], "0 held-out drafts are too few: 8 are needed for one text"),
        (["empty", "--adapter", "zoo:adapter", "--texts", "0"], "--texts is 0; it must be at least 1"),
        (["other", "--adapter", "zoo:adapter"], "does not fit 'another': it expects hidden_size 256, not 8"),
        (["empty", "--adapter", "zoo:none"], "'zoo:none' is not an embedded model"),
        (
            ["empty", "--adapter", "judge"],
            "judge reads hidden states: name the one it was trained from, runs/log",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_model,
    random_adapter,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "logprobs").mkdir(parents=True)
    (tmp_path / "empty" / "logprobs" / "info.json").write_text(json.dumps({"k": 3}))
    target = {**read_adapter(resolve("zoo:adapter")).validity_config["target"], "name": "another", "hidden_size": 8}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "build.json").write_text(json.dumps({"config": {}, "models": {"target": target}}))
    random_adapter(make_model("llama"), stream=True).save_pretrained(tmp_path / "judge")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.strip().splitlines()) == 1
