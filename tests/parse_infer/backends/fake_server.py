"""An OpenAI-compatible server in a thread of this process, whose model is a local decoder. It can be made to fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from aiohttp import web

from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_sampling import random_generator
from parse_infer.settings.sampling import Sampling

PIECE = 3  # tokens at a time in a stream, or characters of a chat
_ONE_AT_A_TIME = threading.Lock()  # servers share weights, to which a verification applies an adapter


class FakeServer:
    """
    Args:
        lm: what it serves; decoded with a decoder of its own.

    Attributes:
        faults: what happens to the next requests: "500", "cut" (breaks off in the middle), "half" (of the JSON),
            "nonsense", "abort" (ends without a token, as at a shutdown),
            "gone" (the connection is closed), "refused", "hangs" (no answer ever), a status with headers,
            None.
        bodies: of the requests so far.
        written: tokens that were sent in streams.
        pause: seconds before each piece of a stream.
        key: what clients must send, else they get the status `refusal`.
        max_logprobs: so many log-probabilities it gives at most, as a vLLM server that is started with that option.
        cache_block: tokens per block of the prefix cache, which `generate` reads; 0: `generate` does not exist.
        model_runner: of vLLM: what a read returns for cached tokens. 1: entries of whatever the memory held. 2: no
            entries, so that the first one (null) stands before those of the tokens that were computed.
        cached: cached tokens of the reads so far.
        cache_fault: what is wrong with cached reads: "zeros", "null" entries, "nothing" (no entries at all), "shifted"
            by a token, "noise" of half a nat, "boundary" (the first token after the cache), "understated" (a cached
            draft is reported as not cached), "500", "refused", "no JSON" (only a read of a cached draft is refused, as
            vLLM's V1 does at random).
        judge_fault: what happens to every request about a draft.
        logprob_fault: what is wrong with prompt log-probabilities: "missing", "shifted" by a token, "raw" logits, or
            "few".
        names: under which it serves the model.
        root: where the model's files are.
        card: what else /v1/models says of the model.
        offline: every connection is closed before an answer.
        health_status: what /health answers instead of 200, or "hangs".
        health: the text of /health.
        metrics: the text of /metrics; None: there is no such path.
        clients: the ports from which requests came, in order.
        given_keys: the `Authorization` of each request, or None.
        canned: response to every request but the GETs of the handshake: status, headers, and pieces of the body; the
            connection breaks at None.
        sessions: the header `x-session-id` of each completion and chat.
        headers: of each POST, their names in lower case.
        received, heads, methods: bodies, paths with headers, and methods of the requests with such a response.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.decoder = Decoder(lm.model, ())
        self.faults: deque[Any] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.written = 0
        self.pause = 0.0
        self.url = ""
        self.key: str | None = None
        self.refusal = 401
        self.max_logprobs = 20
        self.cache_block = 0
        self.model_runner = 1
        self.cache_fault: str | None = None
        self.cached: list[int] = []
        self._cache: list[tuple[str | None, list[int]]] = []
        self.judge_fault: str | None = None
        self.logprob_fault: str | None = None
        self.names = [lm.name]
        self.root = f"/models/{lm.name}"
        self.card: dict[str, Any] = {}
        self.offline = False
        self.health_status: int | str | None = None
        self.health = ""
        self.metrics: str | None = None
        self.clients: list[int] = []
        self.given_keys: list[str | None] = []
        self.canned: tuple[int, dict[str, str], list[bytes | None]] | None = None
        self.sessions: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.received: list[bytes] = []
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.methods: list[str] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        fault = self.faults.popleft() if self.faults else None
        if (body.get("logprobs") or body.get("prompt_logprobs")) and self.judge_fault:
            fault = self.judge_fault
        if body["model"] not in self.names:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if fault == "refused":
            return _error(400, "this is refused")
        if isinstance(fault, tuple):
            return _error(fault[0], "no", fault[1])
        if fault == "hangs":
            await asyncio.sleep(3600)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        size = self.lm.n_embeddings
        if any(token >= size for prompt in prompts for token in prompt):
            return _error(400, f"Token id {size} is out of vocabulary")
        if max(map(len, prompts)) + body["max_tokens"] > self.lm.window:
            return _error(400, f"This model's maximum context length is {self.lm.window} tokens")
        if body.get("logprobs", 0) > self.max_logprobs:
            return _error(400, f"Requested sample logprobs of {body['logprobs']} is greater than {self.max_logprobs}")
        if body.get("min_tokens", 0) > body["max_tokens"]:
            return _error(400, f"min_tokens must be less than or equal to max_tokens={body['max_tokens']}")
        if fault == "500":
            return _error(500, "the engine is dead")
        if fault == "gone":
            request.transport.close()
            raise asyncio.CancelledError
        if fault == "abort":
            ended = {"choices": [{"index": 0, "token_ids": [], "text": "", "finish_reason": "abort"}]}
            text = f"data: {json.dumps(ended)}\n\ndata: [DONE]\n\n" if body.get("stream") else json.dumps(ended)
            kind = "text/event-stream" if body.get("stream") else "application/json"
            return web.Response(text=text, content_type=kind)
        self._cache.append((body.get("cache_salt"), prompts[0]))
        if body.get("prompt_logprobs"):
            return _answer([self._read(prompts[0], body["prompt_logprobs"])], fault)
        if body.get("logprobs"):
            return _answer([self._choice(i, p, body["logprobs"]) for i, p in enumerate(prompts)], fault)
        if not body.get("stream"):
            ids = list(self._write(prompts[0], body))
            return _answer([{"index": 0, "token_ids": ids, "text": "", "finish_reason": "stop"}], fault)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):
            piece: list[int] = []
            listed: list[float] | None = [] if body.get("logprobs") == 0 else None
            for n, token in enumerate(self._write(prompts[0], body | {"listed": listed})):
                piece.append(token)
                if len(piece) == PIECE:
                    await self._send(response, piece, listed=listed)
                    piece = []
                if fault == "cut" and n == 7:
                    request.transport.close()
                    return response
            await self._send(response, piece, "stop", listed)
            await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """As vLLM reads with its cache: `PromptLogprobsWorker` and `_update_prompt_logprobs` of 0.33.0 for V2."""
        if not self.cache_block:
            return _error(404, "Not Found")
        body = await request.json()
        self.bodies.append(body)
        ids, settings = body["token_ids"], body["sampling_params"]
        assert not settings["detokenize"] and not settings["skip_reading_prefix_cache"], settings
        salt = body.get("cache_salt")
        shared = max((_common(ids, known) for own, known in self._cache if own == salt), default=0)
        cached = min(shared, len(ids) - 1) // self.cache_block * self.cache_block
        self._cache.append((salt, ids))
        self.cached.append(cached)
        entries = self._read(ids, settings["prompt_logprobs"])["prompt_logprobs"]
        held = [{"-7": {"logprob": 1e21, "rank": 0}} for _ in entries[1 : cached + 1]]
        entries[1 : cached + 1] = held if self.model_runner == 1 else []
        fault = self.cache_fault if cached else None
        if fault == "500":
            return _error(500, "the response is no JSON")
        if fault == "refused" or (fault == "no JSON" and cached > len(ids) - self.cache_block - 2):
            return _error(400, "Out of range float values are not JSON compliant")
        if fault == "understated":
            cached = min(cached, 256)
        if fault not in (None, "no JSON"):
            entries = _damaged(entries, fault, 1 if self.model_runner == 2 else cached + 1)
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        return web.json_response({"choices": [{"index": 0}], "prompt_logprobs": entries, "usage": usage})

    async def send_canned(
        self, request: web.Request, status: int, headers: dict[str, str], pieces: list[bytes | None]
    ) -> web.StreamResponse:
        self.received.append(await request.read())
        self.methods.append(request.method)
        self.heads.append((request.path_qs, {name.lower(): value for name, value in request.headers.items()}))
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        for piece in pieces:
            if piece is None:
                request.transport.close()
                break
            await response.write(piece)
            await asyncio.sleep(self.pause)
        return response

    def more_routes(self) -> list[web.RouteDef]:
        return []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Calls a tool, and gives the weight once the last message is the tool's result.

        A choice of "auto" is refused, as vLLM does without a parser.
        """
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        fault = self.faults.popleft() if self.faults else None
        if fault == "500":
            return _error(500, "the engine is dead")
        if body.get("tool_choice") == "auto":
            return _error(400, '"auto" tool choice requires --enable-auto-tool-choice')
        last, reason = body["messages"][-1], "tool_calls"
        message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": "by weight"}
        if last["role"] == "tool":
            message["content"], reason = f"They weigh {last['content']}.", "stop"
        else:
            function = {"name": "weigh", "arguments": '{"n": 5}'}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        own = {"id": "chatcmpl-1", "created": 1, "model": "target-17", "prompt_logprobs": None}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason, "token_ids": None}
            usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15, "prompt_tokens_details": None}
            return web.json_response(own | {"object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in (*_deltas(message), None):
            choice = {"index": 0, "delta": delta or {}, "finish_reason": None if delta else reason}
            chunk = own | {"object": "chat.completion.chunk", "choices": [choice]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _write(self, prompt: list[int], body: dict[str, Any]) -> Iterator[int]:
        sampling = Sampling(body.get("temperature", 1.0), seed=body.get("seed"))
        generator = random_generator(sampling, self.decoder.device)
        listed = body.get("listed")  # takes the log-probability of each token
        ids: list[int] = []
        stops, least = set(body.get("stop_token_ids", ())), body.get("min_tokens", 0)
        ends = stops if body.get("ignore_eos") else stops | self.lm.eos_ids
        while len(ids) < body["max_tokens"]:
            with _ONE_AT_A_TIME:
                self.decoder.seek([*prompt, *ids])
                banned = stops | self.lm.eos_ids if len(ids) < least else ()
                scores = None if listed is None else torch.log_softmax(self.decoder.next_logits().float(), -1)
                ids += self.decoder.decode(1, sampling, generator, banned)
                if listed is not None and scores is not None:
                    listed.append(scores[ids[-1]].item())
            self.written += bool(body.get("stream"))
            yield ids[-1]
            if ids[-1] in ends:
                return
            text = self.lm.tokenizer.decode(ids)
            if len(ids) > least and any(text.endswith(stop) for stop in body.get("stop", ())):
                return

    async def _send(
        self,
        response: web.StreamResponse,
        piece: list[int],
        reason: str | None = None,
        listed: list[float] | None = None,
    ) -> None:
        await asyncio.sleep(self.pause)
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": list(piece), "finish_reason": reason}
        if listed is not None and piece:
            choice["logprobs"] = {"token_logprobs": listed[-len(piece) :]}
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    @torch.inference_mode()
    def _read(self, prompt: list[int], k: int) -> dict[str, Any]:
        logits = self.lm.model(torch.tensor([prompt])).logits[0].float()
        scores = logits if self.logprob_fault == "raw" else logits.log_softmax(-1)
        entries: list[dict[str, Any] | None] = [None]
        for token, row in zip(prompt[1:], scores, strict=False):
            best = row.topk(1 if self.logprob_fault == "few" else k).indices.tolist()
            shown = {id: {"logprob": row[id].item(), "rank": int((row > row[id]).sum()) + 1} for id in [token, *best]}
            entries.append({str(id): entry for id, entry in shown.items()})
        if self.logprob_fault == "shifted":
            entries = [None, None, *entries[1:-1]]
        choice: dict[str, Any] = {"index": 0, "token_ids": [1], "text": "", "finish_reason": "length"}
        return choice if self.logprob_fault == "missing" else choice | {"prompt_logprobs": entries}

    def _choice(self, index: int, prompt: list[int], top: int) -> dict[str, Any]:
        with _ONE_AT_A_TIME:
            self.decoder.seek(prompt)
            values, ids = torch.log_softmax(self.decoder.next_logits(), -1).topk(top)
        found = dict(zip(ids.tolist(), values.tolist(), strict=True))
        listed = {f"token_id:{token}": value for token, value in found.items()}
        return {"index": index, "text": "", "logprobs": {"top_logprobs": [listed]}}


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The deltas of a message as vLLM streams it: of a tool call the name, then the arguments in pieces."""

    def pieces(text: str) -> list[str]:
        return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]

    first = {"role": message["role"], "content": ""}
    if message["content"]:
        return [first, *({"content": piece} for piece in pieces(message["content"]))]
    (call,) = message["tool_calls"]
    function = call["function"]
    begun = {"index": 0, **call, "function": function | {"arguments": ""}}
    rest = ({"index": 0, "function": {"arguments": piece}} for piece in pieces(function["arguments"]))
    return [first, *({"tool_calls": [each]} for each in (begun, *rest))]


