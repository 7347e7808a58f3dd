"""Prompts, seeds and blocks of a request, and open streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.request.events import Accepted, Drafted, Resumed, Verified
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.engine.thresholds import PROMPT, greedy, partial_threshold, threshold_of_both
from tests.parse_infer.language_models import (
    TokenCount,
)


def test_a_list_of_prompts_keeps_its_order(engine):
    prompts = ["One.", [{"role": "user", "content": "Two."}], "Three."]
    settings = GenerationSettings(max_new_tokens=10, threshold=0.45)
    together = engine.generate(prompts, settings)
    assert [r.token_ids for r in together] == [engine.generate(p, settings).token_ids for p in prompts]
    assert together[1].token_ids == engine.generate("Two.", settings).token_ids
    assert len({r.text for r in together}) == 3
    assert engine.generate([], settings) == []


@pytest.mark.parametrize(
    ("prompt", "draft_text", "message"),
    [
        ("One.", ["It is 1."], r"A draft text is a text, not \"\['It is 1.'\]\""),
        (["One.", "Two."], ["It is 1.", 2], "A draft text is a text, not '2'"),
        ("One.", 5, "A draft text is a text, not '5'"),
        (["One.", "Two."], 5, "2 prompts need as many draft texts"),
        (b"One.", None, "A prompt is a text or a list of chat messages, not b'One.'"),
    ],
)
def test_what_is_no_text_is_named(engine, prompt, draft_text, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, draft_text=draft_text)
    if not isinstance(prompt, list):
        with pytest.raises(ValueError, match=message):
            list(engine.stream(prompt, draft_text=draft_text))


def test_draft_texts_belong_to_prompts_one_by_one(engine):
    results = engine.generate(["One.", "Two."], draft_text=["It is 1.", "It is 2."], threshold=0.0)
    assert [r.text for r in results] == ["It is 1.", "It is 2."]
    assert all(r.finish_reason == "eos" and r.stats.draft_forwards == 0 for r in results)
    with pytest.raises(ValueError, match="one each"):
        engine.generate(["One.", "Two."], draft_text="It is 1.")
    with pytest.raises(ValueError, match="draft text is"):
        engine.generate("One.", draft_text=" ")


def test_a_rejected_draft_text_leaves_the_greedy_target(engine):
    alone = engine.generate_target(PROMPT, max_new_tokens=20)
    for block_tokens in ("whole", 6):
        ours = engine.generate(PROMPT, draft_text="No.", threshold=1.5, max_new_tokens=20, block_tokens=block_tokens)
        assert ours.token_ids == alone.token_ids
        assert ours.stats.target_forwards == 20


def test_sampling_is_reproducible_by_its_seed(engine):
    def texts(seed: int) -> tuple[str, str]:
        hot = Sampling(temperature=1.5, seed=seed)
        drafted, *_, done = engine.stream(
            PROMPT, max_new_tokens=12, draft_sampling=hot, resume_sampling=hot, threshold=1.0
        )
        return drafted.text, done.generation.text

    assert texts(1) == texts(1)
    assert texts(1)[0] != texts(2)[0] and texts(1)[1] != texts(2)[1]


def test_a_rejected_token_is_not_drawn_again_by_the_noise_that_wrote_it(make_engine):
    """One seed for both models, as `generate --seed` gives it: their random numbers differ all the same."""
    engine = make_engine(noise=0.0)
    hot = Sampling(temperature=50.0, seed=1)  # nearly uniform: the same random numbers would give the same tokens
    for block_tokens in ("whole", 6):
        settings = GenerationSettings(
            16, threshold=1.0, block_tokens=block_tokens, draft_sampling=hot, resume_sampling=hot
        )
        drafts, written = [], []
        for event in engine.stream(PROMPT, settings):
            if isinstance(event, Drafted):
                drafts.append(event.text)
                written.append("")
            elif isinstance(event, Resumed):
                written[-1] += event.text
        assert all(draft[:4] != text[:4] for draft, text in zip(drafts, written, strict=True) if len(text) >= 4)
        assert len({text[:4] for text in written}) == len(written)


@pytest.mark.slow
def test_between_blocks_the_target_writes_its_own_greedy_token(engine):
    prompt = engine.target.render(PROMPT)
    for keep_greedy_match in (True, False):
        settings = {"max_new_tokens": 60, "block_tokens": 6, "keep_greedy_match": keep_greedy_match}
        result = engine.generate(PROMPT, threshold=threshold_of_both(engine, **settings), **settings)
        assert result.stats.rounds > 1
        at = 0
        for span in result.spans:
            if span.validity is None:
                ids = result.token_ids[at : at + span.n_tokens]
                assert ids == greedy(engine, prompt + result.token_ids[:at], span.n_tokens)
            at += span.n_tokens


def test_a_draft_of_one_segment_continues_while_it_holds(engine):
    drafter = ModelDrafter(engine.draft, engine.target, one_segment=engine.backend.segmenter.policy)
    stepwise = ParseEngine.from_models(engine.target, engine.draft, engine.backend.judge, drafter=drafter)
    whole = engine.generate(PROMPT, max_new_tokens=20, threshold=0.0)
    ours = stepwise.generate(PROMPT, max_new_tokens=20, threshold=0.0)
    assert ours.token_ids == whole.token_ids
    assert (ours.stats.rounds, ours.stats.target_forwards) == (5, 5)  # a segment has 4 tokens
    assert all(span.source == "draft" for span in ours.spans)


def test_segments_are_judged_as_parts_of_their_answer(make_engine, random_adapter):
    """A judge of tokens reads the accepted segments as drafts, not as the target's own tokens."""
    base = make_engine()
    judge = random_adapter(base.target.model)
    engine = ParseEngine.from_models(base.target, base.draft, judge)
    drafter = ModelDrafter(base.draft, base.target, one_segment=engine.backend.segmenter.policy)
    stepwise = ParseEngine.from_models(base.target, base.draft, judge, drafter=drafter)
    settings = {"max_new_tokens": 20, "threshold": 0.0, "block_tokens": "whole"}
    whole, steps = (
        [s.validity for e in each.stream(PROMPT, **settings) if isinstance(e, Verified) for s in e.segments]
        for each in (engine, stepwise)
    )
    assert len(set(whole)) > 2 and steps == pytest.approx(whole, abs=1e-4)


