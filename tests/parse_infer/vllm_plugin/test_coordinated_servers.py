"""The coordinator over real servers of vLLM, which it starts: the local engine's answers, also when a server dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parse_infer.backends.client import RequestRejected
from parse_infer.engine import ParseEngine
from parse_infer.output import Generation
from parse_infer.vllm_plugin.options import judge_name

pytestmark = pytest.mark.vllm
PROMPTS = [
    f"A {who} has {3 + n} pencils. His brother has {n % 7 + 2} {more} pencils. How many do they have together?"
    for n in range(12)
    for who, more in (("boy", "more"), ("baker", "fewer"))
]
WHOLE = {"block_tokens": "whole"}  # as "auto" is over servers
EAGER = {"enforce_eager": True, "max_num_seqs": 16}
FORMS = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},  # else it likes empty lines
    **{"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory) -> Iterator[object]:
    from parse_infer.engine import ParseEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as everywhere but in the other tests of this folder
        with ParseEngine.from_pretrained(
            "zoo:target", "zoo:draft", "zoo:adapter", backend="vllm", target_options=EAGER | FORMS, draft_options=EAGER
        ) as made:
            made.adaptive = False  # so that every answer has a draft
            yield made
        assert not any(process.alive for process in made.backend.processes.members)


@pytest.fixture(scope="module")
def local() -> ParseEngine:
    return ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", target_drafter=None)


def told(generation: Generation) -> tuple[object, ...]:
    spans = [(span.text, span.source, span.n_tokens) for span in generation.spans]
    return generation.token_ids, generation.finish_reason, spans


@pytest.mark.parametrize("settings", [{}, {"threshold": 1.01}, {"stop": ("\n",)}])
def test_answers_are_those_of_the_local_engine(coordinator, local, settings):
    settings = {"max_new_tokens": 200, **WHOLE, **settings}
    found = coordinator.generate(PROMPTS, **settings)
    wanted = local.generate(PROMPTS, keep_greedy_match=False, **settings)
    assert [told(g) for g in found] == [told(g) for g in wanted]
    assert coordinator.generate_target(PROMPTS[0], max_new_tokens=200).token_ids == (
        local.generate_target(PROMPTS[0], max_new_tokens=200).token_ids
    )


@pytest.mark.parametrize("ends", [{"ignore_eos": True}, {"min_tokens": 80}, {"min_tokens": 20, "stop_token_ids": 20}])
@pytest.mark.parametrize("threshold", [None, 1.01])
def test_answers_end_where_the_local_engines_do(coordinator, local, ends, threshold):
    """By vLLM's own settings of these names; a stop token stands at this place of the target's answer."""
    settings = {"max_new_tokens": 120, "threshold": threshold, **WHOLE, **ends}
    if (place := ends.get("stop_token_ids")) is not None:
        written = local.generate_target(PROMPTS[0], max_new_tokens=120).token_ids
        settings["stop_token_ids"] = [written[place]]
    found = coordinator.generate(PROMPTS[:6], **settings)
    assert [told(g) for g in found] == [
        told(g) for g in local.generate(PROMPTS[:6], keep_greedy_match=False, **settings)
    ]
    assert all(len(g.token_ids) >= ends.get("min_tokens", 120) for g in found)
    alone = coordinator.generate_target(PROMPTS[0], **settings)
    assert told(alone) == told(local.generate_target(PROMPTS[0], **settings))


def test_a_stream_is_the_same_answer(coordinator, local):
    *_, done = coordinator.stream(PROMPTS[1], max_new_tokens=200)
    wanted = local.generate(PROMPTS[1], keep_greedy_match=False, max_new_tokens=200, **WHOLE)
    assert told(done.generation) == told(wanted)


def test_blocks_over_servers_alternate_by_segments(coordinator):
    """Servers judge segments, so no text is promised to equal that of the local engine, which judges tokens."""
    for found in coordinator.generate(PROMPTS[:4], max_new_tokens=200, block_tokens=16):
        assert found.stats.rounds > 1 and found.finish_reason == "eos"
        assert "".join(span.text for span in found.spans) == found.text


def test_the_targets_server_holds_answers_to_a_form(coordinator):
    async def answered(**fields) -> dict:
        asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 64, "temperature": 0} | fields
        (answer,) = [piece async for piece in coordinator.backend.relay(asked)]
        return answer["choices"][0]["message"]

    unit = {"type": "object", "properties": {"unit": {"enum": ["kg", "lb"]}}, "required": ["unit"]}
    unit["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "unit", "schema": unit}}
    tool = {"type": "function", "function": {"name": "weigh", "parameters": unit}}
    message = coordinator.backend.run(answered(response_format=form))
    assert json.loads(message["content"])["unit"] in ("kg", "lb")
    choice = {"type": "function", "function": {"name": "weigh"}}
    called = coordinator.backend.run(answered(tools=[tool], tool_choice=choice))
    assert '"name": "weigh"' in str(called)  # a call that has begun: this model does not come to its end
    with pytest.raises(ValueError, match="rejects a request"):
        coordinator.backend.run(
            answered(tools=[tool], tool_choice={"type": "function", "function": {"name": "count"}})
        )


def test_a_server_refuses_to_judge_for_another_adapter(coordinator):
    """Each request about a draft names the adapter; so one that was replaced is noticed by the next request."""
    servers = coordinator.backend.servers["target"]
    (server,) = servers.members
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 0}
    for name in (servers.judging_model, servers.model):
        assert coordinator.backend.run(servers.ask_one(server, body | {"model": name}))["choices"]
    with pytest.raises(RequestRejected, match="does not exist") as refused:
        coordinator.backend.run(servers.ask_one(server, body | {"model": judge_name("another")}))
    assert refused.value.status == 404


def test_servers_that_are_killed_cost_no_answer(coordinator, local):
    """While the draft model's server is gone the target answers alone."""
    processes = coordinator.backend.processes.members
    wanted = [told(g) for g in local.generate(PROMPTS, keep_greedy_match=False, max_new_tokens=200, **WHOLE)]
    alone = [g.token_ids for g in local.generate_target(PROMPTS, max_new_tokens=200)]

    def kill() -> None:
        for process in processes:
            time.sleep(1.0)
            os.killpg(process.guard.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = coordinator.generate(PROMPTS * 2, max_new_tokens=200)
    killer.join()
    for generation, drafted, own in zip(found, wanted * 2, alone * 2, strict=True):
        assert generation.token_ids == own if generation.fallback else told(generation) == drafted
    deadline = time.monotonic() + 300
    while not all(process.alive and process.answers() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(1)
    coordinator.backend.run(asyncio.sleep(2))  # health is checked every half second
    found = coordinator.generate(PROMPTS, max_new_tokens=200)
    assert [told(g) for g in found] == wanted and not any(g.fallback for g in found)


def test_the_target_alone_runs_on_a_stock_server(local):
    """What PARSE is compared with: the same answers, without the plugin and what it needs."""
    from parse_infer.engine import ParseEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        with ParseEngine.from_pretrained("zoo:target", backend="vllm", zero_shot=True, target_options=EAGER) as made:
            (process,) = made.backend.processes.members
            started = Path(f"/proc/{process.guard.pid}/environ").read_text().split("\0")
            found = made.generate_target(PROMPTS[:4], max_new_tokens=100)
    assert "VLLM_PLUGINS=" in started and not any(word.startswith("VLLM_USE_V2_MODEL_RUNNER") for word in started)
    assert "--hf-overrides" not in process.command, "the model's class is the plugin's"
    wanted = local.generate_target(PROMPTS[:4], max_new_tokens=100)
    assert [g.token_ids for g in found] == [g.token_ids for g in wanted]


def test_a_server_that_cannot_start_says_why():
    from parse_infer.engine import ParseEngine

    with pytest.raises(OSError, match=r"the target server ended before it was ready: .*max_model_len"):
        ParseEngine.from_pretrained(
            "zoo:target", "zoo:draft", "zoo:adapter", backend="vllm", target_options={**EAGER, "max_model_len": 10**7}
        )
