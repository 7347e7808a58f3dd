"""Clients that people use, with their own requests: what they read is the engine's answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from parse_infer.engine import ParseEngine
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.serve.thread_runner import ThreadRunner
from tests.parse_infer.serve.conftest import Running, running

QUESTION, N = "Tom has 5 apples.", 24
USER = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def own(served) -> str:
    return served.engine.generate(QUESTION, max_new_tokens=N).text


@pytest.fixture
def thinking(make_thinking_engine) -> Running:
    """Its answers are "abc" and, after the thinking, "xyzabc</think>xy"."""

    def engine() -> ParseEngine:
        return make_thinking_engine("abc</think>xyz", "abc</think>xyz")

    with running(ThreadRunner(engine()), engine()) as server:
        yield server


@pytest.mark.slow
def test_openai(served, own):
    chat = {"model": "tiny", "messages": USER, "max_tokens": N}
    with served.client as client:
        assert client.models.list().data[0].id == "tiny"
        whole = client.chat.completions.create(**chat)
        assert whole.choices[0].message.content == own and whole.usage.completion_tokens == N
        stream = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == own

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**chat) for _ in range(2)))
            stream = await client.chat.completions.create(**chat, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return text, *{answer.choices[0].message.content for answer in answers}

    assert asyncio.run(ask()) == (own, own)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm, served, own, provider):
    with running(served.runner, served.engine, keys=ApiKeys("s3cret")) as guarded:
        chat = {"model": f"{provider}/tiny", "api_base": f"{guarded.url}/v1", "messages": USER, "max_tokens": N}
        whole = litellm.completion(**chat, api_key="s3cret")
        assert whole.choices[0].message.content == own and whole.usage.completion_tokens == N
        stream = litellm.completion(**chat, api_key="s3cret", stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == own
        assert chunks[-1].usage.completion_tokens == N
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(**chat, api_key="other", num_retries=0)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_reads_the_reasoning(litellm, thinking, provider):
    where = {"model": f"{provider}/target", "api_base": f"{thinking.url}/v1", "api_key": "none"}
    chat = {**where, "messages": [{"role": "user", "content": "?"}], "max_tokens": 6}
    message = litellm.completion(**chat).choices[0].message
    assert (message.reasoning_content, message.content) == ("abc", "xy")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**chat, stream=True) if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "abc"
    assert "".join(delta.content or "" for delta in deltas) == "xy"


@pytest.mark.slow
def test_langchain(served, own):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny", base_url=f"{served.url}/v1", api_key="none", max_completion_tokens=N, stream_usage=True
    )
    answer = model.invoke(QUESTION)
    assert answer.content == own and answer.usage_metadata["output_tokens"] == N
    pieces = list(model.stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == own
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == N
    assert asyncio.run(model.ainvoke(QUESTION)).content == own


def chunks_of(response: httpx.Response) -> list[Any]:
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    assert events.pop() == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_serve(served, path):
    """The requests of vLLM's `bench serve`, with its --ignore-eos.

    It takes the first chunk with a choice for the first token, and the chunk without a choice for the usage.
    """
    chat = "chat" in path
    parts = [{"type": "text", "text": QUESTION}]
    asked = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": N}
    plain = {"prompt": QUESTION, "repetition_penalty": 1.0, "max_tokens": N, "logprobs": None}
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    response = served.post(path, body | (asked if chat else plain), headers={"x-request-id": "bench-1"})
    assert response.status_code == 200
    *chunks, last = chunks_of(response)
    texts = [c["choices"][0]["delta"].get("content") if chat else c["choices"][0]["text"] for c in chunks]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == N and "".join(map(str, texts))
    first = 1 if chat else 0  # after the role
    assert texts[first], "no chunk long before the first token"


def test_vllm_bench_serve_finds_the_model_and_its_tokenizer(served):
    """Without --model it asks for the `id` of the first model, and takes the tokenizer from its `root`."""
    with running(served.runner, served.engine, model="public-name") as server:
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["id"], card["root"]) == ("public-name", "tiny")


def test_the_role_waits_for_the_first_text(served):
    """It would be taken for the first token while the draft model still writes."""
    body = {"messages": USER, "max_tokens": N, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as response:
        first = next(piece for piece in response.iter_raw() if piece)
    assert b'"role"' in first and b'"content":"' in first.replace(b'"content":""', b"")


@pytest.mark.slow
def test_open_webui(served, own):
    """Its requests: the models, a chat, and the title of the chat; all with headers of its own."""
    with running(served.runner, served.engine, keys=ApiKeys("s3cret")) as guarded:
        headers = {"Authorization": "Bearer s3cret", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "user"}
        models = httpx.get(f"{guarded.url}/v1/models", headers=headers).json()["data"]
        chat = {"model": models[0]["id"], "messages": [{"role": "system", "content": ""}, *USER]}
        stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": N}
        response = guarded.post("/v1/chat/completions", {**chat, "messages": USER, **stream}, headers=headers)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = chunks_of(response)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == own
        assert last["usage"]["completion_tokens"] == N
        title = guarded.post(
            "/v1/chat/completions", {**chat, "stream": False, "max_completion_tokens": 8}, headers=headers
        )
        assert title.status_code == 200 and title.json()["choices"][0]["message"]["content"]
        assert guarded.post("/v1/chat/completions", chat).status_code == 401
