"""Answers that come in blocks: the same text for every length of blocks, corrected by the target's own tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from data_tools.tasks.task import Problem
from parse_infer.calibration.measure import calibrate
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.schema import Calibration, OperatingPoint
from parse_infer.calibration.schema import TestedPoint as Point
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.decoding.block_length import REPLAYED, BlockLength, threshold_class
from parse_infer.engine import ParseEngine
from parse_infer.judge.carried import Carried
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.request.events import Accepted, Done, Drafted, Resumed, Verified
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.cuts import Segmenter
from tests.parse_infer.language_models import (
    cycling,
    language_model,
    llama_tokenizer,
    printable,
    reduced_pair,
    resembling,
    word_tokenizer,
)

PROMPT = "Tom has 5 apples."
N = 48
LENGTHS = (1, 3, 7, 64, "auto")


@pytest.fixture
def make_block_engine(make_model, tokenizer, random_adapter) -> Callable[..., ParseEngine]:
    """An engine whose judge scores tokens, with a draft model that resembles the target."""

    def make(architecture: str = "llama", noise: float = 0.3, stream: bool = False) -> ParseEngine:
        model = make_model(architecture)
        draft = resembling(make_model, model, noise, architecture)
        pair = language_model(model, tokenizer, "target"), language_model(draft, tokenizer, "draft")
        return ParseEngine.from_models(*pair, random_adapter(model, stream=stream))

    return make


@pytest.fixture
def engine(make_block_engine) -> ParseEngine:
    return make_block_engine()


def n_drafts(engine: ParseEngine, **settings) -> int:
    return sum(isinstance(event, Drafted) for event in engine.stream(PROMPT, max_new_tokens=N, **settings))


@pytest.mark.parametrize("stream", [False, True], ids=["head alone", "second stream"])
def test_whole_drafts_are_judged_as_blocks(model, tokenizer, random_adapter, stream):
    """Tokens of the target's own greedy text add no doubt in either."""
    verifier = Verifier(Decoder(model, ()), random_adapter(model, stream=stream), Segmenter(tokenizer))
    context = [5, 6, 7, 8]
    verifier.decoder.seek(context)
    draft = list(itertools.islice(verifier.decoder.decode(20), 20))
    draft[7], draft[13] = (draft[7] + 3) % 200, (draft[13] + 5) % 200
    verifier.decoder.seek(context)
    block = verifier.verify_block(draft).validity
    assert block[:7] == [1.0] * 7 and block[7] < 1
    verifier.decoder.seek(context)
    cuts = [3, 7, 8, 13, 14, 20]
    assert verifier.verify(draft, cuts).validity == pytest.approx([block[cut - 1] for cut in cuts], abs=1e-4)


def test_a_judge_of_tokens_has_blocks_at_every_threshold(engine):
    assert n_drafts(engine, block_tokens="whole") == 1
    assert n_drafts(engine) > 1 and n_drafts(engine, block_tokens=8) > 1


def middling(engine: ParseEngine, prompt: str = PROMPT) -> float:
    """A threshold that accepts some tokens other than the target's choice, and rejects others."""
    for threshold in (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02):
        found = engine.generate(prompt, max_new_tokens=N, threshold=threshold, block_tokens=8)
        corrected = sum(span.n_tokens for span in found.spans if span.source == "target")
        if 0 < corrected < len(found.token_ids) and found.token_ids != alone(engine, prompt):
            return threshold
    raise AssertionError("no threshold accepts a part of what differs: choose other seeds")


def alone(engine: ParseEngine, prompt: str = PROMPT) -> list[int]:
    return engine.generate_target(prompt, max_new_tokens=N).token_ids


# The text does not depend on the blocks


@pytest.mark.parametrize("stream", [False, True], ids=["head alone", "second stream"])
@pytest.mark.slow
def test_the_text_is_the_same_for_every_length(make_block_engine, stream):
    engine = make_block_engine(stream=stream)
    threshold = middling(engine)
    found = {
        length: engine.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=length).token_ids
        for length in LENGTHS
    }
    assert len(set(map(tuple, found.values()))) == 1, found


