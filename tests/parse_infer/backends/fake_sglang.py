"""A SGLang server, as far as PARSE uses it. Its forms are those of sgl-project/sglang, files under python/sglang/srt:

- managers/io_struct.py (`GenerateReqInput`), managers/tokenizer_manager.py (`_handle_batch_output`, `abort_request`,
  `detokenize_logprob_tokens`) and managers/schedule_batch.py at commit 001067fffe33427bee0ed2f007fb7551a1d76b44,
- managers/scheduler_components/logprob_result_processor.py (the first entry is null, the last token's id is clipped),
- entrypoints/openai/protocol.py (`ModelCard`, `CompletionRequest`) and serving_completions.py at commit
  004c82e07d876f6e4a0ad6e15325706b0f478f1a,
- sampling/sampling_params.py (`verify`) at commit 00c17cafcb9e289d5ca97c50e44ada54e4fd5b03.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web

from parse_infer.models.loading import LanguageModel
from tests.parse_infer.backends.fake_server import FakeServer, _common, _damaged

GENERATED: dict[str, Any] = {
    "text": " 3",
    "output_ids": [9],
    "meta_info": {
        "id": "7d0c1f6be63b4b4f9d4f1c1f7d6a2e55",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 6,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [[None, 4, None], [-2.25, 5, None], [-0.125, 0, None]],
        "output_token_logprobs": [[-0.5, 9, None]],
        "output_token_logprobs_length": 1,
        "input_top_logprobs": [None, [[-0.5, 7, None], [-1.5, 2, None]], [[-0.125, 258, None], [-3.0, 1, None]]],
        "output_top_logprobs": [[[-0.5, 9, None], [-1.0, 3, None]]],
        "reasoning_tokens": 0,
        "completion_tokens": 1,
        "cached_tokens": 3,
        "e2e_latency": 0.0071,
        "response_sent_to_client_ts": 1788000000.25,
    },
}
"""Answer to `POST /generate` of tokens [1, 2, 3, 4, 5, 258] of a vocabulary of 259, with `logprob_start_len` 3 and
`top_logprobs_num` 2."""
FIELDS = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt"}
SAMPLING = {"max_new_tokens", "temperature"}


class FakeSGLang(FakeServer):
    """
    Attributes:
        window: of the model; a request may not fill it.
        aborted: ids of requests that were aborted while their connection was open.
        logprob_fault: also "truncated" (the last tokens lack) and "changed" (other tokens than those sent).
    """

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self.window = lm.window
        self.card = {"owned_by": "sglang", "max_model_len": lm.window}
        self.aborted: list[str] = []
        self._open: set[str] = set()

    def more_routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self.sglang_generate), web.post("/abort_request", self.abort)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert "prompt_logprobs" not in body, "which SGLang ignores"
        if body.get("top_k", -1) < 1 and body.get("top_k", -1) != -1:
            return _refused(f"top_k must be -1 (disable) or at least 1, got {body['top_k']}.")
        self._open.add(body.get("rid", ""))
        try:
            return await super().completions(request)
        finally:
            self._open.discard(body.get("rid", ""))

    async def abort(self, request: web.Request) -> web.Response:
        """A request whose connection is closed is not known any more."""
        rid = (await request.json())["rid"]
        if rid in self._open:
            self.aborted.append(rid)
        return web.Response()

    async def sglang_generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        assert body.keys() - {"model"} <= FIELDS and body["sampling_params"].keys() <= SAMPLING  # it ignores "model"
        ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        if len(ids) >= self.window - 6:
            return _refused(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")
        if self.judge_fault == "500":
            return web.Response(status=500)
        cached = min(start, max((_common(ids, known) for _, known in self._cache), default=0))
        self._cache.append((None, ids))
        self.cached.append(cached)
        own, top = [[None, ids[start], None]], [None]
        entries = self._entries(ids, k)[start + 1 :]
        if cached and self.cache_fault:
            entries = _damaged(entries, self.cache_fault, 0)
        for id, entry in zip(ids[start + 1 :], entries, strict=True):
            own.append([entry[str(id)]["logprob"], id if id < self.lm.n_embeddings - 1 else 0, None])
            best = sorted(((e["logprob"], int(token), None) for token, e in entry.items()), reverse=True)
            top.append([list(one) for one in best[:k]])
        info = GENERATED["meta_info"] | {"prompt_tokens": len(ids), "cached_tokens": cached}
        if self.logprob_fault != "missing":
            end = -2 if self.logprob_fault == "truncated" else None
            info |= {"input_token_logprobs": own[:end], "input_top_logprobs": top[:end]}
        else:
            info = {name: value for name, value in info.items() if not name.startswith("input_")}
        if self.logprob_fault == "changed":
            own[-1][1] += 1
        return web.json_response(GENERATED | {"meta_info": info})

    def _entries(self, ids: list[int], k: int) -> list[Any]:
        fault, self.logprob_fault = self.logprob_fault, None
        try:
            return self._read(ids, k)["prompt_logprobs"]
        finally:
            self.logprob_fault = fault

    def _write(self, prompt: list[int], body: dict[str, Any]) -> Iterator[int]:
        """Ends before the window does; `ignore_eos` ignores other stop tokens too."""
        room = self.window - 2 - len(prompt)
        stops = [] if body.get("ignore_eos") else body.get("stop_token_ids", [])
        return super()._write(prompt, body | {"max_tokens": min(body["max_tokens"], room), "stop_token_ids": stops})


def _refused(message: str) -> web.Response:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response(error, status=400)
