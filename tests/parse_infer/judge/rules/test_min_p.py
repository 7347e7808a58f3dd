"""The judge without training: every token of an answer is one that the target's min-p sampling offers."""

from __future__ import annotations

import math

import pytest
import torch

from parse_infer.backends.local.load import load_backend
from parse_infer.engine import ParseEngine
from parse_infer.judge.carried import Carried
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.rules.rule import RuleJudge
from parse_infer.judge.token_logprobs import TokenLogprobs

PROMPTS = ["Tom has 5 apples.", "How many?", "Ann sells 48 clips.", "2 + 2"]


@pytest.fixture
def min_p_engine(make_engine):
    """`min_p_engine(min_p)`: tiny random models, and the judge."""

    def make(min_p: float, noise: float = 0.3) -> ParseEngine:
        engine = make_engine(noise)
        return ParseEngine.from_models(engine.target, engine.draft, MinP(min_p).load(engine.target.tokenizer))

    return make


def ratios(engine: ParseEngine, prompt: str, answer: list[int]) -> list[float]:
    """The probability of each token of an answer, relative to the target's first choice."""
    context = engine.target.render(prompt)
    with torch.inference_mode():
        logits = engine.target.model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].double()
    gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return (-gaps).exp().tolist()


def test_the_validity_is_the_lowest_ratio_so_far(tokenizer):
    own, first = torch.tensor([-0.5, -1.0, -0.1, -2.0]), torch.tensor([[-0.5], [-0.7], [-0.1], [-0.2]])
    found = TokenLogprobs(torch.tensor([4, 5, 6, 7]), own, torch.tensor([[4], [9], [6], [8]]), first)
    judge = RuleJudge(MinP(), tokenizer)
    scores = judge.token_scores(found, Carried())
    expected = [1.0, math.exp(-0.3), math.exp(-0.3), math.exp(-1.8)]
    assert scores.logits.sigmoid().tolist() == pytest.approx(expected, abs=1e-6)
    half = TokenLogprobs(found.ids[2:], own[2:], found.top_ids[2:], first[2:])
    carried = scores.carried(2, 2)
    assert judge.token_scores(half, carried).logits.sigmoid().tolist() == pytest.approx(expected[2:], abs=1e-6)


@pytest.mark.parametrize("block_tokens", ["auto", 5, "whole"])
@pytest.mark.slow
def test_every_token_is_at_least_so_likely_and_corrections_are_first_choices(min_p_engine, block_tokens):
    engine = min_p_engine(0.3)
    kept_others = 0
    for prompt in PROMPTS:
        found = engine.generate(prompt, max_new_tokens=48, block_tokens=block_tokens)
        likely, start = ratios(engine, prompt, found.token_ids), 0
        assert min(likely) >= 0.3 - 1e-4
        for span in found.spans:
            part, start = likely[start : start + span.n_tokens], start + span.n_tokens
            kept_others += sum(ratio < 1 - 1e-4 for ratio in part) if span.source == "draft" else 0
            assert span.source == "draft" or part == pytest.approx([1.0] * len(part), abs=1e-4)
        if block_tokens != "whole":
            assert found.token_ids == engine.generate(prompt, max_new_tokens=48, block_tokens=7).token_ids
    assert kept_others or block_tokens == "whole", "the models must differ for this test"


@pytest.mark.slow
def test_at_one_the_answer_is_the_greedy_targets(min_p_engine):
    engine = min_p_engine(1.0)
    for prompt in PROMPTS:
        wanted = engine.generate_target(prompt, max_new_tokens=48).token_ids
        assert engine.generate(prompt, max_new_tokens=48).token_ids == wanted


def test_at_one_a_token_as_likely_as_the_first_choice_is_rejected(tokenizer):
    """Greedy decoding would not write it."""
    own = torch.tensor([-0.7, -0.7])
    found = TokenLogprobs(torch.tensor([4, 9]), own, torch.tensor([[4], [8]]), own[:, None])
    first, tie = RuleJudge(MinP(), tokenizer).token_scores(found, Carried()).logits.sigmoid().tolist()
    assert first == 1 > tie > 0.9999


@pytest.mark.slow
def test_a_request_may_have_a_threshold_of_its_own(min_p_engine):
    lenient, strict = min_p_engine(0.2), min_p_engine(0.9)
    for prompt in PROMPTS:
        wanted = strict.generate(prompt, max_new_tokens=48).token_ids
        assert lenient.generate(prompt, max_new_tokens=48, threshold=0.9).token_ids == wanted
    score = lenient.score(PROMPTS[0], lenient.generate(PROMPTS[0], max_new_tokens=48).text)
    assert all(0 < segment.validity <= 1 for segment in score.segments)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"judge": "min_p:ratio=0"}, "the ratio of min_p is 0.0; it must be above 0 and at most 1"),
        ({"judge": "min_p:ratio=1.5"}, "the ratio of min_p is 1.5; it must be above 0 and at most 1"),
        ({"judge": "zero_shot", "adapter": "zoo:adapter"}, "judge 'zero_shot' were both given: choose one, or give"),
        ({"judge": "min_q"}, "'min_q' is not a judge; did you mean 'min_p'"),
    ],
)
def test_wrong_judges_are_refused_before_models_are_loaded(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_backend("no/model", **options)
    with pytest.raises(ValueError, match=sentence):
        ParseEngine.from_pretrained("zoo:target", backend="vllm", target_url="http://127.0.0.1:9", **options)