@pytest.mark.slow
def test_sampled_texts_are_the_same_for_every_length(engine):
    """Each place has its own random numbers."""
    sampling = Sampling(0.8, seed=3)
    for seed in range(3):
        sampling = Sampling(0.8, seed=seed)
        settings = {"draft_sampling": sampling, "resume_sampling": sampling, "threshold": 0.5, "max_new_tokens": N}
        found = [engine.generate(PROMPT, **settings, block_tokens=length).token_ids for length in (1, 5, 64)]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stream", [False, True], ids=["head alone", "second stream"])
def test_a_verdict_does_not_depend_on_how_the_draft_was_cut(model, tokenizer, random_adapter, stream):
    """The validities of one pass over a draft, and of passes over its pieces (to 1e-4)."""
    judge = random_adapter(model, stream=stream)
    verifier = Verifier(Decoder(model, ()), judge, Segmenter(tokenizer))
    numbers = random.Random(4)
    context, draft = ([numbers.randrange(1, 250) for _ in range(n)] for n in (9, 30))
    verifier.decoder.seek(context)
    whole = verifier.verify_block(draft)
    assert len({round(v, 3) for v in whole.validity}) > 5, "the judge sees no difference"
    for sizes in ([10, 10, 10], [1, 28, 1], [7, 2, 13, 8]):
        validity, carried, start = [], Carried(), 0
        for size in sizes:
            verifier.decoder.seek(context + draft[:start])
            found = verifier.verify_block(draft[start : start + size], carried)
            validity += found.validity
            start += size
            carried = found.scores.carried(start, size)
        assert validity == pytest.approx(whole.validity, abs=1e-4)


def test_the_targets_own_choice_adds_no_doubt(make_block_engine):
    """Blocks of the target's own greedy text: every validity is 1."""
    engine = make_block_engine()
    verifier, prompt, ids = engine.backend.verifier, engine.target.render(PROMPT), alone(engine)
    verifier.decoder.seek(prompt)
    assert verifier.verify_block(ids).validity == [1.0] * len(ids)
    changed = [*ids[:5], (ids[5] + 1) % 200, *ids[6:]]
    verifier.decoder.seek(prompt)
    assert verifier.verify_block(changed).validity[4:6] == [1.0, pytest.approx(0.5, abs=0.4999)]


@pytest.mark.parametrize("length", [3, "auto", "whole"])
def test_the_target_writes_the_strict_tokens(make_block_engine, length):
    """Even where everything of a draft is accepted."""
    engine = make_block_engine(noise=1.0)
    settings = {"max_new_tokens": N, "threshold": 0.0, "block_tokens": length}
    own, loose = alone(engine), engine.generate(PROMPT, **settings)
    assert loose.token_ids[:9] != own[:9]
    strict = engine.generate(PROMPT, **settings, strict_tokens=9)
    assert strict.token_ids[:9] == own[:9] and strict.token_ids != own
    assert strict.spans[0].source == "target" and strict.spans[0].n_tokens == 9
    rounds = [e.round for e in engine.stream(PROMPT, **settings, strict_tokens=9) if isinstance(e, Resumed)]
    assert rounds[:9] == [1] * 9
    assert engine.generate(PROMPT, **settings, strict_tokens=N + 1).token_ids == own


def test_strict_tokens_are_no_pause(engine):
    """While drafts do not pay, the target writes alone behind them too."""
    engine.backend.block_lengths[threshold_class(0.5)].pause = 6
    drafted, written = [], 0
    for event in engine.stream(PROMPT, max_new_tokens=N, threshold=0.5, strict_tokens=2):
        written += isinstance(event, Resumed)
        if isinstance(event, Drafted) and event.n_tokens:
            drafted.append(written)
    assert drafted[0] >= 2 + 6


