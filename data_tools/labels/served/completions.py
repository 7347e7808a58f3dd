"""Requests and responses of one completion on OpenAI-compatible servers, with the checks of a response.

Rollouts continue a partial answer. Only `/v1/completions` supports this: a chat completion begins a new turn.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from parse_infer.errors import ParseError
from parse_infer.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """Request of at most `max_tokens` tokens after `prompt`: token ids, or text for a server that takes no ids."""

    home: int
    """Index of the first server to try, modulo their number. Requests with a common prefix share the index."""
    prompt: list[int] | str
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_ids: Collection[int] = ()

    def body(self) -> dict[str, Any]:
        """Return the JSON of the request, without the model. A text prompt uses only parameters of OpenAI's API."""
        sampling = self.sampling
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": sampling.temperature}
        body |= {"prompt": self.prompt, "top_p": sampling.top_p}
        if sampling.seed is not None and not sampling.greedy:
            body["seed"] = sampling.seed
        if isinstance(self.prompt, list):
            # Without these values, vLLM uses the model's generation config.
            body |= {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"stop_token_ids": sorted(self.end_ids), "return_token_ids": True}
        return body


@dataclass(frozen=True)
class Answer:
    """A completion: text, token ids if requested, and whether an end token ended the completion."""

    text: str
    ids: list[int] | None
    ended: bool


class BrokenAnswer(ParseError):
    """A malformed or incomplete response."""


def read_answer(content: str, request: Request) -> Answer:
    """Parse the answer in a response; raise BrokenAnswer if the answer is incomplete."""
    try:
        choice = json.loads(content)["choices"][0]
        text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BrokenAnswer("the answer is not a complete JSON completion") from None
    if reason not in ("stop", "length") or not isinstance(text, str):  # vLLM reports "abort" at its shutdown
        raise BrokenAnswer(f"the answer ended with finish_reason {reason!r}")
    if isinstance(request.prompt, str):
        return Answer(text, None, reason == "stop")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BrokenAnswer("the answer has no token_ids")
    if len(ids) > request.max_tokens or (reason == "length" and len(ids) < request.max_tokens):
        raise BrokenAnswer(f"the answer has {len(ids)} tokens, but the request asked for {request.max_tokens}")
    return Answer(text, ids, reason == "stop")


def read_models(content: str) -> dict[str, int | None]:
    """Return {name: context window} of the models on a server; None for an unreported window (not vLLM, SGLang)."""
    try:
        models = json.loads(content)["data"]
        return {str(model["id"]): model.get("max_model_len") for model in models}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BrokenAnswer("no list of models") from None
