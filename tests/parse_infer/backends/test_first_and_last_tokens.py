"""Over servers: the first tokens of an answer, and the answer after the thinking, are the target's own."""

from __future__ import annotations

import pytest

from parse_infer.calibration.replay import Replay
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.backends.conftest import add_reference

PROMPT, N = "How many apples are there?", 24
LOOSE = {"max_new_tokens": N, "threshold": 0.0}


@pytest.fixture
def connected(make_engine, connect):
    """A coordinator with the servers' default, whose draft model begins every answer in its own way."""
    engine = make_engine(noise=1.0)
    coordinator, (target,), draft = connect(engine)
    coordinator.strict_tokens = coordinator.backend.strict_tokens
    return coordinator, engine, target, draft


@pytest.mark.parametrize("block_tokens", [4, "auto", "whole"])
def test_the_target_writes_the_first_two_tokens(connected, block_tokens):
    coordinator, engine, target, draft = connected
    own = engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    loose = coordinator.generate(PROMPT, **LOOSE, block_tokens=block_tokens, strict_tokens=0)
    assert loose.token_ids[:2] != own[:2], "the draft model begins in its own way"
    target.bodies.clear()
    draft.bodies.clear()
    found = coordinator.generate(PROMPT, **LOOSE, block_tokens=block_tokens)
    assert found.token_ids[:2] == own[:2] and found.token_ids != own
    assert found.spans[0].source == "target" and found.spans[0].n_tokens == 2
    first, prompt = target.bodies[0], engine.target.render(PROMPT)
    assert (first["max_tokens"], first.get("stream", False), first["prompt"]) == (2, False, prompt)
    assert draft.bodies[0]["prompt"] == [*prompt, *own[:2]]


def test_sampled_first_tokens_are_the_targets_samples(connected):
    coordinator, sampling = connected[0], Sampling(1.0, seed=3)
    own = coordinator.generate_target(PROMPT, max_new_tokens=N, resume_sampling=sampling).token_ids
    found = coordinator.generate(PROMPT, **LOOSE, resume_sampling=sampling)
    assert found.token_ids[:2] == own[:2] and found.spans[1].source == "draft"


def test_a_short_first_request_keeps_the_minimum_length(connected):
    coordinator, _, target, _ = connected
    found = coordinator.generate(PROMPT, **LOOSE, min_tokens=9, stop="zzz")
    assert len(found.token_ids) >= 9 and target.bodies[0]["min_tokens"] == target.bodies[0]["max_tokens"] == 2


@pytest.mark.slow
def test_only_judged_answers_have_strict_tokens(connected):
    coordinator, engine, _, _ = connected
    for settings in ({"mode": "exact"}, {"threshold": 0.0, "draft_text": "Five."}):
        events = list(coordinator.stream(PROMPT, max_new_tokens=N, **settings))
        assert events[0].n_tokens > 0, "the first round has a draft"
    with Replay(coordinator):
        drafted, *_ = coordinator.stream(PROMPT, **LOOSE)
        assert drafted.n_tokens > 0, "a calibration measures none"
    assert engine.generate(PROMPT, **LOOSE).spans[0].source == "draft", "nor are there any in this process"


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [3, "auto", "whole"])
def test_a_judge_over_servers_decides_about_the_thinking_only(make_thinking_engine, connect, block_tokens):
    engine = make_thinking_engine("abc</think>xyz", "aBc</think>xYz")
    add_reference(engine.backend.judge, engine.target)
    coordinator, _, _ = connect(engine)
    loose = {"max_new_tokens": 12, "threshold": 0.0, "block_tokens": block_tokens}
    assert coordinator.generate("?", **loose).text.startswith("aBc</think>xYz")
    found = coordinator.generate("?", **loose, strict_answer=True)
    assert found.text == "aBc</think>xyzabc</think>x" and not found.lossless
    sampled = coordinator.generate("?", **loose, strict_answer=True, resume_sampling=Sampling(0.02, seed=1))
    assert sampled.text == "aBc</think>xyzabc</think>x"
