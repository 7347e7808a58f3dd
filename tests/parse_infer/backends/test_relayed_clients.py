"""Clients whose requests pass through to the target's server: tools, and lm-eval's log-likelihoods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from aiohttp import web

from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.serve.conftest import running

USER = [{"role": "user", "content": "How heavy are 5 apples?"}]
WEIGH = {"name": "weigh", "description": "Weighs.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEIGH}]


# The text, and the tool calls as a message of the history has them.
Reply = tuple[str, list[dict[str, Any]]]


def reply(answer: Any) -> Reply:
    """What an agent reads from a completion, or joins from the chunks of one."""
    if not isinstance(answer, list):
        message = answer.choices[0].message
        return message.content or "", [call.model_dump() for call in message.tool_calls or ()]
    deltas = [chunk.choices[0].delta for chunk in answer]
    calls: dict[int, dict[str, Any]] = {}
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    for piece in pieces:
        if piece.id:
            function = {"name": piece.function.name, "arguments": ""}
            calls[piece.index] = {"id": piece.id, "type": piece.type, "function": function}
        calls[piece.index]["function"]["arguments"] += piece.function.arguments
    assert answer[-1].choices[0].finish_reason == ("tool_calls" if calls else "stop")
    assert not calls or len(pieces) > 2, "not in pieces"
    return "".join(delta.content or "" for delta in deltas), list(calls.values())


@pytest.fixture(params=["sync", "sync, streamed", "async", "async, streamed"])
def ask(request, relaying) -> Callable[[list[dict[str, Any]]], Reply]:
    """Asks with tools, by one of openai's clients."""
    served, stream = relaying[0], "streamed" in request.param
    chat = {"model": served.runner.name, "tools": TOOLS, "stream": stream}

    def ask_sync(messages: list[dict[str, Any]]) -> Reply:
        with served.client as client:
            answer = client.chat.completions.create(**chat, messages=messages)
            return reply(list(answer) if stream else answer)

    async def ask_async(messages: list[dict[str, Any]]) -> Reply:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(**chat, messages=messages)
            return reply([chunk async for chunk in answer] if stream else answer)

    return (lambda messages: asyncio.run(ask_async(messages))) if "async" in request.param else ask_sync


def test_openai_calls_a_tool(ask):
    text, (call,) = ask(USER)
    function = {"name": "weigh", "arguments": '{"n": 5}'}
    assert (text, call) == ("", {"id": "call-1", "type": "function", "function": function})


def test_an_agent_answers_with_the_result_of_its_tool(ask, relaying):
    """It asks until there is no further call, and sends each time what was said before."""
    served, targets = relaying
    tools = {"weigh": lambda n: f"{n * 150} g"}
    messages, turns = [*USER], 0
    while turns < 5:
        text, calls = ask(messages)
        turns += 1
        if not calls:
            break
        messages.append({"role": "assistant", "content": text or None, "tool_calls": calls})
        for call in calls:
            result = tools[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert (text, turns) == ("They weigh 750 g.", 2)
    sent = [body["messages"] for target in targets for body in target.bodies]
    assert sorted(sent, key=len) == [USER, messages], "the whole history reaches the target"
    assert "parse_answers_relayed_total 2.0" in served.metrics


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_a_tool(relaying, litellm, stream):
    served, _ = relaying
    where = {"model": f"openai/{served.runner.name}", "api_base": f"{served.url}/v1", "api_key": "none"}
    answer = litellm.completion(**where, messages=USER, tools=TOOLS, tool_choice="required", stream=stream)
    answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weigh", '{"n": 5}')


@pytest.mark.slow
def test_langchain_calls_a_tool_and_uses_its_result(relaying):
    from langchain_openai import ChatOpenAI

    served, _ = relaying
    model = ChatOpenAI(model=served.runner.name, base_url=f"{served.url}/v1", api_key="none")
    tooled = model.bind_tools(TOOLS)
    called = tooled.invoke(USER)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weigh", {"n": 5})
    whole = None
    for piece in tooled.stream(USER):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == {"n": 5}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "750 g"}
    for message in (called, whole):
        assert tooled.invoke([*USER, message, result]).content == "They weigh 750 g."


class Echoing(FakeServer):
    """Scores the prompts of a completion with `echo`, as vLLM does."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("echo"):
            return await super().completions(request)
        self.bodies.append(body)
        choices = [self._echoed(i, prompt) for i, prompt in enumerate(body["prompt"])]
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": choices})

    @torch.inference_mode()
    def _echoed(self, index: int, ids: list[int]) -> dict[str, Any]:
        scores = self.lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        best = scores.max(-1)
        names = [f"token_id:{token}" for token in [*ids, int(best.indices[-1])]]
        values = [None, *(scores[i, token].item() for i, token in enumerate(ids[1:])), best.values[-1].item()]
        best_ids, best_values = best.indices.tolist(), best.values.tolist()
        top = [{f"token_id:{id}": value} for id, value in zip(best_ids, best_values, strict=True)]
        for name, value, offered in zip(names[1:], values[1:], top, strict=True):
            offered.setdefault(name, value)
        logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": [None, *top]}
        return {"index": index, "text": "", "logprobs": logprobs}


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [1, 3])
def test_lm_eval_gets_the_targets_log_likelihoods(make_engine, connect, concurrent):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    engine = make_engine()
    coordinator, (target,), _ = connect(engine, server_type=Echoing)
    greedy = engine.generate_target("Tom has 5 apples.", max_new_tokens=4)
    tokenizer, model = engine.target.tokenizer, engine.target.model
    prompt = tokenizer.decode(engine.target.render("Tom has 5 apples."))
    asked = [("Tom has", " 5 apples"), ("Tom", " left"), (prompt, greedy.text)]
    with running(LoopRunner(coordinator), engine) as served:
        client = get_model("local-completions")(
            model=served.runner.name, base_url=f"{served.url}/v1/completions", num_concurrent=concurrent, batch_size=1
        )
        found = client.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)])
        assert "parse_answers_relayed_total" in served.metrics
    assert target.bodies and all(body["echo"] and body["logprobs"] == 1 for body in target.bodies)
    for (context, continuation), (value, is_greedy) in zip(asked, found, strict=True):
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (context, continuation)]
        with torch.inference_mode():
            scores = model(torch.tensor([[*ids[0], *ids[1]]])).logits[0].log_softmax(-1)[len(ids[0]) - 1 :]
        expected = sum(scores[i, token].item() for i, token in enumerate(ids[1]))
        assert value == pytest.approx(expected, abs=1e-4)
        assert is_greedy == (scores[:-1].argmax(-1).tolist() == ids[1])
    assert [is_greedy for _, is_greedy in found] == [False, False, True]