def test_a_given_draft_has_no_strict_tokens(engine):
    with pytest.raises(ValueError, match="strict_tokens and draft_text were both given"):
        engine.generate(PROMPT, draft_text="Five.", strict_tokens=2)


def test_each_class_of_thresholds_is_measured_on_its_own(engine):
    for threshold in (0.5, 0.52, 0.99):
        engine.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens="auto")
    lengths = engine.backend.block_lengths
    assert len(lengths) == 2 and all(length.costs is not None for length in lengths.values())


# What each event says


@pytest.mark.slow
def test_each_correction_is_the_targets_choice_at_its_place(engine):
    threshold, decoder = middling(engine), Decoder(engine.target.model, ())
    prompt, ids, corrections = engine.target.render(PROMPT), [], 0
    drafted: list[int] = []
    for event in engine.stream(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=8):
        match event:
            case Drafted():
                assert event.n_tokens <= 8
            case Verified():
                drafted = [segment.n_tokens for segment in event.segments]
                assert len(drafted) <= 3
            case Accepted():
                assert event.n_tokens in (0, drafted[0], sum(drafted))
            case Resumed():
                corrections += 1
            case Done(generation):
                ids = generation.token_ids
    assert corrections
    place = 0
    for span in generation.spans:
        for token in ids[place : place + span.n_tokens]:
            decoder.seek([*prompt, *ids[:place]])
            if span.source == "target":
                assert token == int(decoder.next_logits().argmax())
            place += 1
    assert place == len(ids) and "".join(span.text for span in generation.spans) == generation.text
    assert generation.stats.accepted_tokens + corrections == len(ids)


@pytest.mark.parametrize("settings", [{}, {"mode": "exact"}, {"threshold": 2}])
@pytest.mark.slow
def test_spans_do_not_tell_where_blocks_ended(engine, settings):
    settings = {"threshold": middling(engine), **settings}
    found = [
        [
            (s.text, s.source, s.n_tokens)
            for s in engine.generate(PROMPT, max_new_tokens=N, **settings, block_tokens=n).spans
        ]
        for n in (2, 9, 64)
    ]
    assert found[0] == found[1] == found[2]


def test_one_forward_of_the_target_reads_each_block(engine):
    found = engine.generate(PROMPT, max_new_tokens=N, threshold=0.0, block_tokens=8)
    assert found.stats.accepted_tokens == N and found.stats.target_forwards == N // 8
    assert found.token_ids == engine.generate_draft(PROMPT, max_new_tokens=N).token_ids


@pytest.mark.slow
def test_the_draft_model_drafts_few_tokens_again(engine):
    """Fewer drafting steps, because blocks end near a rejected token and what follows it is read as guesses."""
    threshold = middling(engine)
    whole, blocks = (
        engine.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=length) for length in (N, 6)
    )
    assert blocks.token_ids == whole.token_ids
    assert blocks.stats.draft_tokens < whole.stats.draft_tokens


def test_proposals_of_the_last_block_do_not_change_the_next(make_block_engine):
    drafter = make_block_engine(noise=0.05).backend.drafter
    for place in (1, 4, 9):
        drafter.reset(PROMPT, Sampling())
        first = drafter.propose_block([], 40, 20, lambda confidence: False).ids
        corrected = [*first[:place], (first[place] + 1) % 200]
        again = drafter.propose_block(corrected, 40, 20, lambda confidence: False)
        drafter.reset(PROMPT, Sampling())
        drafter.draft.decoder.seek([])
        fresh = drafter.propose_block(corrected, 40, 20, lambda confidence: False)
        assert again.ids == fresh.ids
        assert again.confidences == pytest.approx(fresh.confidences, abs=1e-4)


# Exactness


