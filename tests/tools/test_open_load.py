"""The open loop: requests arrive at random and wait for nobody; answers and failures are counted."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from aiohttp import web

from tests.parse_infer.backends.fake_server import serving_app
from tools.measure_serving import main
from tools.open_load import CHAT, arrivals, open_load

BODIES = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(40)]


def test_requests_arrive_independently():
    due = arrivals(4.0, 20_000)
    gaps = [b - a for a, b in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 * mean**2, rel=0.06), "as exponential ones"
    assert arrivals(4.0, 5) == due[:5] != arrivals(4.0, 5, seed=1)


def event(delta: dict[str, str]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


async def chat(request: web.Request) -> web.StreamResponse:
    """Answers after 0.2 s, with a first text after 0.1 s; every tenth request fails in another way."""
    number = int((await request.json())["messages"][0]["content"])
    if number % 10 == 1:
        return web.json_response({"error": {}}, status=429)
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(event({"role": "assistant"}))
    await asyncio.sleep(0.1)
    if number % 10 == 2:
        await response.write(b'data: {"error": {"code": "timeout"}}\n\n')
        return response
    await response.write(event({"content": "a"}))
    await asyncio.sleep(0.1)
    if number % 10 == 3:
        return response
    if number % 10 == 4:
        request.transport.close()  # type: ignore[union-attr]
        return response
    await response.write(b": keep-alive\n\ndata: [DONE]\n\n")
    return response


@pytest.mark.slow
def test_requests_wait_for_nobody_and_failures_have_their_kind():
    open_ones, most = 0, 0

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal open_ones, most
        open_ones += 1
        most = max(most, open_ones)
        try:
            return await chat(request)
        finally:
            open_ones -= 1

    with serving_app([web.post(CHAT, counted)]) as url:
        point = open_load(url, 100.0, BODIES)
        assert point.failures == {"429": 4, "error": 4, "broken": 8} and len(point.all_s) == 24
        assert min(point.all_s) >= 0.2 and min(point.first_s) >= 0.1
        assert all(first < whole for first, whole in zip(point.first_s, point.all_s, strict=True))
        assert most > 1, "requests wait for nobody"
        assert "4 x 429, 8 x broken, 4 x error" in str(point) and "of 100 arriving" in str(point)
    gone = open_load(url, 1000.0, BODIES[:3])
    assert gone.failures == {"unreachable": 3} and str(gone).startswith("no answer; failures: 3 x unreachable")


@pytest.mark.slow
def test_both_ways_to_answer_are_measured_at_each_rate(monkeypatch, capsys):
    modes: list[object] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        modes.append(body.get("parse", {}).get("mode"))
        if not body["stream"]:
            return web.json_response({"choices": [{"message": {"content": "a"}}]})
        return web.Response(body=event({"content": "a"}) + b"data: [DONE]\n\n")

    monkeypatch.setattr("tools.measure_serving.ANSWERS", 3)
    with serving_app([web.post(CHAT, answer)]) as url:
        main(["open", "--url", url, "--rate", "200", "--rate", "400"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["target:", "parse:"] * 2
    assert all("failures: none" in line for line in lines) and "of 400 arriving" in lines[2]
    assert modes.count("target") == 6 and modes.count(None) == 7, "one warms up"
