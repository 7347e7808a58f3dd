"""An OpenAI-compatible server of real models, decoded here, that can be told to fail, to die and to come back."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from parse_infer.models.batch_decoder import BatchDecoder, BatchRow
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_infer.text.detokenizer import decode

Fault = str | None  # "status 500", "drop", "cut", "garbage", "slow", "abort", "short"


@dataclass
class CompletionServer:
    """Serves on a thread from `start` to `kill`, each time on the same port.

    Attributes:
        fault: what goes wrong with a completion, by its number.
        pause: seconds that every completion takes at least.
        asked: bodies of all completions, in the order they arrived.
        answered: how many were answered.
        most: how many of one model were in work at a time.
    """

    models: Mapping[str, LanguageModel]
    fault: Callable[[int], Fault] = lambda number: None
    pause: float = 0.0
    ids: bool = True
    """Whether it speaks token ids."""
    completions: bool = True
    """Whether it has /v1/completions."""
    lists: bool = True
    """Whether /v1/models works; `transformers serve` fails there where this machine has no hub cache."""
    key: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self._port = 0
        self._working: Counter[str] = Counter()
        self._lock, self._decoding = threading.Lock(), threading.Lock()
        self._http: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()

    def start(self) -> CompletionServer:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                service._connections.add(self.connection)

            def do_GET(self) -> None:
                service._models(self)

            def do_POST(self) -> None:
                service._completion(self)

            def log_message(self, *args: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: object) -> None:
                pass  # connections that were killed

        self._http = Http(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def kill(self) -> None:
        """As `kill -9` leaves it: nobody listens, and all connections break."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            for connection in list(self._connections):
                _break(connection)
            self._connections.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def _models(self, http: BaseHTTPRequestHandler) -> None:
        if http.path == "/version" and self.version is not None:
            _send(http, 200, {"version": self.version})
        elif http.path != "/v1/models":
            _send(http, 404, {"detail": "Not Found"})
        elif not self.lists:
            _send(http, 500, {"detail": "Cache directory not found"})
        elif self._is_known(http):
            window = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
            _send(http, 200, {"object": "list", "data": [{"id": name} | window for name in self.models]})

    def _is_known(self, http: BaseHTTPRequestHandler) -> bool:
        known = self.key is None or http.headers["Authorization"] == f"Bearer {self.key}"
        if not known:
            _send(http, 401, {"error": {"message": "Invalid API key."}})
        return known

    def _completion(self, http: BaseHTTPRequestHandler) -> None:
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        if http.path != "/v1/completions" or not self.completions:
            _send(http, 404, {"detail": "Not Found"})
            return
        if not self.ids and not isinstance(body["prompt"], str):
            _send(http, 422, {"detail": "prompt must be a string"})
            return
        if not self._is_known(http):
            return
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self._working[body["model"]] += 1
            self.most = max(self.most, *self._working.values())
        try:
            time.sleep(self.pause)
        finally:  # before the answer, after which the client may ask again at once
            with self._lock:
                self._working[body["model"]] -= 1
        self._answer(http, body, self.fault(number))

    def _answer(self, http: BaseHTTPRequestHandler, body: dict[str, Any], fault: Fault) -> None:
        if fault and fault.startswith("status"):
            _send(http, int(fault.split()[1]), {"error": {"message": "on purpose"}}, {"Retry-After": "0"})
        elif fault == "drop":
            _break(http.connection)
        elif fault == "garbage":
            _send(http, 200, ["?"])
        else:
            if fault == "slow":
                time.sleep(2.0)
            choice = self._choice(body)
            if fault == "abort":
                choice |= {"finish_reason": "abort", "token_ids": choice["token_ids"][:1]}
            if fault == "short":
                choice |= {"finish_reason": "length", "token_ids": choice["token_ids"][:0]}
            if not (self.ids and body.get("return_token_ids")):
                del choice["token_ids"]
            _send(http, 200, {"choices": [choice]}, cut=fault == "cut")
            with self._lock:
                self.answered += 1

    @torch.inference_mode()
    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        lm = self.models[body["model"]]
        prompt = body["prompt"]
        if k := body.get("prompt_logprobs"):
            scores = lm.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
            entries: list[Any] = [None]
            for token, row in zip(prompt[1:], scores, strict=False):
                ids = [token, *row.topk(k).indices.tolist()]
                entries.append(
                    {str(i): {"logprob": row[i].item(), "rank": int((row > row[i]).sum()) + 1} for i in ids}
                )
            return {"text": "", "token_ids": [1], "finish_reason": "length", "prompt_logprobs": entries}
        ids = lm.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        ends = lm.eos_ids | set(body.get("stop_token_ids", ()))
        sampling = Sampling(body["temperature"], body["top_p"], max(0, body.get("top_k", 0)), body.get("seed"))
        with self._decoding:
            decoder = BatchDecoder(lm.model, ends, batch_size=1)
            row = BatchRow(0, len(ids), body["max_tokens"], sampling)
            (written,) = decoder.decode(decoder.prefill([ids]), [row])
        reason = "stop" if written[-1] in ends else "length"
        return {"text": decode(lm.tokenizer, written), "token_ids": written, "finish_reason": reason}


def _send(
    http: BaseHTTPRequestHandler, status: int, body: Any, headers: Mapping[str, str] | None = None, cut: bool = False
) -> None:
    content = json.dumps(body).encode()
    content = content[: len(content) // 2] if cut else content
    http.send_response(status)
    for name, value in ({"Content-Type": "application/json"} | dict(headers or {})).items():
        http.send_header(name, value)
    http.send_header("Content-Length", str(len(content)))
    http.end_headers()
    http.wfile.write(content)


def _break(connection: socket.socket) -> None:
    with suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)
