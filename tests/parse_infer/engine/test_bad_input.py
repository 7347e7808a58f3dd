"""Bad input is reported before any work."""

from __future__ import annotations

import pytest

from parse_infer.decoding.adaptive import MIN_SAMPLES
from parse_infer.engine import ParseEngine
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.engine.thresholds import PROMPT


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        ([{"role": "user", "content": ""}], "prompt is empty"),
        ("x" * 3000, "3002 tokens for 'target', whose context window is 2048"),
        ([{"role": "user"}], "not a chat message"),
        ([{"content": "How many?"}], "not a chat message"),
        (7, "not 7"),
    ],
)
def test_a_bad_prompt_is_one_clear_sentence_before_any_work(engine, prompt, message):
    before = engine.target.decoder.forwards, engine.draft.decoder.forwards
    for call in (
        lambda: engine.generate(prompt),
        lambda: engine.generate([PROMPT, prompt]),
        lambda: engine.generate(prompt, draft_text="It is 1."),
        lambda: engine.stream(prompt),
        lambda: engine.generate_target(prompt),
        lambda: engine.score(prompt, "It is 1."),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (engine.target.decoder.forwards, engine.draft.decoder.forwards) == before


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_a_prompt_beyond_the_draft_models_window_is_the_targets_alone(make_engine, block_tokens, adaptive):
    engine = make_engine(draft_window=10)
    engine.controller.note = lambda *_, **__: pytest.fail("an empty draft tells nothing about drafts")
    for _ in range(MIN_SAMPLES + 1):
        found = engine.generate(PROMPT, max_new_tokens=20, block_tokens=block_tokens, adaptive=adaptive)
        assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=20).token_ids
        assert [span.source for span in found.spans] == ["target"] and found.stats.verification_passes == 0
    assert engine.draft.decoder.forwards == 0
    engine = make_engine()
    engine.target.window = 10
    with pytest.raises(ValueError, match="'target', whose context window is 10"):
        engine.generate(["a", PROMPT])
    assert engine.target.decoder.forwards == engine.draft.decoder.forwards == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"treshold": 0.5}, "did you mean 'threshold'"),
        ({"threshold": -0.1}, "-0.1"),
        ({"threshold": float("nan")}, "nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"mode": "fast"}, "validity, exact"),
        ({"acceptance": "all"}, "first_failure, longest"),
        ({"block_tokens": "stop"}, "whole number of at least 1, or one of: auto, whole"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": True}, "block_tokens is True"),
        ({"stop": ("",)}, "stop string"),
        ({"draft_sampling": 0.7}, "Sampling"),
        ({"mode": "exact", "resume_sampling": Sampling(temperature=1.0)}, "greedy"),
    ],
)
def test_bad_settings_are_one_clear_sentence(engine, overrides, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPT, **overrides)


def test_no_draft_model(make_engine):
    engine = make_engine()
    alone = ParseEngine.from_models(engine.target, judge=engine.backend.judge)
    for call in (alone.generate, alone.stream, alone.generate_draft):
        with pytest.raises(ValueError, match="no draft model"):
            call(PROMPT)
    assert alone.generate(PROMPT, draft_text="Fine.", threshold=0.0).text == "Fine."
