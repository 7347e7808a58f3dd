"""One completion as OpenAI-compatible servers take and give it, and what must hold of an answer.

Rollouts go on from the middle of an answer, so `/v1/completions` it is: chat completions begin a turn of their own.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from parse_infer.models.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """At most `max_tokens` tokens after `prompt`, which is token ids, or text where the server does not take ids."""

    home: int
    """Which server is asked first, modulo their number: what shares a prefix belongs together."""
    prompt: list[int] | str
    max_tokens: int
    sampling: Sampling = Sampling()
    end_ids: Collection[int] = ()

    def body(self) -> dict[str, Any]:
        """JSON of the request, without the model. Text stays with what OpenAI's own servers know."""
        sampling = self.sampling
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": sampling.temperature}
        body |= {"prompt": self.prompt, "top_p": sampling.top_p}
        if sampling.seed is not None and not sampling.greedy:
            body["seed"] = sampling.seed
        if isinstance(self.prompt, list):
            # Said, or vLLM takes them from the model's generation config.
            body |= {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"stop_token_ids": sorted(self.end_ids), "return_token_ids": True}
        return body


@dataclass(frozen=True)
class Answer:
    """What was written: its text, its token ids where these were asked for, and whether an end token ended it."""

    text: str
    ids: list[int] | None
    ended: bool


class BrokenAnswer(ValueError):
    """Something else than what was asked for."""


def read_answer(content: str, request: Request) -> Answer:
    """The answer in a response. BrokenAnswer if it is not whole."""
    try:
        choice = json.loads(content)["choices"][0]
        text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BrokenAnswer("the answer is not a whole completion in JSON") from None
    if reason not in ("stop", "length") or not isinstance(text, str):  # vLLM says "abort" when it is stopped
        raise BrokenAnswer(f"the answer ended with finish_reason {reason!r}")
    if isinstance(request.prompt, str):
        return Answer(text, None, reason == "stop")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BrokenAnswer("the answer has no token_ids")
    if len(ids) > request.max_tokens or (reason == "length" and len(ids) < request.max_tokens):
        raise BrokenAnswer(f"the answer has {len(ids)} tokens, and {request.max_tokens} were asked for")
    return Answer(text, ids, reason == "stop")


def read_models(content: str) -> dict[str, int | None]:
    """Names of the models that a server has, with their context windows where it tells (vLLM and SGLang do)."""
    try:
        models = json.loads(content)["data"]
        return {str(model["id"]): model.get("max_model_len") for model in models}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BrokenAnswer("no list of models") from None
