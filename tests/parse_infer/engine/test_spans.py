"""Spans and events of an answer add up to its text."""

from __future__ import annotations

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.models.decoder import Decoder
from parse_infer.request.events import Accepted, Done, Drafted, Resumed, Verified
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.engine.thresholds import PROMPT, threshold_of_both
from tests.parse_infer.language_models import (
    language_model,
    resembling,
)


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("letters", [True, False])
def test_spans_and_events_add_up_to_the_text(
    make_engine, make_model, tokenizer, random_adapter, block_tokens, letters
):
    if letters:
        engine = make_engine()
    else:  # every byte may come, so that characters break at seams and many are no characters at all
        model = make_model("llama")
        draft = resembling(make_model, model, 0.2)
        engine = ParseEngine.from_models(
            language_model(model, tokenizer), language_model(draft, tokenizer), random_adapter(model)
        )
    settings = {"max_new_tokens": 40, "block_tokens": block_tokens}
    # In blocks the second judge scores every token, and a threshold of segments need not split them.
    threshold = threshold_of_both(engine, **settings) if letters or block_tokens == "whole" else 0.99
    events = list(engine.stream(PROMPT, threshold=threshold, **settings))
    assert [type(e) for e in events[:3]] == [Drafted, Verified, Accepted] and isinstance(events[-1], Done)
    result = events[-1].generation
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True) != ""
    assert "".join(span.text for span in result.spans) == result.text
    assert sum(span.n_tokens for span in result.spans) == len(result.token_ids)
    assert {span.source for span in result.spans} == {"draft", "target"}
    assert "".join(e.text for e in events if isinstance(e, (Accepted, Resumed))) == result.text
    resumed = [e.token_id for e in events if isinstance(e, Resumed)]
    assert len(resumed) == sum(span.n_tokens for span in result.spans if span.source == "target")
    drafted, verified, accepted = events[:3]
    if letters:
        assert "".join(s.text for s in verified.segments) == drafted.text == accepted.text + accepted.rejected


def test_the_target_replaces_the_rejected_segment_of_each_block(engine):
    """This judge asks behind segments, so it knows only that one fails."""
    settings = GenerationSettings(max_new_tokens=30, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    events = list(engine.stream(PROMPT, settings))  # no validity here reaches 1.0
    written = [sum(isinstance(e, Resumed) and e.round == r for e in events) for r in range(1, 9)]
    assert written == [4] * 7 + [2]  # the judge's cut policy: 4 tokens a segment
    assert events[-1].generation.token_ids == engine.generate_target(PROMPT, settings).token_ids


def test_the_draft_model_continues_from_the_targets_token(engine):
    settings = GenerationSettings(max_new_tokens=30, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    answer: list[int] = []
    for event in engine.stream(PROMPT, settings):
        if isinstance(event, Drafted) and event.n_tokens:
            decoder = Decoder(engine.draft.model, engine.draft.eos_ids)
            decoder.seek(engine.draft.render(PROMPT) + answer)
            own = list(decoder.decode(min(8, 30 - len(answer))))
            assert event.text == engine.draft.tokenizer.decode(own)
        elif isinstance(event, Resumed):
            answer.append(event.token_id)
