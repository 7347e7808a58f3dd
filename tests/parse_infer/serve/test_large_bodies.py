"""Large bodies are read like others, one at a time, and leave the event loop time for other requests."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace

import httpx
import pytest

from parse_infer.serve import large_bodies
from parse_infer.serve.large_bodies import LARGE, JsonRequest

CHAT = "/v1/chat/completions"
PADDING = "x" * LARGE


def test_a_large_body_is_answered_as_a_small_one(served):
    texts = [served.chat(max_tokens=4, metadata=each).json() for each in ("", PADDING)]
    assert texts[0]["choices"][0]["message"] == texts[1]["choices"][0]["message"]
    wrong = [served.chat(temperature="hot", metadata=each) for each in ("", PADDING)]
    assert wrong[0].status_code == 400 and wrong[0].json() == wrong[1].json()


DEEP = b'", "user": ' + b"[" * 500 + b"]" * 500 + b"}"


@pytest.mark.parametrize("end", [b"", b'"}}', DEEP, b'\xff"}'], ids=["cut", "more", "deep", "Latin"])
def test_a_large_body_without_json_is_an_error_of_one_sentence(served, end):
    content = b'{"metadata": "' + PADDING.encode() + end
    refused = httpx.post(served.url + CHAT, content=content, headers={"content-type": "application/json"}, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the body is not valid JSON: ")
    assert gc.isenabled()


def test_other_requests_have_time_between_large_bodies(monkeypatch):
    steps: list[str] = []

    def parsed(body: bytes) -> object:
        steps.append("body")
        time.sleep(0.01)
        return len(body)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": PADDING.encode()}

    async def others() -> None:
        while True:
            await asyncio.sleep(0.001)
            steps.append("other")

    async def read() -> list[int]:
        scope = {"type": "http", "app": SimpleNamespace(state=SimpleNamespace(reading=asyncio.Lock()))}
        task = asyncio.create_task(others())
        found = await asyncio.gather(*(JsonRequest(scope, receive).json() for _ in range(4)))
        task.cancel()
        return found

    monkeypatch.setattr(large_bodies, "_parsed", parsed)
    assert asyncio.run(read()) == [LARGE] * 4
    between = "".join(step[0] for step in steps).split("b")[1:]
    assert len(between) == 4 and all(between), steps
