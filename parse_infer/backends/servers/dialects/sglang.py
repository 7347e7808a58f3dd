"""The dialect of SGLang."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from parse_infer.backends.servers.dialects.dialect import Call, Dialect

GENERATE = "/generate"
_ABORT = "/abort_request"


class SGLang(Dialect):
    """SGLang, whose reads use its prefix cache by themselves: `logprob_start_len` says from where."""

    name = "SGLang"
    owner = "sglang"
    reads_prompts = True
    load_metrics = ("sglang:num_running_reqs", "sglang:num_queue_reqs")  # with --enable-metrics
    reserved_tokens = 8  # its scheduler refuses longer prompts, and ends answers earlier

    def read(self, ids: Sequence[int], k: int) -> Call:
        return self.cached_read(ids, 0, k)

    def cached_read(self, ids: Sequence[int], start: int, k: int) -> Call:
        settings = {"max_new_tokens": 1, "temperature": 0}
        fields = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": k}
        return Call({"input_ids": list(ids), "sampling_params": settings, **fields}, GENERATE)

    def entries(self, response: Any, ids: Sequence[int]) -> list[Any]:
        """Convert both lists of `meta_info`; the result is too short if these lack some of `ids`."""
        info = response["meta_info"]
        own: list[Any] = info["input_token_logprobs"]
        top: list[Any] = info["input_top_logprobs"]
        if min(len(own), len(top)) <= len(ids):
            return own if len(own) < len(top) else top
        entries: list[Any] = [None]
        for id, (value, reported, *_), first in zip(ids, own[-len(ids) :], top[-len(ids) :], strict=False):
            listed = {str(token): {"logprob": logprob} for logprob, token, *_ in first}
            # The vocabulary's last token is reported as 0.
            entries.append(listed | {str(id): {"logprob": value}} if reported in (id, 0) else {})
        return entries

    def cached_tokens(self, response: Any) -> int | None:
        try:
            return int(response["meta_info"]["cached_tokens"])
        except (KeyError, TypeError, ValueError):
            return None

    def stream(self, body: dict[str, Any], confidences: bool) -> dict[str, Any]:
        return body | {"rid": uuid.uuid4().hex}

    def abort(self, body: Mapping[str, Any]) -> Call:
        # SGLang may decode on after the connection is closed, and then no longer knows the request.
        return Call({"rid": body["rid"]}, _ABORT)
