"""Drafts unlike those of the training: the answer is the target's own, and says so."""

from __future__ import annotations

import pytest
import torch

from parse_infer.decoding.block_length import BlockLength
from parse_infer.engine import ParseEngine
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.judge.usual_drafts import SIZES, UsualDrafts
from parse_infer.request.events import Accepted, Drafted, Verified
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.language_models import cycling, language_model, word_tokenizer

PROMPT = "Tom has 5 apples."
N = 40
HOT = {"draft_sampling": Sampling(1.5, seed=1)}  # a draft model that is not sure
NOTHING = {str(size): [[9.0] * 7, [9.0] * 7] for size in SIZES}  # no draft is like this


def draft(surprise: float, n: int = 20, seed: int = 0) -> TokenLogprobs:
    generator = torch.Generator().manual_seed(seed)
    own = -surprise * torch.rand(n, generator=generator)
    top = torch.stack([own - i for i in range(3)], dim=-1).clamp_max(-0.1)
    return TokenLogprobs(torch.arange(n), own, torch.arange(n)[:, None].expand(n, 3), top)


def test_a_draft_is_usual_between_the_ends_of_the_training_drafts():
    usual = UsualDrafts.of(draft(1.0, seed=seed) for seed in range(200))
    found = [usual.look(draft(1.0, seed=seed))[0] for seed in range(200, 400)]
    assert sum(map(bool, found)) >= 190
    assert not any(usual.look(draft(5.0, seed=seed))[0] for seed in range(20))
    again = UsualDrafts.from_dict(usual.to_dict())
    assert [again.look(draft(1.0, seed=seed))[0] for seed in range(200, 400)] == found


def test_short_blocks_are_looked_at_together():
    usual = UsualDrafts.of(draft(1.0, seed=seed) for seed in range(200))
    for surprise, expected in ((1.0, True), (5.0, False)):
        whole, seen, found = draft(surprise, seed=300), (), None
        for start in range(0, 20, 3):
            parts = (part[start : start + 3] for part in (whole.ids, whole.own, whole.top_ids, whole.top))
            assert found is None and len(seen) == (8 if start else 0)
            found, seen = usual.look(TokenLogprobs(*parts), seen)
            if found is not None:
                break
        assert found is expected and start == 6 and seen == ()


def test_tokens_beyond_the_size_of_a_range_do_not_count():
    """The means of more tokens vary less, and along a draft they drift."""
    usual = UsualDrafts.of(draft(1.0, seed=seed) for seed in range(200))
    first, later = draft(1.0, n=8, seed=300), draft(5.0, n=7)
    parts = [torch.cat([getattr(one, name) for one in (first, later)]) for name in ("ids", "own", "top_ids", "top")]
    assert usual.look(first) == usual.look(TokenLogprobs(*parts)) == (True, ())
    found, seen = usual.look(TokenLogprobs(*(part[:5] for part in parts)))
    assert found is None and usual.look(TokenLogprobs(*(part[5:] for part in parts)), seen) == (True, ())


def test_too_few_drafts_have_no_range():
    assert UsualDrafts.of(draft(1.0, seed=seed) for seed in range(20)).look(draft(5.0)) == (True, ())


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("block_tokens", ["auto", 8, 20, "whole"])
def test_of_an_unusual_draft_only_the_targets_own_tokens_are_kept(
    make_engine, random_adapter, threshold, block_tokens
):
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    settings = {"max_new_tokens": N, "threshold": threshold, "block_tokens": block_tokens}
    free = ParseEngine.from_models(engine.target, engine.draft, judge).generate(PROMPT, **settings)
    assert free.fallback is None
    judge.config.logprobs["usual"] = NOTHING
    found = ParseEngine.from_models(engine.target, engine.draft, judge).generate(PROMPT, **settings)
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert found.fallback == "unusual_draft"
    assert found.stats.accepted_tokens, "tokens equal to the target's are still worth drafting"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measured_times_decide_about_no_sampled_text(make_engine, random_adapter, monkeypatch, temperature):
    """A pause leaves a greedy text as it is: only the target's first choices are kept. A sampled one would change."""
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    judge.config.logprobs["usual"] = NOTHING
    monkeypatch.setattr(BlockLength, "next_pause", lambda length: 4)
    engine = ParseEngine.from_models(engine.target, engine.draft, judge)
    *events, done = engine.stream(
        PROMPT,
        max_new_tokens=N,
        block_tokens="auto",
        adaptive=False,
        temperature=temperature,
        seed=1,
        draft_temperature=0,
    )
    assert done.generation.fallback == "unusual_draft"
    paused = [event for event in events if isinstance(event, Drafted) and not event.n_tokens]
    assert bool(paused) is (temperature == 0)


