"""Attributes of OpenTelemetry's conventions for generative AI (`gen_ai.*`, v0.1.0), without any text of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parse_infer.serve.choice_state import ChoiceState, Usage
from parse_infer.serve.protocol.chat import REST_OF_WINDOW

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


def request_attributes(path: str, model: str | None, stream: bool, choices: int) -> dict[str, Any]:
    """Attributes of a request; {} for a path with another kind of operation."""
    operation = _OPERATIONS.get(path.partition("?")[0])
    if operation is None:
        return {}
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "parse",
        "gen_ai.request.stream": stream,
    }
    found |= {} if model is None else {"gen_ai.request.model": model}
    return found | ({} if choices == 1 else {"gen_ai.request.choice.count": choices})


def answer_attributes(name: str, model: str, choices: Sequence[ChoiceState], usage: Usage) -> dict[str, Any]:
    """Attributes of answers that PARSE has written.

    Args:
        name: id of the response.
    """
    first = choices[0]
    settings, sampling = first.job.settings, first.job.settings.resume_sampling
    found: dict[str, Any] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": name,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if settings.max_new_tokens < REST_OF_WINDOW:
        found["gen_ai.request.max_tokens"] = settings.max_new_tokens
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if first.first_text_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = first.first_text_s
    return found
