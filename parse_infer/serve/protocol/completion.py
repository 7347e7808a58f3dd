"""Request and response of `/v1/completions`, which continues text or tokens without a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from parse_infer.serve.choice_state import ChoiceState, ParseStatistics, Usage
from parse_infer.serve.protocol.fields import AnswerBody, AtMost1024, Text, Tokens, neutral
from parse_infer.serve.runner import TokenPrompt
from parse_infer.text.prompts import Verbatim


def _form(prompt: object) -> str | None:
    """Type tag of a prompt, by its first item, so that pydantic tries only one type."""
    if isinstance(prompt, str):
        return "str"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    forms = {str: "list[str]", int: "list[int]", list: "list[list[int]]"}
    return forms.get(type(first))


Prompts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[AtMost1024[Text], Tag("list[str]")]
    | Annotated[Tokens, Tag("list[int]")]
    | Annotated[AtMost1024[Tokens], Tag("list[list[int]]")],
    Discriminator(
        _form,
        custom_error_type="sentence",
        custom_error_message="prompt: give a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


class CompletionBody(AnswerBody):
    prompt: Prompts = Field(description="Text or token ids, or a list of either; no chat template is used.")
    add_special_tokens: bool | None = Field(
        None, description="false: no BOS token before a text. A text that begins with it gets no second one."
    )
    best_of: object = neutral(1)
    echo: object = neutral(False)
    suffix: object = neutral("")
    logprobs: object = neutral()

    @property
    def prompts(self) -> list[Verbatim | TokenPrompt]:
        """The prompts, each with `n` answers."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return [
            Verbatim(one, add_special_tokens=self.add_special_tokens is not False)
            if isinstance(one, str)
            else TokenPrompt(one)
            for one in (prompt if several else [prompt])
        ]

    @property
    def draft_text(self) -> str | None:
        return None if self.parse is None else self.parse.draft_text

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens or 16  # OpenAI's default


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
    """JSON shape of plain completions."""

    prefix = "cmpl-"
    chunk_object = "text_completion"
    path = "/v1/completions"

    def opening(self, index: int) -> None:
        return None

    def piece(self, choice: ChoiceState, text: str, last: bool) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def is_empty(self, piece: Mapping[str, Any]) -> bool:
        return not piece["text"]

    def closing(self, choice: ChoiceState) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}

    def whole(self, name: str, created: int, model: str, choices: Sequence[ChoiceState], usage: Usage) -> BaseModel:
        written = [
            CompletionChoice(
                index=choice.index, text=choice.text, finish_reason=choice.finish_reason, parse=choice.statistics()
            )
            for choice in choices
        ]
        return Completion(id=name, created=created, model=model, choices=written, usage=usage)
