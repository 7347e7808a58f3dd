"""Render chat messages with a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from parse_infer.errors import ChatTemplateError
from parse_infer.files import first_sentence

Message = Mapping[str, str]
_MARKER = "@@CONTENT@@"
_LONGEST_REASON = 200  # characters; some errors print the whole chat


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    then: Literal["reply", "continue", "nothing"] = "reply",
) -> str:
    """Render messages to text, whose contents are texts.

    Args:
        options: variables of the template.
        then: what follows the text: the assistant's reply, the rest of the last message, or nothing.

    Raises:
        ChatTemplateError: the template fails on the messages, or drops what the answer should continue.
    """
    formed: Any = [{**message, "content": _content(tokenizer, message)} for message in messages]
    apply: Any = tokenizer.apply_chat_template
    mode = {"add_generation_prompt": then == "reply", "continue_final_message": then == "continue"}
    try:
        return cast("str", apply(formed, tokenize=False, **mode, **options))
    except Exception as error:  # a template is a program, and fails as one
        reason = first_sentence(error)[:_LONGEST_REASON].rstrip(".")
        if then == "continue" and "final message does not appear" in reason:
            reason = "it drops a part of the assistant's message that the answer would continue, such as its reasoning"
        raise ChatTemplateError(
            f"The chat template of {tokenizer.name_or_path!r} refuses the prompt ({reason}): change the messages or "
            "the template's options."
        ) from error


def _content(tokenizer: PreTrainedTokenizerBase, message: Message) -> str | list[dict[str, str]]:
    text, template = message["content"], tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = tokenizer.get_chat_template()
    known = getattr(tokenizer, "special_tokens_map", {})
    special = ((name, token) for name, token in known.items() if isinstance(token, str))
    return _parts(text) if takes_parts(template, message["role"], tuple(special)) else text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=256)
def takes_parts(template: str, role: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether a template reads the content of a role's messages only as a list of parts.

    vLLM looks for a loop over `message['content']` and calls this content format "openai". This function renders a
    message in both forms, which finds such loops in macros too, and takes text where both work.
    """
    question: Any = _parts("?") if role != "user" and takes_parts(template, "user", special_tokens) else "?"
    asked = {"role": "user", "content": question}
    render, shown = cast("Any", render_jinja_template), []
    for content in (_MARKER, _parts(_MARKER)):
        message = {"role": role, "content": content}
        chat = {"user": [message], "system": [message, asked]}.get(role, [asked, message, asked])
        try:
            (text,), _ = render([chat], chat_template=template, add_generation_prompt=True, **dict(special_tokens))
        except Exception:  # such as a role that the template refuses
            text = ""
        shown.append(_MARKER in text)
    return shown == [False, True]
