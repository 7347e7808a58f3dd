"""Render chat messages with a tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from parse_infer.errors import ChatTemplateError, ModelError
from parse_infer.files import first_sentence

Message = Mapping[str, str]
_MARKER = "@@CONTENT@@"
# What every template gets.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
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
    formed: list[dict[str, Any]] = [{**message, "content": _content(tokenizer, message)} for message in messages]
    try:
        rendered = tokenizer.apply_chat_template(
            formed,
            add_generation_prompt=then == "reply",
            continue_final_message=then == "continue",
            tokenize=False,
            **options,
        )
        return cast("str", rendered)
    except Exception as error:  # a template is a program, and fails as one
        reason = first_sentence(error)[:_LONGEST_REASON].rstrip(".")
        if then == "continue" and "final message does not appear" in reason:
            reason = "it drops a part of the assistant's message that the answer would continue, such as its reasoning"
        raise ChatTemplateError(
            f"The chat template of {tokenizer.name_or_path!r} refuses the prompt ({reason}): change the messages or "
            "the template's options."
        ) from error


def _content(tokenizer: PreTrainedTokenizerBase, message: Message) -> str | list[dict[str, str]]:
    text, template = message["content"], _template(tokenizer) or ""
    known = getattr(tokenizer, "special_tokens_map", {})
    special = ((name, token) for name, token in known.items() if isinstance(token, str))
    return _parts(text) if takes_parts(template, message["role"], tuple(special)) else text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def check_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Raise ModelError for an option that the chat template does not read: a misspelt one would have no effect.

    A template without reasoning does what `enable_thinking: false` asks for, as recipes for any model do.
    """
    if not isinstance(options, Mapping):
        raise ModelError(f"template_options are {options!r}; give names with values, {{'enable_thinking': False}}")
    template = _template(tokenizer)
    for name, value in options.items():
        if name == "enable_thinking" and not value:
            continue
        if template is None:
            raise ModelError(
                f"{name!r} is no option: the tokenizer of {tokenizer.name_or_path!r} has no chat template."
            )
        if not reads_option(tokenizer, name):
            known = ", ".join(map(repr, sorted(_variables(template)))) or "none"
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path!r} reads no option {name!r}; it reads: {known}."
            )


def reads_option(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the chat template names an option anywhere."""
    template = _template(tokenizer) or ""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = tokenizer.chat_template
    return tokenizer.get_chat_template() if isinstance(template, dict) else template  # a dict: several, by name


def _variables(template: str) -> set[str]:
    """The options that a template reads; empty for a template that this environment cannot parse."""
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag of transformers
    try:
        found = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    except TemplateError:
        return set()
    return {name for name in found - _GIVEN if not name.endswith("_token")}


@lru_cache(maxsize=256)
def takes_parts(template: str, role: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether a template reads the content of a role's messages only as a list of parts.

    vLLM looks for a loop over `message['content']` and calls this content format "openai". This function renders a
    message in both forms, which finds such loops in macros too, and takes text where both work.
    """
    question = _parts("?") if role != "user" and takes_parts(template, "user", special_tokens) else "?"
    user_turn = {"role": "user", "content": question}
    render, shown = cast("Any", render_jinja_template), []
    for content in (_MARKER, _parts(_MARKER)):
        message = {"role": role, "content": content}
        chat = {"user": [message], "system": [message, user_turn]}.get(role, [user_turn, message, user_turn])
        try:
            (text,), _ = render([chat], chat_template=template, add_generation_prompt=True, **dict(special_tokens))
        except Exception:  # such as a role that the template refuses
            text = ""
        shown.append(_MARKER in text)
    return shown == [False, True]
