"""The judge on log-probabilities: what it reads, what it carries, and its files."""

from __future__ import annotations

import math
import random

import pytest
import torch

from parse_infer.judge import token_logprobs
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig, LogprobScorer, pool_doubt
from parse_infer.judge.token_logprobs import (
    TokenLogprobs,
    TokenTexts,
    certain_features,
    n_features,
    read_logprobs,
)
from parse_infer.judge.verifier import Verifier
from parse_infer.models.architecture import output_layer
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import Segmenter

CONTEXT, DRAFT = [5, 9, 31, 7], [random.Random(3).randrange(1, 250) for _ in range(150)]


@pytest.fixture
def found(model) -> TokenLogprobs:
    """Log-probabilities of `DRAFT`, from the model's own forward."""
    with torch.inference_mode():
        states = model.base_model(torch.tensor([CONTEXT + DRAFT])).last_hidden_state[0, len(CONTEXT) - 1 : -1]
    return read_logprobs(states, torch.tensor(DRAFT), output_layer(model), k=3)


def test_log_probabilities_are_those_of_the_whole_vocabulary(model, found):
    with torch.inference_mode():
        logits = model(torch.tensor([CONTEXT + DRAFT])).logits[0, len(CONTEXT) - 1 : -1]
    own = logits.log_softmax(-1)
    assert found.own.tolist() == pytest.approx(own.gather(-1, torch.tensor(DRAFT)[:, None])[:, 0].tolist(), abs=1e-4)
    assert torch.equal(found.top_ids, own.topk(3).indices)
    assert torch.equal(found.is_greedy_choice, own.argmax(-1) == torch.tensor(DRAFT))


def test_parts_of_a_long_draft_are_read_alike(model, found, monkeypatch):
    monkeypatch.setattr(token_logprobs, "_ROWS", 64)
    monkeypatch.setattr(token_logprobs, "_CACHED_LOGITS", 3000)
    with torch.inference_mode():
        states = model.base_model(torch.tensor([CONTEXT + DRAFT])).last_hidden_state[0, len(CONTEXT) - 1 : -1]
    parts = read_logprobs(states, torch.tensor(DRAFT), output_layer(model), k=3)
    assert torch.equal(parts.top_ids, found.top_ids)
    torch.testing.assert_close((parts.own, parts.top), (found.own, found.top), atol=1e-5, rtol=0)


def test_of_equal_choices_the_greedy_one_comes_first():
    flat = torch.nn.Linear(4, 100)
    torch.nn.init.zeros_(flat.bias)
    found = read_logprobs(torch.zeros(3, 4), torch.tensor([0, 1, 99]), flat, k=5)
    assert found.top_ids[:, 0].tolist() == [0, 0, 0] and found.is_greedy_choice.tolist() == [True, False, False]


def test_features_are_finite_whatever_an_engine_reports():
    infinite, ids = torch.tensor([-float("inf"), 0.0]), torch.tensor([4, 5])
    top = torch.tensor([[0.0, -float("inf")], [0.0, -9999.0]])
    features = TokenLogprobs(ids, infinite, torch.tensor([[7, 8], [5, 6]]), top).features
    assert features.shape == (2, n_features(2)) and features.isfinite().all()
    assert torch.equal(features[1], certain_features(1, 2)[0])  # the first choice, without doubt


