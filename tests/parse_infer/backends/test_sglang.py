"""SGLang as target and draft server: the local engine's answers, and what is refused. No real server was tried."""

from __future__ import annotations

import copy

import pytest

from parse_infer.backends.servers.dialects.sglang import SGLang
from parse_infer.request.events import Verified
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.backends.fake_sglang import GENERATED, FakeSGLang

PROMPT = "Tom has 5 apples."
N = 24


@pytest.fixture
def sglang(make_engine, connect):
    """`sglang()`: a local engine, a coordinator over SGLang servers with its weights, and the target's server."""

    def make(**options):
        engine = make_engine()
        coordinator, (target, *_), _ = connect(engine, server_type=FakeSGLang, **options)
        return engine, coordinator, target

    return make


def reads(target: FakeSGLang) -> list[dict]:
    return [body for body in target.bodies if "input_ids" in body]


def test_entries_belong_to_their_tokens():
    found = SGLang().parse(GENERATED, [5, 258], 2)
    assert found.own.tolist() == [-2.25, -0.125], "the last token of the vocabulary is reported as 0"
    assert found.top_ids.tolist() == [[7, 2], [258, 1]] and found.top.tolist() == [[-0.5, -1.5], [-0.125, -3.0]]
    assert SGLang().cached_tokens(GENERATED) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.pop("input_top_logprobs"), "has no prompt_logprobs"),
        (lambda info: info["input_top_logprobs"].pop(), "has 2 prompt_logprobs, and the prompt more tokens"),
        (lambda info: info["input_token_logprobs"][1].__setitem__(1, 7), r"do not belong to the tokens .* \(5\)"),
        (lambda info: info["input_top_logprobs"][1].pop(), "returns 2 of 3 log-probabilities"),
        (lambda info: info["input_token_logprobs"].__setitem__(1, []), "has no prompt_logprobs"),
    ],
)
def test_a_damaged_response_is_refused_in_one_sentence(change, message):
    response = copy.deepcopy(GENERATED)
    change(response["meta_info"])
    with pytest.raises(ValueError, match=message):
        SGLang().parse(response, [5, 258], 3 if "of 3" in message else 2)


@pytest.mark.parametrize(("block_tokens", "threshold"), [("auto", 0.3), ("auto", 0.9), (7, 0.3), ("whole", 0.02)])
def test_answers_are_those_of_the_local_engine(sglang, block_tokens, threshold):
    engine, coordinator, target = sglang()
    settings = {"max_new_tokens": N, "threshold": threshold, "block_tokens": block_tokens}
    found = coordinator.generate(PROMPT, **settings)
    assert found.token_ids == engine.generate(PROMPT, **settings, keep_greedy_match=True).token_ids
    assert found.fallback is None and reads(target)


def test_a_read_computes_the_draft_only(sglang):
    engine, coordinator, target = sglang()
    coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    first, *others = reads(target)
    assert first["logprob_start_len"] == len(engine.target.render(PROMPT)) - 1 and others
    assert target.cached[-len(others) :] == [body["logprob_start_len"] for body in others]


@pytest.mark.parametrize("fault", ["zeros", "noise", "boundary"])
def test_cached_reads_that_differ_from_uncached_ones_are_not_used(sglang, fault, caplog):
    engine, coordinator, target = sglang()
    target.cache_fault = fault
    coordinator.backend.run(coordinator.backend.handshake())
    assert "is read without its prefix cache: its " in caplog.text
    target.bodies.clear()
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    assert found.token_ids == engine.generate(PROMPT, max_new_tokens=N, threshold=0.3).token_ids
    starts = [body["logprob_start_len"] for body in reads(target)]
    assert starts and not any(starts) and found.fallback is None


@pytest.mark.parametrize("options", [{}, {"stop": ("e",)}, {"min_tokens": N}, {"ignore_eos": True}])
def test_above_1_the_target_answers_alone(sglang, options):
    engine, coordinator, target = sglang()
    expected = engine.generate_target(PROMPT, max_new_tokens=N, **options).token_ids
    *_, done = coordinator.stream(PROMPT, max_new_tokens=N, threshold=2, **options)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=2, **options)
    assert found.token_ids == done.generation.token_ids == expected and not reads(target)


def test_verdicts_are_those_of_the_local_engine(sglang):
    engine, coordinator, _ = sglang()
    settings = {"max_new_tokens": N, "threshold": 0.3, "block_tokens": "whole"}
    local, served = (
        [s.validity for e in one.stream(PROMPT, **settings) if isinstance(e, Verified) for s in e.segments]
        for one in (engine, coordinator)
    )
    assert len(local) > 1 and served == pytest.approx(local, abs=1e-4)
    text = "There are 5 apples.\nSo 7 in all."
    local, served = ([s.validity for s in one.score(PROMPT, text).segments] for one in (engine, coordinator))
    assert served == pytest.approx(local, abs=1e-4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "has no prompt_logprobs"),
        ("truncated", "prompt_logprobs"),
        ("changed", "do not belong to the tokens"),
    ],
)
def test_a_server_without_usable_log_probabilities(sglang, fault, message):
    """At the start it is refused; later the target answers alone."""
    engine, coordinator, target = sglang()
    target.logprob_fault = fault
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    assert found.fallback == "judge_failed"
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    with pytest.raises(ValueError, match=message) as error:
        coordinator.backend.run(coordinator.backend.handshake())
    assert target.url in str(error.value)


def test_a_stream_that_ends_early_is_aborted_before_its_connection_is_closed(sglang):
    _, coordinator, target = sglang()
    target.pause = 0.1  # it still writes when the abort comes
    stream = coordinator.stream_target(PROMPT, max_new_tokens=N)
    next(stream)
    stream.close()
    target.pause = 0.0
    (body,) = target.bodies
    assert target.aborted == [body["rid"]]
    *_, done = coordinator.stream_target(PROMPT, max_new_tokens=N + 1)  # the last piece has the last token
    assert done.generation.finish_reason
    assert len(target.aborted) == 1, "a complete answer is not aborted"


def test_a_sampled_answer(sglang):
    _, coordinator, target = sglang()
    sampling = Sampling(0.8, seed=1)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3, resume_sampling=sampling)
    assert found.fallback is None and any(span.source == "target" for span in found.spans)
    assert {body["top_k"] for body in target.bodies if "top_k" in body} == {-1}


def test_an_answer_may_fill_the_window_that_the_server_has(make_engine, connect):
    engine = make_engine()
    window = engine.target.window = len(engine.target.render(PROMPT)) + 30
    coordinator, _, _ = connect(engine, server_type=FakeSGLang)
    assert coordinator.target.window == window - 8
    for threshold in (0.0, 2):
        found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=threshold, ignore_eos=True)
        assert len(found.token_ids) == 22 and found.fallback is None
    assert coordinator.backend.run(target_is_healthy(coordinator))


async def target_is_healthy(coordinator) -> bool:
    (server,) = coordinator.backend.servers["target"].members
    await coordinator.backend.servers["target"].identity.check(server)
    return isinstance(server.dialect, SGLang)