@pytest.mark.parametrize("length", [3, "auto"])
def test_above_one_is_the_greedy_target(make_block_engine, architecture, length):
    engine = make_block_engine(architecture)
    found = engine.generate(PROMPT, max_new_tokens=N, threshold=2, block_tokens=length)
    assert found.token_ids == alone(engine)
    exact = engine.generate(PROMPT, max_new_tokens=N, mode="exact", block_tokens=length)
    assert exact.token_ids == found.token_ids


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tokens", [word_tokenizer, llama_tokenizer])
def test_above_one_is_the_greedy_target_with_other_tokens(make_block_engine, make_model, tokens, length):
    """A block may end inside a word or a character of either tokenizer."""
    words = tokens()
    draft = make_model("llama", seed=15, vocab_size=300, eos_token_id=words.eos_token_id)
    engine = make_block_engine()
    mixed = ParseEngine.from_models(engine.target, language_model(draft, words, "draft"), engine.backend.judge)
    for threshold in (2, 0.0):
        found = mixed.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=length)
        if threshold == 2:
            assert found.token_ids == alone(mixed)
        assert found.text == "".join(span.text for span in found.spans)


@pytest.mark.slow
def test_a_reduced_vocabulary_drafts_token_by_token(make_model, random_adapter):
    target, draft = reduced_pair(make_model, noise=0.3)
    engine = ParseEngine.from_models(target, draft, random_adapter(target.model))
    prompt = "There are students in the other room."
    found = [
        engine.generate(prompt, max_new_tokens=N, threshold=0.6, block_tokens=length).token_ids for length in (2, 64)
    ]
    assert found[0] == found[1]
    assert engine.generate(prompt, max_new_tokens=N, threshold=2, block_tokens=3).token_ids == alone(engine, prompt)


@pytest.mark.parametrize("length", [1, 4, "auto"])
def test_a_judge_of_segments_judges_blocks(make_engine, length):
    engine = make_engine()
    found = engine.generate(PROMPT, max_new_tokens=N, threshold=0.5, block_tokens=length)
    assert len(found.token_ids) == N or found.finish_reason != "length"
    assert engine.generate(PROMPT, max_new_tokens=N, threshold=2, block_tokens=length).token_ids == alone(engine)


# Where an answer ends


@pytest.mark.parametrize("length", [1, 5, 64, "auto"])
@pytest.mark.slow
def test_stops_ends_and_budgets_inside_a_block(engine, length):
    threshold = middling(engine)
    ids = engine.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=8).token_ids

    def answer(**settings):
        return engine.generate(PROMPT, threshold=threshold, block_tokens=length, **{"max_new_tokens": N, **settings})

    for budget in (1, 2, 13):
        assert answer(max_new_tokens=budget).token_ids == ids[:budget]
    end = next(token for token in ids[10:] if token not in ids[:10])
    found = answer(stop_token_ids=[end])
    assert found.token_ids == ids[: ids.index(end) + 1] and found.finish_reason == "eos"
    text = answer().text
    stop = text[8:11]
    stopped = answer(stop=stop)
    assert stopped.text == text[: text.index(stop) + 3]
    assert stopped.stats.draft_forwards <= answer().stats.draft_forwards - 10, "the draft model does not write on"


@pytest.mark.parametrize("length", [1, 5, "auto"])
@pytest.mark.slow
def test_a_window_that_ends_inside_a_block(make_block_engine, length):
    engine = make_block_engine()
    threshold = middling(engine)
    expected = engine.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=8).token_ids
    engine.target.model.config.max_position_embeddings = len(engine.target.render(PROMPT)) + 17
    short = language_model(engine.target.model, engine.target.tokenizer, "target")
    narrow = ParseEngine.from_models(short, engine.draft, engine.backend.judge)
    found = narrow.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=length)
    assert found.token_ids == expected[:17] and found.finish_reason == "length"


