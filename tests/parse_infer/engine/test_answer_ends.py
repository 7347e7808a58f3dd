"""Answers end at token limits, windows, end tokens and stop strings."""

from __future__ import annotations

import itertools

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.engine.thresholds import PROMPT, greedy, partial_threshold
from tests.parse_infer.language_models import (
    QUESTION_LEN,
    TokenCount,
    language_model,
)


def test_max_new_tokens_bounds_a_draft_that_never_ends(engine):
    result = engine.generate(PROMPT, max_new_tokens=17, threshold=0.0)
    assert (len(result.token_ids), result.finish_reason) == (17, "length")
    assert result.stats.draft_tokens == 17 and result.stats.target_forwards == 1


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_the_target_continues_where_the_draft_models_window_ends(make_engine, block_tokens):
    prompt = make_engine().target.render(PROMPT)
    engine = make_engine(draft_window=len(prompt) + 12)
    result = engine.generate(PROMPT, max_new_tokens=30, threshold=0.0, block_tokens=block_tokens)
    sizes = [4, 2, 4, 2] if block_tokens == 6 else [4] * 3  # a segment has 4 tokens, or ends with its block
    assert [(s.source, s.n_tokens) for s in result.spans] == [*(("draft", n) for n in sizes), ("target", 18)]
    assert result.token_ids[12:] == greedy(engine, prompt + result.token_ids[:12], 18)
    assert result.stats.verification_passes == {"whole": 1, "auto": 1, 6: 2}[block_tokens]
    # A draft that may continue leaves no state for the target's first token.
    assert result.stats.target_forwards == result.stats.verification_passes + 17 + (block_tokens == 6)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_targets_window_bounds_answer_and_question(make_engine, threshold):
    engine = make_engine()
    room = 20
    engine.target.window = len(engine.target.render(PROMPT)) + room
    with TokenCount(engine.target.model) as target:
        drafted, *_, done = engine.stream(PROMPT, threshold=threshold, keep_greedy_match=False)
    assert drafted.n_tokens == room - QUESTION_LEN
    assert (len(done.generation.token_ids), done.generation.finish_reason) == (room, "length")
    assert done.generation.token_ids[room - QUESTION_LEN :] == greedy(
        engine, engine.target.render(PROMPT) + done.generation.token_ids[: room - QUESTION_LEN], QUESTION_LEN
    )
    assert len(target.widths) == done.generation.stats.target_forwards


def end_with(engine: ParseEngine, token: int) -> ParseEngine:
    """The same engine with another token as the end of an answer."""
    for part in (engine.target, engine.draft):
        part.model.generation_config.eos_token_id = token
    target = language_model(engine.target.model, engine.target.tokenizer)
    draft = language_model(engine.draft.model, engine.draft.tokenizer)
    return ParseEngine.from_models(target, draft, engine.backend.judge)


def test_an_end_token_in_the_draft_ends_the_answer(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40)
    token = draft.token_ids[20]
    first = draft.token_ids.index(token)
    result = end_with(engine, token).generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert result.token_ids == draft.token_ids[: first + 1]
    assert (result.text, result.finish_reason) == (draft.text[:first], "eos")
    assert result.stats.target_forwards == 1


def test_an_end_token_of_the_target_ends_the_answer(engine):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    token = alone.token_ids[20]
    first = alone.token_ids.index(token)
    ending = end_with(engine, token)
    result = ending.generate(PROMPT, max_new_tokens=40, threshold=1.5)
    assert result.token_ids == alone.token_ids[: first + 1]
    assert (result.text, result.finish_reason) == (alone.text[:first], "eos")
    assert ending.generate_target(PROMPT, max_new_tokens=40).token_ids == result.token_ids


def fresh_substring(text: str, position: int, before: int = 3, after: int = 3) -> str:
    """The text around `position`, which must not occur earlier."""
    stop = text[position - before : position + after]
    assert len(stop) == before + after and text.index(stop) == position - before, (
        f"{stop!r} occurs earlier in {text!r}"
    )
    return stop


def check_stop(result, full: str, stop: str) -> None:
    assert result.text == full[: full.index(stop) + len(stop)]
    assert result.finish_reason == "stop"
    assert "".join(span.text for span in result.spans) == result.text
    assert sum(span.n_tokens for span in result.spans) == len(result.token_ids) == len(result.text)  # 1 token a letter


def test_a_stop_string_inside_the_draft(engine):
    full = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    stop = fresh_substring(full.text, 10)
    with TokenCount(engine.draft.model) as draft:
        result = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0, stop=stop)
    check_stop(result, full.text, stop)
    assert len(draft.widths) == len(result.text) < 40  # the draft model does not write on either
    assert result.stats.target_forwards == 1


def test_a_stop_string_before_unreadable_characters(engine):
    draft = "It is 7. END \ufffd\ufffd"
    answer = engine.generate(PROMPT, draft_text=draft, threshold=0.0, stop="END", max_new_tokens=40)
    assert (answer.text, answer.finish_reason) == ("It is 7. END", "stop")
    assert answer.stats.draft_tokens == len(answer.token_ids) == 12


def test_a_stop_string_inside_a_text_draft(engine):
    result = engine.generate(PROMPT, draft_text="One two.\nThree four.", threshold=0.0, stop=["four", "o."])
    check_stop(result, "One two.\nThree four.", "o.")


def test_a_stop_string_across_draft_and_target(engine):
    settings = GenerationSettings(
        40, threshold=partial_threshold(engine), block_tokens="whole", keep_greedy_match=False
    )
    full = engine.generate(PROMPT, settings)
    seam = full.stats.accepted_tokens
    stop = fresh_substring(full.text, seam)  # three letters of the draft and three of the target
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_in_the_resumed_part(engine):
    settings = GenerationSettings(
        40, threshold=partial_threshold(engine), block_tokens="whole", keep_greedy_match=False
    )
    full = engine.generate(PROMPT, settings)
    position = next(
        p for p in range(full.stats.accepted_tokens + 3, 38) if full.text.index(full.text[p - 3 : p + 3]) == p - 3
    )
    stop = fresh_substring(full.text, position)
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_from_the_target_into_the_next_draft(engine):
    settings = GenerationSettings(max_new_tokens=40, threshold=1.0, block_tokens=6)
    full = engine.generate(PROMPT, settings)
    ends = list(itertools.accumulate(span.n_tokens for span in full.spans))
    sources = [span.source for span in full.spans]
    at = next(
        end
        for end, pair in zip(ends, itertools.pairwise(sources), strict=False)
        if end > 8 and pair == ("target", "draft")
    )
    stop = fresh_substring(full.text, at)
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_in_the_rejected_part_ends_nothing(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40).text
    full = engine.generate(PROMPT, max_new_tokens=40, threshold=1.5, keep_greedy_match=False)
    position = next(p for p in range(1, 38) if draft[p - 1 : p + 2] not in full.text)
    result = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.5, keep_greedy_match=False, stop=draft[position - 1 : position + 2]
    )
    assert result.text == full.text and result.finish_reason == "length"
