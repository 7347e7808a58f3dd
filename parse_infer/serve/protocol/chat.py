"""`/v1/chat/completions`: what is asked, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parse_infer.models.prompts import Chat
from parse_infer.models.sampling import Sampling
from parse_infer.serve.choice_state import ChoiceState, ParseStatistics
from parse_infer.serve.protocol.fields import AnswerBody, AtMost1024, AtMost4096, Body, Text, ignored, neutral
from parse_infer.serve.protocol.usage import Usage

_OLD_TOOLS = "OpenAI's older form of tools, which is not offered: use tools"
_FORM = "The target answers alone, where its server holds answers to a form (vLLM)."
REST_OF_WINDOW = 1 << 31  # tokens, more than any window has: it is what ends the answer

# What the target's own server is told of a request that asks for a form.
_RELAYED = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs"),
    *("n", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "seed", "stream", "stream_options"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"),
}
_ROLES = {"developer": "system"}  # OpenAI's newer name; chat templates know the older one


class TextPart(Body):
    type: Literal["text"]
    text: Text
    cache_control: Any = ignored()


class ChatMessage(Body):
    """A message of the conversation; only text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | AtMost1024[TextPart] | None = None
    reasoning_content: Text | None = Field(None, description="What the assistant thought, for the chat template.")
    reasoning: Text | None = Field(None, description="vLLM's newer name of reasoning_content.")
    tool_calls: AtMost1024[dict[str, Any]] | None = Field(None, description=_FORM)
    tool_call_id: Text | None = None
    cache_control: Any = ignored()
    name: Any = ignored()
    refusal: Any = ignored()
    annotations: Any = ignored()
    audio: Any = neutral("only text")
    function_call: Any = neutral(_OLD_TOOLS)

    @model_validator(mode="after")
    def _check_message(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("sentence", "content is missing")
        return self

    @property
    def of_tools(self) -> str | None:
        """The field that only a conversation with tools has."""
        return "role" if self.role == "tool" else "tool_calls" if self.tool_calls else None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, str]:
        """As chat templates know it; some read what the assistant thought by one name, some by the other."""
        message = {"role": _ROLES.get(self.role, self.role), "content": self.text}
        thought = self.reasoning_content if self.reasoning is None else self.reasoning
        if self.role == "assistant" and thought is not None:
            message |= {"reasoning": thought, "reasoning_content": thought}
        return message


class Prediction(Body):
    """What the answer will probably be: a draft."""

    type: Literal["content"]
    content: Text | AtMost1024[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(AnswerBody):
    messages: AtMost4096[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Switches of the chat template, such as enable_thinking."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message. Default: if that is the assistant's."
    )
    prediction: Prediction | None = Field(None, description="A draft, checked instead of the draft model's.")

    tools: AtMost1024[dict[str, Any]] | None = Field(None, description=_FORM)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(None, description=_FORM)
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = Field(None, description=_FORM)
    functions: Any = neutral(_OLD_TOOLS, [])
    function_call: Any = neutral(_OLD_TOOLS, "none", "auto")
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
    def form(self) -> str | None:
        """The field that asks for tools or structured output, if one does."""
        if self.tools:
            return "tools"
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice"
        if self.response_format not in (None, {"type": "text"}):
            return "response_format"
        return next((f"messages.{i}.{m.of_tools}" for i, m in enumerate(self.messages) if m.of_tools), None)

    def relayed(self, defaults: Sampling) -> dict[str, Any]:
        """The request as the target's own server is asked for it: without what is PARSE's, and with our defaults."""
        fields = self.model_dump(include=_RELAYED, exclude_none=True)
        messages = fields["messages"]
        fields["messages"] = [message | {"role": _ROLES.get(message["role"], message["role"])} for message in messages]
        sampling = self.sampling(defaults)
        fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        if (asked := self.max_completion_tokens or self.max_tokens) is not None:
            fields["max_tokens"] = asked  # without, the server knows best how much room is left
        if self.messages[-1].role == "assistant":
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

    @property
    def prompts(self) -> list[Chat]:
        """One."""
        return [Chat([message.plain() for message in self.messages], self.chat_template_kwargs or {})]

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
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None


class TargetAlone(BaseModel):
    """Where tools or structured output were asked for: no draft was used."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["target"] = "target"
    because: str = Field(description="The field that asked for it.")


class ChatChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    index: int
    message: Reply
    logprobs: None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    parse: ParseStatistics | TargetAlone


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

    def closing(self, choice: ChoiceState) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}

    def whole(self, name: str, created: int, model: str, choices: Sequence[ChoiceState], usage: Usage) -> BaseModel:
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