@pytest.mark.slow
def test_interrupted_at_any_event_the_next_answer_is_right(engine):
    threshold = middling(engine)
    settings = {"max_new_tokens": N, "threshold": threshold, "block_tokens": 6}
    expected = engine.generate(PROMPT, **settings).token_ids
    for events in range(1, 30):
        stream = engine.stream(PROMPT, **settings)
        for _ in range(events):
            next(stream, None)
        del stream
        assert engine.generate(PROMPT, **settings).token_ids == expected, f"after {events} events"


def test_the_target_writes_alone_while_drafts_do_not_pay(engine, monkeypatch):
    """Blocks of 3 tokens pause for 5 tokens after each: the draft model writes blocks again in between."""
    drafted = itertools.count(1)
    monkeypatch.setattr(
        BlockLength, "end_after", lambda self, survival: next(drafted) % 3 == 0
    )  # not by measured time
    monkeypatch.setattr(BlockLength, "next_pause", lambda self: 5)
    found = engine.generate(PROMPT, max_new_tokens=N, threshold=0.0)
    runs = [span.n_tokens for span in found.spans if span.source == "target"]
    assert min(runs[:-1]) >= 5 and len(runs) > 1  # longer where a character is incomplete
    assert found.stats.accepted_tokens + sum(runs) == N


@pytest.fixture
def pausing(monkeypatch):
    """Blocks of "auto" have 3 tokens, and after each the target writes 5 alone."""
    drafted = itertools.count(1)
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: next(drafted) % 3 == 0)
    monkeypatch.setattr(BlockLength, "next_pause", lambda self: 5)


def test_pauses_do_not_change_a_lossless_answer(make_block_engine, pausing):
    engine = make_block_engine(noise=0.05)
    found = engine.generate(PROMPT, max_new_tokens=N, mode="exact")
    assert found.token_ids == alone(engine) and 0 < found.stats.accepted_tokens < N / 2


def test_an_answer_with_a_promise_has_no_pauses(engine, pausing):
    """Its calibration replays answers without them."""
    models, tried = engine.describe(), [Point(OperatingPoint(0.3), 1.0, 0.02, 2.0, 0.1)]
    engine.calibrations = [Calibration("t", 300, "x", "lost", 0.9, N, models, tried, {0.05: 0})]
    settings, (promised, steady, paused) = {"max_new_tokens": N}, ({"risk": 0.05}, {"adaptive": False}, {})
    with Replay(engine) as replay:
        calibrated = replay.answer(PROMPT, GenerationSettings(N, 0.3)).token_ids
    found = engine.generate(PROMPT, **settings, **promised)
    assert found.token_ids == calibrated == engine.generate(PROMPT, threshold=0.3, **settings, **steady).token_ids
    assert set(found.stats.blocks[:-1]) <= {1, 2, 3}
    assert engine.generate(PROMPT, threshold=0.3, **settings, **paused).token_ids != calibrated


@pytest.mark.parametrize("tokens", [word_tokenizer, llama_tokenizer])
@pytest.mark.slow
def test_a_promise_for_models_with_other_tokens_is_about_what_is_served(make_block_engine, make_model, tokens):
    """The target's tokens for a text depend on where its blocks end, so measured times must not end them."""
    words = tokens()
    draft = make_model("llama", seed=15, vocab_size=300, eos_token_id=words.eos_token_id)
    engine = make_block_engine()
    mixed = ParseEngine.from_models(engine.target, language_model(draft, words, "draft"), engine.backend.judge)
    assert [mixed.backend.replayable(length) for length in ("auto", "whole", 7)] == [REPLAYED, "whole", 7]
    assert engine.backend.replayable("auto") == "auto"
    for length in (REPLAYED, 2):
        for threshold in (0.0, 0.2, 0.5, 2.0):
            settings = GenerationSettings(N, threshold, block_tokens=length)
            served = mixed.generate(PROMPT, settings).token_ids
            with Replay(mixed) as replay:
                for _ in range(2):  # again from the memory
                    assert replay.answer(PROMPT, settings).token_ids == served
    tried = [Point(OperatingPoint(0.3), 1.0, 0.02, 2.0, 0.1)]
    mixed.calibrations = [Calibration("t", 300, "x", "lost", 0.9, N, mixed.describe(), tried, {0.05: 0})]
    with pytest.raises(ValueError, match=r"promises a risk of 0\.05 with block_tokens auto.* different tokens"):
        mixed.generate(PROMPT, max_new_tokens=N, risk=0.05)


