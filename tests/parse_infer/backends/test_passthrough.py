"""Tools and structured output, which the target's own server answers."""

from __future__ import annotations

import json

import openai
import pytest

from parse_infer.sampling import Sampling
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.serve.conftest import running

USER = [{"role": "user", "content": "How heavy are 5 apples?"}]
TOOLS = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}]


@pytest.fixture
def relaying(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=2)
    with running(LoopRunner(coordinator), engine) as served:
        yield served, targets


def asked(targets) -> list[dict]:
    return [body for target in targets for body in target.bodies]


def test_a_call_of_a_tool_is_the_targets_own_and_says_so(relaying):
    served, targets = relaying
    with served.client as client:
        answer = client.chat.completions.create(
            model=served.backend.name,
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            user="me",
            extra_body={"parse": {"threshold": 0.5}},
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == '{"n": 5}'
    assert choice.message.reasoning == "by weight" and choice.message.reasoning_content is None
    assert choice.parse == {"mode": "target", "because": "tools"}
    assert answer.usage.completion_tokens == 6 and answer.model == served.backend.name
    (body,) = asked(targets)
    assert body["messages"] == USER and body["tools"] == TOOLS and body["temperature"] == 0
    assert "max_tokens" not in body, "the server knows how much room is left"
    assert not {"parse", "user"} & body.keys(), "only what the server needs is passed on"
    assert "parse_answers_relayed_total 1.0" in served.metrics


def test_relayed_requests_are_sampled_like_all_others(relaying, monkeypatch, capfd):
    served, targets = relaying
    monkeypatch.setattr(served.backend, "default_sampling", Sampling(0.7, 0.8, 20))
    with running(served.backend, served.engine) as sampling:
        given = {"temperature": 0, "seed": 3, "stop_token_ids": [65], "min_tokens": 2, "repetition_penalty": 1}
        for fields in ({}, given):
            response = sampling.chat(tools=TOOLS, chat_template_kwargs={"think": True}, **fields)
            assert response.status_code == 200
    first, second = asked(targets)
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.7, 0.8, 20)
    assert second | given == second and (second["top_p"], second["top_k"]) == (0.8, 20)
    assert first["chat_template_kwargs"] == {"think": True}
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"answered"' in line]
    told = [(line["mode"], line["because"], line["completion_tokens"]) for line in lines]
    assert told == [("target", "tools", 6)] * 2
    assert lines[-1]["id"] == response.headers["x-request-id"] and lines[-1]["seconds"] > 0


def test_a_conversation_with_tools_is_streamed(relaying):
    served, targets = relaying
    call = {"id": "call-1", "type": "function", "function": {"name": "weigh", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "apples", "refusal": None},
        {"role": "tool", "tool_call_id": "call-1", "content": "800 g", "name": "weigh", "cache_control": {}},
    ]
    with served.client as client:
        stream = client.chat.completions.create(model=served.backend.name, messages=messages, stream=True)
        told = list(stream)
    assert {chunk.model for chunk in told} == {served.backend.name}
    chunks = [chunk.choices[0] for chunk in told]
    assert chunks[0].delta.tool_calls[0].function.name == "weigh"
    assert chunks[-1].finish_reason == "tool_calls" and chunks[-1].parse["because"] == "messages.2.tool_calls"
    (body,) = asked(targets)
    assert body["messages"][0] == messages[0] | {"role": "system"}, "which every chat template knows"
    assert body["messages"][2] == {"role": "assistant", "tool_calls": [call], "reasoning_content": "apples"}
    assert body["messages"][3] == {"role": "tool", "tool_call_id": "call-1", "content": "800 g"}


def test_structured_output_continues_a_message_that_has_begun(relaying):
    served, targets = relaying
    form = {"type": "json_schema", "json_schema": {"name": "weight", "schema": {"type": "object"}}}
    begun = [*USER, {"role": "assistant", "content": '{"kg"'}]
    answer = served.post("/v1/chat/completions", {"messages": begun, "response_format": form, "max_tokens": 7})
    assert answer.json()["choices"][0]["parse"]["because"] == "response_format"
    (body,) = asked(targets)
    assert body["response_format"] == form and body["max_tokens"] == 7
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_switches_of_the_chat_template_are_passed_on(engine, connect, monkeypatch):
    coordinator, (target,), _ = connect(engine)
    monkeypatch.setattr(coordinator.target, "template_options", {"enable_thinking": False})
    with running(LoopRunner(coordinator), engine) as served:
        assert served.chat(tools=TOOLS).status_code == 200
        assert target.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        assert served.chat(tools=TOOLS, chat_template_kwargs={"brief": True}).status_code == 200
        assert target.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False, "brief": True}


def test_what_the_targets_server_refuses_is_told_in_its_words(relaying):
    served, _targets = relaying
    with served.client as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.backend.name, messages=USER, tools=TOOLS, tool_choice="auto")
    assert refused.value.body["message"] == '"auto" tool choice requires --enable-auto-tool-choice'


def test_a_key_that_the_targets_server_refuses_is_no_mistake_of_the_client(relaying, capfd):
    served, targets = relaying
    for target in targets:
        target.key = "another"
    with running(served.backend, served.engine) as server:
        refused = server.chat(tools=TOOLS)
    assert refused.status_code == 502 and refused.json()["error"]["code"] == "target_refuses"
    assert "(401)" in refused.json()["error"]["message"]
    assert "no answer: the target's server rejects a request (401)" in capfd.readouterr().err


def test_another_server_is_asked_where_one_fails(relaying):
    served, targets = relaying
    for target in targets:
        target.faults.append("500")
    assert served.chat(tools=TOOLS).status_code == 200
    assert len(asked(targets)) == 3


@pytest.mark.parametrize("fault", ["cut", "unended"])
def test_a_stream_that_breaks_off_ends_with_an_error(relaying, fault):
    served, targets = relaying
    for target in targets:
        target.faults.append(fault)
    text = served.chat(tools=TOOLS, stream=True).text
    assert '"tool_calls":[{' in text and '"error"' in text and "[DONE]" not in text
    assert len(asked(targets)) == 1, "what has begun is not begun again"
    assert served.becomes_idle(5)


def test_servers_that_fail_again_and_again_are_503(relaying, capfd):
    served, targets = relaying
    for target in targets:
        target.faults.extend(["500"] * 2)
    with running(served.backend, served.engine) as server:
        failed = server.chat(tools=TOOLS)
    assert failed.status_code == 503 and int(failed.headers["Retry-After"]) >= 1
    assert failed.json()["error"]["message"] == "this model's servers failed: try again in 5 s"
    log = capfd.readouterr().err
    assert "no answer: the target servers failed 4 times" in log and '"errors"' not in log
