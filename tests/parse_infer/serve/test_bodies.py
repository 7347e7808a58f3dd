"""A body costs little, however much of it is wrong."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from parse_infer.serve.protocol.chat import ChatBody
from parse_infer.serve.protocol.completion import CompletionBody
from parse_infer.serve.protocol.tokens import DetokenizeBody, TokenizeBody

USER = {"role": "user", "content": "2 + 2"}
MANY = 20_000
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatBody, {"messages": [{**USER, "tool_calls": [1] * MANY}]}),
    (ChatBody, {"messages": [USER], "tools": [1] * MANY}),
    (ChatBody, {"messages": [USER], "stop": [1] * MANY}),
    (ChatBody, {"messages": [USER], "stop_token_ids": ["a"] * MANY}),
    (ChatBody, {"messages": [USER], "prediction": {"type": "content", "content": [{}] * MANY}}),
    (CompletionBody, {"prompt": [1, *["a"] * MANY]}),
    (CompletionBody, {"prompt": ["a", *[1] * MANY]}),
    (CompletionBody, {"prompt": ["a"] * MANY}),
    (CompletionBody, {"prompt": [[1], *[["a"]] * MANY]}),
    (CompletionBody, {"prompt": [["a"] * MANY]}),
    (CompletionBody, {"prompt": [1] * (1 << 21)}),
    (TokenizeBody, {"messages": [{}] * MANY}),
    (DetokenizeBody, {"tokens": ["a"] * MANY}),
]


@pytest.mark.parametrize(("body", "fields"), WRONG, ids=[f"{b.__name__} {str(f)[:70]}" for b, f in WRONG])
def test_the_first_mistake_of_a_list_is_enough(body, fields):
    with pytest.raises(ValidationError):
        body.model_validate({})  # whatever is made at the first time
    tracemalloc.start()
    with pytest.raises(ValidationError) as wrong:
        body.model_validate(fields)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert wrong.value.error_count() <= 4, "one for each form that a field may have"
    assert peak < 1 << 20, f"{peak / 2**20:.1f} MB"


def test_lists_are_bounded():
    for body, fields in (
        (ChatBody, {"messages": [USER] * 4097}),
        (CompletionBody, {"prompt": ["a"] * 1025}),
        (DetokenizeBody, {"tokens": [5] * ((1 << 20) + 1)}),
    ):
        with pytest.raises(ValidationError, match="at most"):
            body.model_validate(fields)


def test_a_long_conversation_is_no_mistake():
    assert len(ChatBody.model_validate({"messages": [USER] * 4096}).messages) == 4096
    assert CompletionBody.model_validate({"prompt": [[5] * 100_000]}).prompts[0].ids[-1] == 5


def test_special_tokens_before_a_prompt_are_the_requests_choice():
    for given, completes, chats in ((None, True, False), (True, True, True), (False, False, False)):
        fields = {"add_special_tokens": given}
        (completed,) = CompletionBody.model_validate({"prompt": "Once", **fields}).prompts
        (chat,) = ChatBody.model_validate({"messages": [USER], **fields}).prompts
        tokenized = TokenizeBody.model_validate({"messages": [USER], **fields}).chat
        assert completed.add_special_tokens == completes
        assert chat.add_special_tokens == tokenized.add_special_tokens == chats
        assert not list(ChatBody.model_validate({"messages": [USER], **fields}).unknown())
