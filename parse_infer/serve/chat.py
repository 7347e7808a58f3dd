"""`/v1/chat/completions`: what is asked, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parse_infer.generation import GenerationSettings
from parse_infer.serve.body import AnswerBody, Body, Text, ignored, neutral
from parse_infer.serve.choice import Choice, ParseStatistics
from parse_infer.serve.usage import Usage

_TOOLS = "tools are not offered here: the local engine cannot hold an answer to a form"


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """A message of the conversation; only text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Any = ignored()
    refusal: Any = ignored()
    annotations: Any = ignored()
    audio: Any = neutral("only text")
    function_call: Any = neutral(_TOOLS)
    tool_calls: Any = neutral(_TOOLS, [])

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def plain(self) -> dict[str, str]:
        """As chat templates know it; OpenAI's newer name for the system is the older one here."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class Prediction(Body):
    """What the answer will probably be: a draft."""

    type: Literal["content"]
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(AnswerBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message. Default: if that is the assistant's."
    )
    prediction: Prediction | None = Field(None, description="A draft, checked instead of the draft model's.")

    tools: Any = neutral(_TOOLS, [])
    tool_choice: Any = neutral(_TOOLS, "none", "auto")
    functions: Any = neutral(_TOOLS, [])
    function_call: Any = neutral(_TOOLS, "none", "auto")
    parallel_tool_calls: Any = ignored()
    response_format: Any = neutral(
        "structured output is not offered here: the local engine cannot hold an answer to a form", {"type": "text"}
    )
    logprobs: Any = neutral(
        "not offered here: the tokens of an answer come from two models, and what was kept has no logprob of its own",
        False,
    )
    top_logprobs: Any = neutral("logprobs are not offered here", 0)
    modalities: Any = neutral("only text", ["text"])
    audio: Any = neutral("only text")
    reasoning_effort: Any = neutral("not offered here")
    verbosity: Any = neutral("not offered here", "medium")
    web_search_options: Any = neutral("not offered here")

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError("sentence", "max_tokens and max_completion_tokens differ: give one of them")
        ours = self.messages[-1].role == "assistant"
        if self.continue_final_message is True and not ours:
            raise PydanticCustomError("sentence", "continue_final_message: the last message must be the assistant's")
        if self.continue_final_message is False and ours:
            raise PydanticCustomError(
                "sentence", "continue_final_message: an answer to the assistant's own message can only continue it"
            )
        if self.prediction is not None and (self.alone or (self.parse and self.parse.draft_text is not None)):
            raise PydanticCustomError("sentence", "prediction: parse asks for another draft, or for none")
        if self.prediction is not None and not self.prediction.text.strip():
            raise PydanticCustomError("sentence", "prediction: give some text")
        return self

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]

    @property
    def draft_text(self) -> str | None:
        if self.prediction is not None:
            return self.prediction.text
        return None if self.parse is None else self.parse.draft_text

    @property
    def max_new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or GenerationSettings().max_new_tokens


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    index: int
    message: Reply
    logprobs: None = None
    finish_reason: Literal["stop", "length"]
    parse: ParseStatistics


class ChatCompletion(BaseModel):
    """OpenAI's object, with `parse` in every choice."""

    model_config = ConfigDict(extra="forbid")
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatShape:
    """How chat answers are written out."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "finish_reason": None}

    def closing(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}

    def whole(self, name: str, created: int, model: str, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        written = [
            ChatChoice(
                index=choice.index,
                message=Reply(content=choice.text),
                finish_reason=choice.finish_reason,
                parse=choice.statistics(),
            )
            for choice in choices
        ]
        return ChatCompletion(id=name, created=created, model=model, choices=written, usage=usage)
