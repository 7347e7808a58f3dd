"""Pass-through of tools and structured output to the target's server; the answer reports that no draft was used."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.choice_state import CompletionDetails, Usage
from parse_infer.serve.event_stream import api_errors
from parse_infer.serve.logs import request_id
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.protocol.chat import ChatBody, ChatChoice, ChatCompletion, Reply, TargetAlone
from parse_infer.serve.runner import Runner

log = logging.getLogger("parse_infer.serve")
_REPLY = ("content", "tool_calls", "reasoning", "reasoning_content")


async def relayed(
    backend: Runner,
    queue: AdmissionQueue,
    metrics: Metrics,
    body: ChatBody,
    fields: dict[str, Any],
    model: str,
    note: Callable[[Mapping[str, Any]], None],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield one completion, or its chunks with `stream`.

    Args:
        fields: fields of the request to the target's server.
        model: served name of the target.
        note: called with the fields of the log record.

    Raises ApiError if the backend or its server rejects the request or fails.
    """
    assert body.form is not None
    asked_at, usage = time.perf_counter(), None
    alone = TargetAlone(because=body.form)
    async with queue.place(body.choices):
        with api_errors():
            async with aclosing(backend.relay(fields)) as pieces:
                async for piece in pieces:
                    usage = piece.get("usage") or usage
                    yield _chunk(piece, alone, model) if body.stream else _whole(piece, alone, model)
        metrics.relayed.inc(body.choices)
    told = {
        "id": request_id.get(),
        "answers": body.choices,
        "seconds": round(time.perf_counter() - asked_at, 4),
        "mode": "target",
        "adaptive": False,
        "because": body.form,
        **{name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage and name in usage},
    }
    log.info("answered", extra={"fields": told})
    note(told)


def _whole(answer: dict[str, Any], alone: TargetAlone, model: str) -> dict[str, Any]:
    """Keep only the fields of our schema; servers add their own."""
    choices = [
        ChatChoice(
            index=choice["index"],
            message=Reply(**{name: choice["message"].get(name) for name in _REPLY}),
            finish_reason=choice["finish_reason"],
            parse=alone,
        )
        for choice in answer["choices"]
    ]
    count = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    none = CompletionDetails(accepted_prediction_tokens=0, rejected_prediction_tokens=0)
    usage = Usage(**count, completion_tokens_details=none)
    completion = ChatCompletion(id=answer["id"], created=answer["created"], model=model, choices=choices, usage=usage)
    return completion.model_dump()


def _chunk(chunk: dict[str, Any], alone: TargetAlone, model: str) -> dict[str, Any]:
    ended = [choice.get("finish_reason") is not None for choice in chunk["choices"]]
    said = [
        choice | {"parse": alone.model_dump()} if end else choice
        for choice, end in zip(chunk["choices"], ended, strict=True)
    ]
    return chunk | {"model": model, "choices": said}
