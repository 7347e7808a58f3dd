"""The dialect of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parse_infer.backends.servers.dialects.dialect import Call, Dialect

GENERATE = "/inference/v1/generate"
"""Path of reads that use the prefix cache: `vllm serve --enable-scale-out --enable-prompt-tokens-details`."""


class VLLM(Dialect):
    """vLLM, as its users start it. Also tried with engines that no other dialect identifies."""

    name = "vLLM"
    owner = "vllm"
    reads_prompts = True
    load_metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting")

    def read(self, ids: Sequence[int], k: int) -> Call:
        return Call({"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k})

    def cached_read(self, ids: Sequence[int], start: int, k: int) -> Call:
        # The entries of cached tokens are uninitialised memory, which vLLM's tokenizer could not decode.
        settings = {"skip_reading_prefix_cache": False, "detokenize": False}
        body = self.read(ids, k).body
        return Call({"token_ids": body.pop("prompt"), "sampling_params": body | settings}, GENERATE)

    def entries(self, response: Any, ids: Sequence[int]) -> object:
        holder = response if "prompt_logprobs" in response else response["choices"][0]
        return holder["prompt_logprobs"]

    def cached_tokens(self, response: Any) -> int | None:
        try:
            return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])
        except (KeyError, TypeError, ValueError):
            return None