@pytest.mark.parametrize("block_tokens", ["auto", 3, 20, "whole"])
def test_an_unusual_draft_has_no_validity(make_engine, random_adapter, block_tokens):
    """Nor do the first blocks of such a draft, which are too short to tell."""
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    judge.config.logprobs["usual"] = NOTHING
    engine = ParseEngine.from_models(engine.target, engine.draft, judge)
    *events, done = engine.stream(PROMPT, max_new_tokens=N, threshold=0.02, block_tokens=block_tokens)
    assert done.generation.fallback == "unusual_draft" and done.generation.stats.accepted_tokens
    assert {span.validity for span in done.generation.spans} == {None}
    verified = [event for event in events if isinstance(event, Verified) and event.segments]
    assert {segment.validity for segment in verified[-1].segments} == {None}


@pytest.mark.parametrize("usual", [None, NOTHING])
def test_a_response_out_of_distribution_is_scored_as_unusual(make_engine, random_adapter, usual):
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    judge.config.logprobs["usual"] = usual
    score = ParseEngine.from_models(engine.target, engine.draft, judge).score(PROMPT, "He has 5 apples.\nSo it is 5.")
    assert score.unusual == (usual is not None)
    assert all((segment.validity is None) == score.unusual for segment in score.segments)
    assert (score.validity is None) == score.unusual
    assert score.first_error is None or not score.unusual


@pytest.mark.slow
def test_a_block_of_which_nothing_is_kept_decides_too(make_engine, random_adapter, monkeypatch):
    """Else later, usual tokens of the same draft model would be judged after all."""
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    judge.config.logprobs["usual"] = NOTHING
    looked: list[bool] = []

    def look(usual, draft, seen=()):
        looked.append(bool(looked))  # the first block is unusual, and no other
        return looked[-1], ()

    monkeypatch.setattr(UsualDrafts, "look", look)
    engine = ParseEngine.from_models(engine.target, engine.draft, judge)
    rejected = 0
    for n in range(5, 13):
        looked.clear()
        events = list(engine.stream(f"Tom has {n} apples.", max_new_tokens=N, threshold=0.02, block_tokens=8))
        assert looked == [False]
        first = next(event for event in events if isinstance(event, Accepted))
        rejected += not first.n_tokens
        own = engine.generate_target(f"Tom has {n} apples.", max_new_tokens=N)
        assert events[-1].generation.token_ids == own.token_ids
    assert rejected, "no first block was rejected as a whole, so this test shows nothing"


@pytest.mark.parametrize("threshold", [0.1, 0.5])
@pytest.mark.slow
def test_whether_a_draft_is_usual_does_not_depend_on_blocks(make_engine, random_adapter, threshold):
    """Blocks of 16 tokens or more, and `auto`, which begins with as many."""
    engine = make_engine()
    judge = random_adapter(engine.target.model)
    ranges = UsualDrafts.of(draft(2.0, seed=seed) for seed in range(200)).to_dict()
    for low, high in ((-9.0, 9.0), (0.3, 9.0)):  # of the entropy; the others have room
        for size in ranges.values():
            size[0], size[1] = [-9.0, -9.0, -9.0, low, -99.0, -9.0, -9.0], [9.0, 9.0, 9.0, high, 9.0, 9.0, 9.0]
        judge.config.logprobs["usual"] = ranges
        own = ParseEngine.from_models(engine.target, engine.draft, judge)
        found = [own.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=b) for b in ("auto", 16, 30)]
        assert len({tuple(one.token_ids) for one in found}) == 1 and len({one.fallback for one in found}) == 1


def test_auto_drafts_as_many_of_the_targets_tokens(make_engine, make_model, random_adapter, monkeypatch):
    """The draft model writes words, and the target reads letters: no block is longer than it must be."""
    engine, words = make_engine(), word_tokenizer()
    drafting = make_model("llama", seed=15, vocab_size=300, eos_token_id=words.eos_token_id)
    drafting = language_model(cycling(drafting, words, " students other the room", PROMPT), words, "draft")
    judge = random_adapter(engine.target.model)
    judge.config.logprobs["usual"] = NOTHING
    own = ParseEngine.from_models(engine.target, drafting, judge)
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: True)
    first = next(event.n_tokens for event in own.stream(PROMPT, max_new_tokens=N, threshold=0.3))
    assert max(SIZES) <= first < 2 * max(SIZES)


def test_auto_drafts_enough_to_know(make_engine, random_adapter):
    engine = make_engine(noise=1.0)
    judge = random_adapter(engine.target.model)
    first = []
    for usual in (None, NOTHING):
        judge.config.logprobs["usual"] = usual
        own = ParseEngine.from_models(engine.target, engine.draft, judge)
        drafted = (e.n_tokens for e in own.stream(PROMPT, max_new_tokens=N, threshold=0.3, **HOT))
        first.append(next(drafted))
    assert first[0] < max(SIZES) <= first[1], first
