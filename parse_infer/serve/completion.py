"""`/v1/completions`: text or tokens that are continued as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from parse_infer.serve.body import AnswerBody, Text, neutral
from parse_infer.serve.choice import Choice, ParseStatistics
from parse_infer.serve.usage import Usage

Tokens = list[StrictInt]


class CompletionBody(AnswerBody):
    prompt: Text | list[Text] | Tokens | list[Tokens] = Field(
        description="Text or token ids, or a list of either; no chat template is used."
    )
    best_of: Any = neutral("not offered here; only 1", 1)
    echo: Any = neutral("not offered here", False)
    suffix: Any = neutral("not offered here", "")
    logprobs: Any = neutral(
        "not offered here: the tokens of an answer come from two models, and what was kept has no logprob of its own"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, body: Any) -> Any:
        prompt = body.get("prompt", "") if isinstance(body, dict) else ""
        if not (isinstance(prompt, str) or _is_list(prompt)):
            raise PydanticCustomError(
                "sentence", "prompt: give a text, a list of texts, a list of token ids or a list of such lists"
            )
        return body

    @property
    def prompts(self) -> list[str] | list[Tokens]:
        """One entry per answer that is asked for, but for `n`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt  # type: ignore[list-item, return-value]

    @property
    def draft_text(self) -> str | None:
        return None if self.parse is None else self.parse.draft_text

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens or 16  # as OpenAI has it


def _is_list(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    inner = [all(type(token) is int for token in part) if isinstance(part, list) else None for part in prompt]
    kinds = {type(part) for part in prompt}
    return kinds in ({str}, {int}) or (kinds == {list} and all(inner))


class CompletionChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"]
    parse: ParseStatistics


class Completion(BaseModel):
    """OpenAI's object, with `parse` in every choice."""

    model_config = ConfigDict(extra="forbid")
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionShape:
    """How plain completions are written out."""

    prefix = "cmpl-"
    chunk_object = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def closing(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}

    def whole(self, name: str, created: int, model: str, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        written = [
            CompletionChoice(
                index=choice.index, text=choice.text, finish_reason=choice.finish_reason, parse=choice.statistics()
            )
            for choice in choices
        ]
        return Completion(id=name, created=created, model=model, choices=written, usage=usage)
