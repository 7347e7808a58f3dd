"""Answers that must be the target's own are, for fewer forwards."""

from __future__ import annotations

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.engine.thresholds import PROMPT
from tests.parse_infer.language_models import (
    language_model,
    resembling,
)


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("keep_greedy_match", [True, False])
def test_threshold_above_one_is_the_greedy_target(engine, block_tokens, keep_greedy_match):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    ours = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.01, block_tokens=block_tokens, keep_greedy_match=keep_greedy_match
    )
    assert ours.token_ids == alone.token_ids and len(ours.token_ids) == 40
    assert ours.text == alone.text and ours.finish_reason == alone.finish_reason
    if not keep_greedy_match:
        assert ours.stats.accepted_tokens == 0


def test_above_one_only_the_greedy_match_takes_a_second_draft(engine):
    """Without it a second draft would be dropped like the first."""
    settings = GenerationSettings(40, threshold=1.01, keep_greedy_match=False)
    blocks, whole = (engine.generate(PROMPT, settings, block_tokens=n) for n in (4, "whole"))
    assert blocks.token_ids == whole.token_ids and blocks.stats == whole.stats, (blocks.stats, whole.stats)
    for lossless in ({"keep_greedy_match": True}, {"mode": "exact"}):
        found = engine.generate(PROMPT, settings, block_tokens=4, **lossless)
        assert found.stats.rounds > 1 and found.token_ids == whole.token_ids


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_drafts_that_cannot_be_kept_are_not_written(engine, block_tokens, sampling):
    settings = GenerationSettings(40, threshold=1.01, block_tokens=block_tokens, resume_sampling=sampling)
    engine.backend.target_drafter = load_token_drafter("draft:tokens=4", engine.target, engine.draft)
    ours, lossless = engine.generate(PROMPT, settings), engine.generate_target(PROMPT, settings, speculate=True)
    assert ours.token_ids == lossless.token_ids and len(ours.token_ids) == 40
    assert (ours.stats.draft_tokens, ours.stats.target_forwards) == (0, lossless.stats.target_forwards)
    greedy = sampling.greedy  # else no token can be kept as the target's own choice
    given = engine.generate(PROMPT, settings, draft_text="Tom has 4.")
    assert bool(given.stats.draft_tokens) == greedy
    assert engine.generate(PROMPT, settings, threshold=1.0).stats.draft_tokens
    engine.backend.target_drafter = load_token_drafter("lookup", engine.target)
    assert bool(engine.generate(PROMPT, settings).stats.draft_tokens) == greedy  # it proposes less than a draft


@pytest.mark.parametrize("block_tokens", ["whole", 6])
def test_exact_mode_is_the_greedy_target_for_fewer_forwards(engine, block_tokens):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    ours = engine.generate(PROMPT, max_new_tokens=40, mode="exact", block_tokens=block_tokens)
    assert ours.token_ids == alone.token_ids
    assert 0 < ours.stats.acceptance_rate < 1
    assert ours.stats.target_forwards < alone.stats.target_forwards
    assert (ours.stats.rounds > 1) == (block_tokens != "whole")


def test_exact_mode_needs_no_judge(make_engine):
    engine = make_engine()
    bare = ParseEngine.from_models(engine.target, engine.draft)
    ours = bare.generate(PROMPT, max_new_tokens=30, mode="exact")
    assert ours.token_ids == bare.generate_target(PROMPT, max_new_tokens=30).token_ids
    with pytest.raises(ValueError, match="has no judge"):
        bare.generate(PROMPT, threshold=0.5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_without_a_judge_an_answer_is_lossless_speculation(make_engine, mixed_engine, sampling):
    for given in (make_engine(), mixed_engine):
        bare = ParseEngine.from_models(given.target, given.draft)
        ours = bare.generate(PROMPT, max_new_tokens=30, resume_sampling=sampling)
        assert ours.lossless
        if sampling.greedy:
            assert ours.token_ids == bare.generate_target(PROMPT, max_new_tokens=30).token_ids
        bare.check(PROMPT)


def test_an_answer_tells_whether_a_judge_decided(engine):
    assert not engine.generate(PROMPT, max_new_tokens=8).lossless
    assert engine.generate(PROMPT, max_new_tokens=8, threshold=2).lossless
    assert engine.generate_target(PROMPT, max_new_tokens=8).lossless
    assert not engine.generate_draft(PROMPT, max_new_tokens=8).lossless


def test_every_architecture_keeps_both_promises(make_model, tokenizer, random_adapter, architecture):
    model = make_model(architecture)
    draft = language_model(resembling(make_model, model, 0.1, architecture), tokenizer)
    engine = ParseEngine.from_models(language_model(model, tokenizer), draft, random_adapter(model))
    alone = engine.generate_target(PROMPT, max_new_tokens=20)  # prompt and answer are longer than any sliding window
    for threshold, mode in ((1.5, "validity"), (1.0, "validity"), (1.5, "exact")):  # no validity here reaches 1.0
        settings = GenerationSettings(20, threshold, mode=mode, block_tokens=6, keep_greedy_match=False)
        ours = engine.generate(PROMPT, settings)
        assert ours.token_ids == alone.token_ids
        assert ours.stats.rounds > 1 or threshold > 1  # an exact draft may be right throughout


def test_a_threshold_without_a_judge_is_refused_before_models_are_loaded(engine):
    for build in (ParseEngine.from_pretrained, lambda *_, **how: ParseEngine.from_models(engine.target, **how)):
        with pytest.raises(ValueError, match=r"threshold is 0\.5, but no judge was given"):
            build("no/model", threshold=0.5)
    assert (
        ParseEngine.from_models(engine.target, engine.draft, threshold=2.0).generate(PROMPT, max_new_tokens=4).lossless
    )
    with pytest.raises(ValueError, match="judge is 'min_p'; give a ValidityAdapter"):
        ParseEngine.from_models(engine.target, engine.draft, "min_p")


def test_timed_reads_without_a_judge_wait_for_the_device(engine, monkeypatch):
    """Else the clock would measure the launch on a GPU, and blocks would get a wrong length."""
    waits = []
    monkeypatch.setattr("parse_infer.backends.local.pair.wait_for", waits.append)
    rounds = engine.generate(PROMPT, max_new_tokens=20, mode="exact").stats.rounds
    assert len(waits) >= rounds > 0 and set(waits) == {engine.target.decoder.device}