@pytest.mark.slow
def test_a_calibration_tries_blocks_that_can_be_replayed(make_block_engine, make_model, tmp_path):
    words = word_tokenizer()
    draft = make_model("llama", seed=15, vocab_size=300, eos_token_id=words.eos_token_id)
    engine = make_block_engine()
    mixed = ParseEngine.from_models(engine.target, language_model(draft, words, "draft"), engine.backend.judge)
    problems = [Problem(str(n), f"{PROMPT} {n}", "") for n in range(4)]
    settings = CalibrationSettings((0.9,), confidence=0.5, loss="disagreement", max_new_tokens=8, blocks=("auto",))
    found = calibrate(mixed, problems, lambda *_: None, lambda *_: True, tmp_path, settings)
    assert {tried.setting.block_tokens for tried in found.tried} == {REPLAYED}


def test_nothing_is_drafted_that_cannot_be_kept(engine):
    hot = Sampling(temperature=1.0, seed=1)
    for draft in ({}, {"draft_text": "Five."}):
        found = engine.generate(PROMPT, max_new_tokens=9, threshold=2, resume_sampling=hot, **draft)
        assert len(found.token_ids) == 9 and not found.stats.draft_tokens and not found.stats.draft_forwards


def test_a_correction_costs_the_draft_model_no_forward_of_its_own(make_block_engine):
    """The forward that reads the tokens behind it again has the logits after them."""
    drafter = make_block_engine(noise=0.05).backend.drafter
    drafter.reset(PROMPT, Sampling())
    first = drafter.propose_block([], 40, 20, lambda confidence: False).ids
    corrected = [*first[:4], (first[4] + 1) % 200]
    before = drafter.forwards
    again = drafter.propose_block(corrected, 40, 20, lambda confidence: False)
    same = next((i for i, (a, b) in enumerate(zip(again.ids, first[5:], strict=False)) if a != b), len(first) - 5)
    assert drafter.forwards - before == 1 + len(again.ids) - same - 1


def test_a_slow_draft_model_writes_short_blocks(engine, monkeypatch):
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: False)
    monkeypatch.setattr(BlockLength, "longest", 7)
    for length, longest in (("auto", 7), (12, 12)):
        events = engine.stream(PROMPT, max_new_tokens=N, threshold=0.0, block_tokens=length)
        assert max(event.n_tokens for event in events if isinstance(event, Drafted)) == longest


def test_a_block_that_ends_inside_a_character_continues(make_block_engine, make_model):
    """The draft model writes a character of two tokens in blocks of one token, for a target with other tokens."""
    words = word_tokenizer()
    plain = make_model("llama", seed=15, vocab_size=300, eos_token_id=0)
    draft = language_model(cycling(plain, words, "é", PROMPT), words, "draft")
    engine = make_block_engine()
    printable(engine.target.model, engine.target.tokenizer)
    mixed = ParseEngine.from_models(engine.target, draft, engine.backend.judge)
    found = mixed.generate(PROMPT, max_new_tokens=8, threshold=0.0, block_tokens=1)
    assert found.stats.rounds > 1 and found.stats.draft_tokens > 0


def test_a_given_text_is_read_whole(engine):
    text = engine.generate_draft(PROMPT, max_new_tokens=30).text
    found = engine.generate(PROMPT, draft_text=text, max_new_tokens=N, threshold=0.0, block_tokens=4)
    assert found.stats.rounds == 1 and found.text.startswith(text[:10])
