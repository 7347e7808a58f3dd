"""Requests and responses of `/tokenize` and `/detokenize`, compatible with vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from parse_infer.serve.protocol.chat import ChatMessage
from parse_infer.serve.protocol.fields import AtMost4096, Body, Nested, Text, Tokens
from parse_infer.text.prompts import Chat


class TokenizeBody(Body):
    model: Text | None = None
    prompt: Text | None = None
    messages: AtMost4096[ChatMessage] | None = Field(
        None, min_length=1, description="Instead of prompt; rendered with the chat template."
    )
    chat_template_kwargs: Nested | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for prompt, false for messages.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("sentence", "prompt: give either prompt or messages")
        return self

    @property
    def chat(self) -> Chat | None:
        if self.messages is None:
            return None
        messages = [message.plain() for message in self.messages]
        return Chat(messages, self.chat_template_kwargs or {}, bool(self.add_special_tokens))


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    model: Text | None = None
    tokens: Tokens


class DetokenizeAnswer(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    """OpenAI's fields, and the target's name and the context window under vLLM's names."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "parse"
    root: str
    max_model_len: int
    parse: dict[str, Any]


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]
