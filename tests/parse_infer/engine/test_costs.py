"""Forwards and reads of an answer."""

from __future__ import annotations

from parse_infer.request.events import Accepted, Drafted
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.engine.thresholds import PROMPT, partial_threshold
from tests.parse_infer.language_models import (
    QUESTION_LEN,
    TokenCount,
)


def test_the_rejected_rest_of_a_draft_saves_forwards_and_changes_nothing(engine):
    own = engine.generate_target(PROMPT, max_new_tokens=40)
    at = len(own.text) // 3
    text = own.text[:at] + ("x" if own.text[at] != "x" else "y") + own.text[at + 1 :]  # one wrong letter
    ours = engine.generate(PROMPT, max_new_tokens=40, threshold=1.5, draft_text=text)
    assert ours.token_ids == own.token_ids
    assert ours.stats.accepted_tokens == ours.stats.exact_tail_tokens == at
    # 6 guesses and the target's own token each, once two tokens are found again.
    assert ours.stats.target_forwards <= 1 + -(-(40 - at) // 7) + 4


def test_the_first_resumed_token_costs_no_forward(engine):
    result = engine.generate(PROMPT, max_new_tokens=30, threshold=1.0, keep_greedy_match=False)
    assert result.stats.target_forwards == 1 + (30 - 1)  # the pass, then one for each token but the first


def test_a_shared_prompt_is_not_prefilled_again(engine):
    prompt = engine.target.render(PROMPT)
    settings = GenerationSettings(max_new_tokens=24, threshold=1.0, keep_greedy_match=False)
    questions = 24 // 4 * QUESTION_LEN
    for again, context in ((PROMPT, 1), (PROMPT[:-1] + "!", 2)):  # only what differs, and the end of the prompt
        engine.generate(PROMPT, settings)
        with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
            engine.generate(again, settings)
        assert target.widths[0] == context + 24 + questions < len(prompt) + 24 + questions
        assert draft.widths[0] == context


def test_consecutive_blocks_read_only_what_is_new(engine):
    settings = GenerationSettings(max_new_tokens=40, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
        events = list(engine.stream(PROMPT, settings))
    prompt = len(engine.target.render(PROMPT))
    drafts = [event for event in events if isinstance(event, Drafted)]
    passes = [width for width in target.widths if width > 1]
    assert [event.n_tokens for event in drafts] == [8] * 9 + [4]  # the target writes 4 tokens after each
    questions = [QUESTION_LEN * -(-event.n_tokens // 4) for event in drafts]
    # 1: the target's last token
    expected = [event.n_tokens + n + 1 for event, n in zip(drafts, questions, strict=True)]
    expected[0] += prompt - 1
    assert passes == expected
    # The draft model reads the prompt once, then the segment that the target wrote and the guesses behind it.
    assert draft.widths[0] == prompt and max(draft.widths[1:]) <= 8


def test_statistics_count_what_happened(engine):
    threshold = partial_threshold(engine)
    with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
        events = list(engine.stream(PROMPT, max_new_tokens=40, block_tokens=6, threshold=threshold))
    stats, drafted = events[-1].generation.stats, [e for e in events if isinstance(e, Drafted)]
    assert stats.rounds == len(drafted) > 1
    assert stats.draft_tokens == sum(e.n_tokens for e in drafted)
    assert stats.accepted_tokens == sum(e.n_tokens for e in events if isinstance(e, Accepted))
    assert stats.verification_passes == sum(e.n_tokens > 0 for e in drafted)
    assert stats.target_forwards == len(target.widths)
    assert stats.draft_forwards == len(draft.widths)