def test_untrained_the_doubt_is_the_gap_to_the_first_choice(tokenizer, found):
    judge = LogprobScorer(LogprobHead(LogprobHeadConfig(k=3)), TokenTexts(tokenizer, (), 8192))
    gap = found.top[:, 0] - found.own - 3
    expected = gap.masked_fill(found.is_greedy_choice, -torch.inf).logcumsumexp(0)
    assert judge.token_scores(found, Carried()).doubt.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_sharp_judge_does_not_doubt_an_answer_for_its_length(tokenizer):
    """2,000 alike tokens, half of them not the target's first choice, in blocks of 8: as valid as 200 of them."""

    def alike(n: int) -> TokenLogprobs:
        top = torch.tensor([[-0.2, -3.0, -4.0]] * n)
        return TokenLogprobs(torch.tensor([12, 13] * (n // 2)), top[:, 0] - 0.1, torch.tensor([[13, 1, 2]] * n), top)

    lost = {}
    for sharpness in (1.0, 8.0):
        judge = LogprobScorer(
            LogprobHead(LogprobHeadConfig(k=3, sharpness=sharpness)), TokenTexts(tokenizer, (), 8192)
        )
        carried, logits = Carried(), []
        for start in range(0, 2000, 8):
            scores = judge.token_scores(alike(8), carried)
            logits += scores.logits.tolist()
            carried = scores.carried(start + 8, 8)
        whole = judge.token_scores(alike(2000), Carried()).logits
        assert logits == pytest.approx(whole.tolist(), abs=1e-4)
        assert (whole.diff() <= 1e-6).all(), "a longer prefix is more valid"
        lost[sharpness] = logits[199] - logits[-1]
    assert lost == pytest.approx({1.0: math.log(10), 8.0: math.log(10) / 8}, abs=0.02)


def test_pooled_doubt_lies_between_the_highest_doubt_and_the_sum():
    doubt = torch.tensor([[-3.0, -30.0, 1.0, 1.0, -2.0]])
    assert pool_doubt(doubt, 1.0).exp().tolist() == [pytest.approx(doubt.exp().cumsum(-1)[0].tolist(), rel=1e-5)]
    sharp = pool_doubt(doubt, 50.0)
    torch.testing.assert_close(sharp, doubt.cummax(-1).values, atol=0.02, rtol=0)


def test_the_targets_own_tokens_add_no_doubt_and_are_remembered(model, tokenizer, random_adapter, found):
    judge = LogprobScorer(random_adapter(model).head, TokenTexts(tokenizer, (), 64))
    carried, parts = Carried(0, 0.3), []
    for written in ([], [12, 13]):
        parts.append(judge.token_scores(found, carried, written))
    assert parts[0].doubt[0] != parts[1].doubt[0], "the tokens before make no difference"
    certain = TokenLogprobs(
        torch.tensor([12, 13]),
        torch.zeros(2),
        torch.tensor([[12, 1, 1], [13, 1, 1]]),
        torch.tensor([[0.0, -99, -99]] * 2),
    )
    first = judge.token_scores(certain, carried)
    assert first.doubt.tolist() == pytest.approx([0.3, 0.3])
    after = Carried(2, 0.3, tuple(first.memory[-1].tolist()))
    assert judge.token_scores(found, after).logits.tolist() == pytest.approx(parts[1].logits.tolist(), abs=1e-5)


def test_whole_drafts_have_the_verdicts_of_blocks(model, tokenizer, random_adapter):
    verifier = Verifier(Decoder(model, ()), random_adapter(model), Segmenter(tokenizer))
    verifier.decoder.seek(CONTEXT)
    whole = verifier.verify(DRAFT, [0, 10, 77, 150])
    verifier.decoder.seek(CONTEXT)
    block = verifier.verify_block(DRAFT)
    assert whole.validity == pytest.approx([1.0, *(block.validity[cut - 1] for cut in (10, 77, 150))], abs=1e-5)
    assert whole.is_greedy_choice is not None


def test_a_saved_judge_scores_alike(model, tokenizer, random_adapter, tmp_path):
    judge = random_adapter(model)
    loaded = ValidityAdapter.from_pretrained(judge.save_pretrained(tmp_path / "judge"), model)
    assert loaded.fingerprint == judge.fingerprint
    assert {path.name for path in (tmp_path / "judge").iterdir()} == {
        "README.md",
        "validity_config.json",
        "validity_head.safetensors",
    }
    verifiers = [Verifier(Decoder(model, ()), one, Segmenter(tokenizer)) for one in (judge, loaded)]
    for verifier in verifiers:
        verifier.decoder.seek(CONTEXT)
    first, second = (verifier.verify_block(DRAFT).validity for verifier in verifiers)
    assert first == second


def test_a_token_is_known_by_its_text():
    class Texts:
        def decode(self, ids: list[int]) -> str:
            return {1: "12", 2: " plus", 3: "=", 4: ".\n", 5: "</s>"}[ids[0]]

    texts = TokenTexts(Texts(), {5}, 1000)
    values, offsets, flags = texts.of([1, 2, 3, 4, 5])
    assert offsets.tolist()[0] == 0 and int(values.max()) < 1000
    assert flags.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
