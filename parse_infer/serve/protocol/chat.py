"""Request and response of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parse_infer.serve.choice_state import ChoiceState, ParseStatistics, Usage
from parse_infer.serve.protocol.fields import (
    AnswerBody,
    AtMost1024,
    AtMost4096,
    Body,
    Nested,
    Text,
    ignored,
    neutral,
    only,
)
from parse_infer.text.prompts import Chat

REST_OF_WINDOW = 1 << 31  # tokens; more than any window, so the window ends the answer

_ROLES = {"developer": "system"}  # OpenAI's newer name; chat templates use the older one


class TextPart(Body):
    type: Annotated[Text, only("text")]
    text: Text
    cache_control: object = ignored()


class ChatMessage(Body):
    """A text message of the conversation."""

    role: Annotated[Text, only("system", "developer", "user", "assistant")]
    content: Text | AtMost1024[TextPart] | None = None
    reasoning_content: Text | None = Field(None, description="The assistant's reasoning, for the chat template.")
    reasoning: Text | None = Field(None, description="vLLM's newer name of reasoning_content.")
    tool_calls: object = neutral([])
    tool_call_id: object = ignored()
    cache_control: object = ignored()
    name: object = ignored()
    refusal: object = ignored()
    annotations: object = ignored()
    audio: object = neutral()
    function_call: object = neutral()

    @model_validator(mode="after")
    def _check_message(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":  # a reply may consist of reasoning only
            raise PydanticCustomError("sentence", "content is missing")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, str]:
        """The message for a chat template, with the reasoning under both names in use."""
        message = {"role": _ROLES.get(self.role, self.role), "content": self.text}
        thought = self.reasoning_content if self.reasoning is None else self.reasoning
        if self.role == "assistant" and thought is not None:
            message |= {"reasoning": thought, "reasoning_content": thought}
        return message


class Prediction(Body):
    """OpenAI's predicted output, used as the draft."""

    type: Literal["content"]
    content: Text | AtMost1024[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(AnswerBody):
    messages: AtMost4096[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: Nested | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    add_special_tokens: bool | None = Field(
        None, description="true: a BOS token before the rendered chat, unless the template has put one."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    continue_final_message: bool | None = Field(
        None, description="Continue the last message. Default: if its role is assistant."
    )
    prediction: Prediction | None = Field(None, description="A draft that replaces the draft model's.")

    tools: object = neutral([])
    tool_choice: object = neutral("none", "auto")
    parallel_tool_calls: object = ignored()
    response_format: object = neutral({"type": "text"})
    functions: object = neutral([])
    function_call: object = neutral("none", "auto")
    logprobs: object = neutral(False)
    top_logprobs: object = neutral(0)
    modalities: object = neutral(["text"])
    audio: object = neutral()
    reasoning_effort: object = neutral()
    verbosity: object = neutral("medium")
    web_search_options: object = neutral()

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
            raise PydanticCustomError("sentence", "prediction: parse sets another draft, or mode target")
        if self.prediction is not None and not self.prediction.text.strip():
            raise PydanticCustomError("sentence", "prediction: give some text")
        return self

    @property
    def prompts(self) -> list[Chat]:
        """The conversation, as the only prompt."""
        messages = [message.plain() for message in self.messages]
        return [Chat(messages, self.chat_template_kwargs or {}, bool(self.add_special_tokens))]

    @property
    def draft_text(self) -> str | None:
        if self.prediction is not None:
            return self.prediction.text
        return None if self.parse is None else self.parse.draft_text

    @property
    def max_new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or REST_OF_WINDOW


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["assistant"] = "assistant"
    content: str | None
    """None: the answer ended while the model was thinking."""
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name, for clients of SGLang, DeepSeek's API and earlier versions of vLLM."""

    @classmethod
    def of(cls, choice: ChoiceState) -> Reply:
        split = choice.splitter.add(choice.text, last=True)
        thought = split.reasoning or None
        content = None if thought and not split.content else split.content
        return cls(content=content, reasoning=thought, reasoning_content=thought)


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
    """JSON shape of chat answers."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    path = "/v1/chat/completions"

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def piece(self, choice: ChoiceState, text: str, last: bool) -> dict[str, Any]:
        new = choice.splitter.add(text, last)
        delta = {"reasoning": new.reasoning, "reasoning_content": new.reasoning} if new.reasoning else {}
        delta |= {"content": new.content} if new.content else {}
        return {"index": choice.index, "delta": delta, "finish_reason": None}

    def is_empty(self, piece: Mapping[str, Any]) -> bool:
        return not piece["delta"]

    def closing(self, choice: ChoiceState) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}

    def whole(self, name: str, created: int, model: str, choices: Sequence[ChoiceState], usage: Usage) -> BaseModel:
        written = [
            ChatChoice(
                index=choice.index,
                message=Reply.of(choice),
                finish_reason=choice.finish_reason,
                parse=choice.statistics(),
            )
            for choice in choices
        ]
        return ChatCompletion(id=name, created=created, model=model, choices=written, usage=usage)
