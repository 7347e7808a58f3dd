"""A server that takes and returns text, with parameters of OpenAI's API alone, as llama.cpp's, Ollama and others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from aiohttp import web

from parse_infer.text.detokenizer import Detokenizer
from tests.parse_infer.backends.fake_server import _ONE_AT_A_TIME, FakeServer, _error

_KNOWN = {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stream", "logprobs"} | {
    "top_logprobs"
}


class TextServer(FakeServer):
    """
    Attributes:
        serves: "completions" and "chat", or one of them.
        lists: how it lists log-probabilities: "offsets" as OpenAI's completions, "bytes" as chats and llama.cpp; "":
            it refuses to.
        counts: whether it says how many tokens a prompt has.
        strict: it refuses fields that it does not know, and prompts of token ids; else it ignores the fields.
        wraps: it puts prompts of completions into its chat template, as Ollama does.
        faults: also "empty" (an answer without text), "odd" (chunks that are no completion).
    """

    def __init__(self, *args: Any, serves: Sequence[str] = ("completions", "chat"), lists: str = "") -> None:
        super().__init__(*args)
        self.serves, self.lists = serves, lists
        self.strict, self.wraps, self.counts = True, False, True

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, "completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, "chat")

    async def _respond(self, request: web.Request, kind: str) -> web.StreamResponse:
        if kind not in self.serves:
            return _error(404, "Not Found")
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else None
        if self.strict and (unknown := set(body) - _KNOWN):
            return _error(400, f"Unrecognized request argument supplied: {unknown.pop()}")
        if fault == "500":
            return _error(500, "the engine is dead")
        if fault == "hangs":
            await asyncio.sleep(3600)
        if fault == "gone":
            request.transport.close()
            raise asyncio.CancelledError
        if fault == "refused":
            return _error(400, "this is refused")
        if isinstance(fault, tuple):
            return _error(fault[0], "no", fault[1])
        if body.get("logprobs") and not self.lists:
            return _error(500, "logprobs is not supported")
        said = body.get("prompt", body.get("messages"))
        if isinstance(said[0], int):
            if self.strict:
                return _error(422, "prompt must be a string")
            ids = said
        elif kind == "completions" and not self.wraps:
            ids = self.lm.tokenizer.encode(said, add_special_tokens=False)
        else:
            ids = self.lm.render(f"Be kind. {said}" if kind == "completions" else said)
        chunks = self._chunks(ids, body, kind)
        if not body.get("stream"):
            text, reason = "", None
            for chunk in chunks:
                text, reason, last = text + chunk["text"], chunk["reason"], chunk
            holder = {"text": text} if kind == "completions" else {"message": {"content": text}}
            choice = {**holder, "finish_reason": reason, "logprobs": last["logprobs"]}
            return web.json_response(
                {"choices": [choice], "usage": {"prompt_tokens": len(ids) if self.counts else None}}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):
            for n, chunk in enumerate(chunks if fault != "empty" else ()):
                await asyncio.sleep(self.pause)
                holder = {"text": chunk["text"]} if kind == "completions" else {"delta": {"content": chunk["text"]}}
                choice = {**holder, "finish_reason": chunk["reason"], "logprobs": chunk["logprobs"]}
                event = json.dumps({"choices": [{}] if fault == "odd" else [choice]})
                await response.write(f"data: {event}\r\n\r\n".encode())
                if fault == "cut" and n == 7:
                    request.transport.close()
                    return response
            await response.write(b'data: {"choices": [], "usage": {}}\r\n\r\ndata: [DONE]\r\n\r\n')
        return response

    def _chunks(self, prompt: list[int], body: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
        """A token each; an end token has no text."""
        ids: list[int] = []
        text = Detokenizer(self.lm.tokenizer)
        for token in self._write(prompt, body):
            listed = self._listed(prompt, ids, token, len(text.text)) if body.get("logprobs") else None
            ids.append(token)
            ended = token in self.lm.eos_ids
            reason = "stop" if ended else "length" if len(ids) == body["max_tokens"] else None
            yield {"text": "" if ended else text.add([token]), "reason": reason, "logprobs": listed}

    def _listed(self, prompt: list[int], ids: list[int], token: int, place: int) -> dict[str, Any]:
        with _ONE_AT_A_TIME:
            self.decoder.seek([*prompt, *ids])
            value = torch.log_softmax(self.decoder.next_logits(), -1)[token].item()
        if self.lists == "offsets":
            return {"token_logprobs": [value], "text_offset": [len(prompt) + place]}
        data = self.lm.tokenizer.decode([token], skip_special_tokens=True).encode()
        return {"content": [{"token": "", "bytes": list(data), "logprob": value}]}