def test_the_targets_tokens_are_not_sampled_with_the_same_randomness(engine):
    hot = Sampling(temperature=50.0, seed=1)  # nearly uniform: the same random numbers would give the same tokens
    settings = GenerationSettings(max_new_tokens=16, threshold=1.0, block_tokens=6, resume_sampling=hot)
    ids = engine.generate(PROMPT, settings).token_ids
    assert len(set(ids)) > 8


def test_another_request_ends_an_open_stream(engine):
    stream = engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False)
    next(event for event in stream if isinstance(event, Resumed))
    alone = engine.generate_target("Other.", max_new_tokens=5)
    with pytest.raises(RuntimeError, match="another request"):
        list(stream)
    assert engine.generate_target("Other.", max_new_tokens=5).token_ids == alone.token_ids


@pytest.mark.parametrize("kind", [Drafted, Verified, Accepted, Resumed])
@pytest.mark.parametrize("other", ["generate", "stream", "score"])
def test_another_request_ends_an_open_stream_wherever_it_stands(engine, kind, other):
    settings = GenerationSettings(20, threshold=partial_threshold(engine), block_tokens=6, keep_greedy_match=False)
    stream = engine.stream(PROMPT, settings)
    next(event for event in stream if isinstance(event, kind))
    if other == "generate":
        engine.generate("Other.", max_new_tokens=2)
    elif other == "stream":
        next(engine.stream("Other."))
    else:
        engine.score("Other.", "It is 1.")
    with pytest.raises(RuntimeError, match="another request"):
        list(stream)


@pytest.mark.parametrize("kind", [Drafted, Verified, Accepted, Resumed])
def test_what_runs_no_model_leaves_an_open_stream_alone(engine, kind):
    """A check, a request that was only prepared, and requests that are refused."""
    settings = GenerationSettings(20, threshold=partial_threshold(engine), block_tokens=6, keep_greedy_match=False)
    expected = engine.generate(PROMPT, settings)
    stream = engine.stream(PROMPT, settings)
    next(event for event in stream if isinstance(event, kind))
    engine.check("Other.", settings)
    engine.check("Other.", settings, "A draft.")
    prepared = engine.stream("Other.", settings)
    with pytest.raises(ValueError, match="context window"):
        engine.generate(["Other.", "x" * 3000])
    with pytest.raises(ValueError, match="context window"):
        engine.score(PROMPT, "x" * 3000)
    *_, done = stream
    assert (done.generation.text, done.generation.spans) == (expected.text, expected.spans)
    *_, done = prepared
    assert done.generation.text == engine.generate("Other.", settings).text


def test_the_forwards_of_the_draft_model_count_whatever_it_does(engine):
    guided = ParseEngine.from_models(
        engine.target,
        engine.draft,
        engine.backend.judge,
        target_drafter=load_token_drafter("draft", engine.target, engine.draft),
    )
    with TokenCount(engine.draft.model) as draft:
        text = guided.generate(PROMPT, max_new_tokens=12, draft_text="No.", threshold=1.5).stats
    assert text.draft_forwards == len(draft.widths) > 0
    with TokenCount(engine.draft.model) as draft:
        alone = guided.generate_target(PROMPT, max_new_tokens=12, speculate=True).stats
    assert alone.draft_forwards == len(draft.widths) > 0


def test_a_dropped_stream_leaves_the_engine_usable(engine):
    stream = engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False)
    next(event for event in stream if isinstance(event, Resumed))
    stream.close()
    expected = engine.generate_target(PROMPT, max_new_tokens=10).token_ids
    assert engine.generate(PROMPT, max_new_tokens=10, threshold=1.5).token_ids == expected


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ending", ["close", "collected"])
def test_a_dropped_stream_ends_without_waiting(engine, ending, adaptive):
    """Another thread holds the models for as long as it likes; an event loop or the garbage collector goes on."""
    streams = [engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False, adaptive=adaptive)]
    next(event for event in streams[0] if isinstance(event, Resumed))
    working, dropped = Event(), Event()

    def hold() -> bool:
        working.set()
        return not dropped.wait(20)  # interrupts the work below where nothing is dropped

    def drop() -> None:
        streams[0].close() if ending == "close" else streams.clear()
        dropped.set()

    with ThreadPoolExecutor(2) as pool:
        with engine.backend.cancellable(hold):
            other = pool.submit(engine.generate, "Other.", max_new_tokens=6, threshold=1.5, adaptive=adaptive)
            assert working.wait(20)
            pool.submit(drop)
            found = other.result()  # Interrupted: the drop has waited for the models
        assert found.token_ids == engine.generate_target("Other.", max_new_tokens=6).token_ids
    expected = engine.generate_target(PROMPT, max_new_tokens=10).token_ids
    assert engine.generate(PROMPT, max_new_tokens=10, threshold=1.5, adaptive=adaptive).token_ids == expected
