"""Server-sent events as servers write them: any line end, field order and chunk size."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from aiohttp import web

from parse_infer.backends.pool.client import Client, RequestRejected, TransientServerError
from parse_infer.backends.pool.server_sent_events import EventDecoder
from tests.parse_infer.backends.fake_server import serving_app

TEXTS = ["数学 ½", "\u2028 raw \u0085", "a: b", ""]
DATA = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS]


def decoded(stream: bytes, size: int) -> list[bytes]:
    decoder, found = EventDecoder(), []
    for start in range(0, len(stream), size):
        found += decoder.feed(stream[start : start + size])
    return found + decoder.end()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("before", [b"", b": ping|", b"event: message|", b"id: 1|", b"retry: 5|:|id: 2|event: x|"])
@pytest.mark.parametrize("last", [b"||", b"|", b""])
def test_line_ends_and_chunk_sizes_do_not_change_the_data(line_end, before, last):
    stream = b": hello||" + b"||".join(before + b"data: " + data for data in DATA) + b"||" + before + b"data: [DONE]"
    stream = (stream + last).replace(b"|", line_end)
    for size in (1, 2, 3, 7, len(stream)):
        assert decoded(stream, size) == [*DATA, b"[DONE]"]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b'data: {"a":\ndata: 1}\n\n', [b'{"a":\n 1}']),
        (b"data: a\nevent: b\n\n", [b"a"]),
        (b"event: ping\n\ndata\n\ndata:\n\n: only a comment\n\n", []),
        (b"database: a\n data: b\n\n", []),
        (b"\r\n\r\ndata: a\r\n\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\n\ndata: c\r\n\r\n", [b"a", b"b", b"c"]),
    ],
)
def test_fields_are_those_of_the_standard(stream, expected):
    assert decoded(stream, 1) == decoded(stream, len(stream)) == expected


def test_an_event_does_not_wait_for_the_next_piece():
    for line_end in (b"\n", b"\r\n", b"\r"):
        assert EventDecoder().feed(b"data: a" + line_end * 2) == [b"a"]


def read(stream: bytes) -> list[object]:
    """The chunks that the client reads from a server that writes `stream`, byte for byte."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for byte in stream:
            await response.write(bytes([byte]))
        return response

    async def ask(url: str) -> list[object]:
        client = Client()
        try:
            async with aclosing(client.chunks(f"{url}/stream", {})) as chunks:
                return [chunk async for chunk in chunks]
        finally:
            await client.close()

    with serving_app([web.post("/stream", respond)]) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize("body", ["[" * 100_000, '{"error": []}', '{"error": {}}', "[1]", "", "<html>"])
def test_a_malformed_error_is_an_error_of_the_server(body):
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=400, text=body)

    async def ask(url: str) -> None:
        client = Client()
        try:
            await client.post(f"{url}/refuse", {})
        finally:
            await client.close()

    with serving_app([web.post("/refuse", respond)]) as url, pytest.raises(RequestRejected, match=r"\(400\)"):
        asyncio.run(ask(url))


def test_the_client_reads_such_a_stream():
    chunk = '{"choices": [{"delta": {"content": "ü"}}], "error": null}'
    stream = f": ping\r\n\r\nevent: message\r\nid: 7\r\ndata: {chunk}\r\n\r\ndata: [DONE]"
    assert read(stream.encode()) == [json.loads(chunk)]
    half = '{"choices": [{"delta": {"content": "\\ud83d"}}]}'  # of a surrogate pair, where a server cuts a text
    assert read(f"data: {half}\n\ndata: [DONE]\n\n".encode()) == [json.loads(half)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error": {"message": "x"}}', "failed in the middle of an answer"),
        ("[1]", "sent no completion"),
        ("null", "sent no completion"),
        ('{"choices": [', "incomplete JSON"),
        ("[" * 100_000, "incomplete JSON"),
        ("", "closed the connection in the middle"),
    ],
)
def test_chunks_that_are_no_answer_are_failures_of_the_server(data, message):
    with pytest.raises(TransientServerError, match=message):
        read(f"data: {data}\n\n".encode())