def _damaged(entries: list[Any], fault: str, start: int) -> list[Any] | None:
    """`entries` as a server with the fault returns them; those from `start` on were computed."""
    head, tail = entries[:start], entries[start:]
    if fault == "zeros":
        tail = [
            {id: {"logprob": 0.0, "rank": 1} if n == 0 else e for n, (id, e) in enumerate(t.items())} for t in tail
        ]
    elif fault == "null":
        tail = [None for _ in tail]
    elif fault == "nothing":
        return None
    elif fault == "shifted":
        tail = [*tail[:1], *tail[:-1]]
    elif fault in ("noise", "boundary"):
        size, n = (0.5, len(tail)) if fault == "noise" else (5.0, 1)
        tail[:n] = [{id: e | {"logprob": e["logprob"] - size} for id, e in one.items()} for one in tail[:n]]
    return [*head, *tail]


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


def _answer(choices: list[dict[str, Any]], fault: str | None) -> web.Response:
    text = json.dumps({"choices": choices})
    if fault == "half":
        text = text[: len(text) // 2]
    if fault == "nonsense":
        text = "<html>not here</html>"
    return web.Response(text=text, content_type="application/json")


@contextmanager
def serving(
    server: FakeServer, host: str = "127.0.0.1", on_start: Callable[[], None] = lambda: None
) -> Iterator[FakeServer]:
    """Serve in a thread, which calls `on_start` first."""

    async def models(request: web.Request) -> web.Response:
        card = {"max_model_len": server.lm.window, "root": server.root, **server.card}
        return web.json_response({"data": [{"id": name, **card} for name in server.names]})

    async def health(request: web.Request) -> web.Response:
        if server.health_status == "hangs":
            await asyncio.sleep(3600)
        return web.Response(status=server.health_status or 200, text=server.health)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=server.metrics) if server.metrics is not None else _error(404, "Not Found")

    async def tokenize(request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": server.lm.tokenizer.encode(text, add_special_tokens=False)})

    @web.middleware
    async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
        server.clients.append(request.transport.get_extra_info("peername")[1])
        if server.offline:
            request.transport.close()
            raise asyncio.CancelledError
        given = request.headers.get("Authorization")
        server.given_keys.append(given)
        if request.method == "POST":
            server.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.path.startswith("/v1/") and server.key and given != f"Bearer {server.key}":
            return web.json_response({"error": "Unauthorized"}, status=server.refusal)  # as vLLM says it
        if server.canned is not None and request.path not in ("/health", "/metrics", "/v1/models"):
            return await server.send_canned(request, *server.canned)
        return await handler(request)

    routes = [
        web.get("/v1/models", models),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.post("/tokenize", tokenize),
        web.post("/v1/completions", server.completions),
        web.post("/v1/chat/completions", server.chat),
        web.post("/inference/v1/generate", server.generate),
        *server.more_routes(),
    ]
    with serving_app(routes, guarded, host=host, on_start=on_start) as server.url:
        yield server


@contextmanager
def serving_app(
    routes: list[web.RouteDef],
    *middlewares: Any,
    host: str = "127.0.0.1",
    on_start: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Serve the routes in a thread; yields the address."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def begin() -> web.AppRunner:
        app = web.Application(middlewares=middlewares)
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        address.append(f"http://{host}:{runner.addresses[0][1]}")
        return runner

    def run() -> None:
        on_start()
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
