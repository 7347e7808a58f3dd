"""A draft model with another tokenizer than the target's."""

from __future__ import annotations

import pytest

from parse_infer.models.decoder import Decoder
from parse_infer.request.events import Drafted, Resumed
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.engine.thresholds import PROMPT


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_other_tokens_the_answer_is_still_the_targets(mixed_engine, block_tokens):
    alone = mixed_engine.generate_target(PROMPT, max_new_tokens=24)
    for options in ({"threshold": 1.5}, {"mode": "exact"}):
        ours = mixed_engine.generate(PROMPT, max_new_tokens=24, block_tokens=block_tokens, **options)
        assert ours.token_ids == alone.token_ids


def test_other_tokens_an_accepted_draft_is_the_draft_models_text(mixed_engine):
    draft = mixed_engine.generate_draft(PROMPT, max_new_tokens=40)
    ours = mixed_engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert ours.text == draft.text[:40] and len(ours.token_ids) == 40  # one target token a letter
    assert ours.stats.target_forwards == 1


def test_other_tokens_the_draft_model_continues_from_the_targets_text(mixed_engine):
    draft, words = mixed_engine.draft, mixed_engine.draft.tokenizer
    settings = GenerationSettings(max_new_tokens=16, threshold=1.0, keep_greedy_match=False, block_tokens=6)
    written = ""
    for event in mixed_engine.stream(PROMPT, settings):
        if isinstance(event, Drafted) and event.n_tokens:
            decoder = Decoder(draft.model, draft.eos_ids)
            decoder.seek(draft.render(PROMPT) + words.encode(written, add_special_tokens=False))
            own = words.decode(list(decoder.decode(min(6, 16 - len(written)))))
            assert own.startswith(event.text)  # whole words of the block
        elif isinstance(event, Resumed):
            written += event.text
