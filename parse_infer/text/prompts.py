"""Prompts: text or chat messages, rendered to token ids by a model's chat template, or verbatim text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from parse_infer.errors import PromptError
from parse_infer.text.chat_template import Message, render_chat
from parse_infer.text.detokenizer import Detokenizer, check_unicode, complete_text

_CONTEXT = 8  # tokens; more than a character has bytes


@dataclass(frozen=True)
class Verbatim:
    """A prompt without a chat template, which the answer continues directly.

    Attributes:
        text: the prompt, up to its last whole character.
        ids: the prompt's tokens if the caller chose them, for the target and models that share its tokenizer.
        add_special_tokens: put the tokenizer's BOS token before the text, unless the text begins with it.
    """

    text: str
    ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True

    @classmethod
    def of_tokens(cls, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Verbatim:
        return cls(complete_text(tokenizer, ids), tuple(ids))


@dataclass(frozen=True)
class Chat:
    """Chat messages with chat template options for this prompt, in addition to the model's.

    Attributes:
        add_special_tokens: put the tokenizer's BOS token before the rendered text, unless the template has.
    """

    messages: Sequence[Message]
    template_options: Mapping[str, Any]
    add_special_tokens: bool = False


class RenderedPrompt:
    """A prompt that caches its token ids for each model.

    Attributes:
        prompt: as the caller gave it.
    """

    def __init__(self, prompt: str | Sequence[Message] | Verbatim | Chat) -> None:
        self.prompt = prompt
        self._ids: dict[int, tuple[object, list[int]]] = {}  # by id(model), with a reference that keeps the id unique

    @classmethod
    def of(cls, prompt: Prompt) -> RenderedPrompt:
        return prompt if isinstance(prompt, cls) else cls(cast("Any", prompt))

    @cached_property
    def as_text(self) -> RenderedPrompt:
        """The prompt as text, for a model that does not share the prompt's token ids."""
        by_ids = isinstance(self.prompt, Verbatim) and self.prompt.ids is not None
        return RenderedPrompt(Verbatim(cast(Verbatim, self.prompt).text)) if by_ids else self

    def ids(self, model: object) -> list[int] | None:
        """Return the cached token ids for the model, or None."""
        known = self._ids.get(id(model))
        return None if known is None else list(known[1])

    def remember(self, model: object, ids: Sequence[int]) -> None:
        self._ids[id(model)] = model, list(ids)


Prompt = str | Sequence[Message] | Verbatim | Chat | RenderedPrompt


def content_of(prompt: Prompt) -> str | Sequence[Message] | Verbatim:
    """Return the text or the messages of a prompt."""
    if isinstance(prompt, RenderedPrompt):
        prompt = prompt.prompt
    return prompt.messages if isinstance(prompt, Chat) else prompt


def changed_option(prompt: object, template_options: Mapping[str, Any]) -> str | None:
    """Return the first chat template option that the prompt sets to another value than `template_options`, or None."""
    if isinstance(prompt, RenderedPrompt):
        prompt = prompt.prompt
    own = prompt.template_options if isinstance(prompt, Chat) else {}
    # Compared as text, because 0 equals False in Python but not in a template.
    known = {name: repr(value) for name, value in template_options.items()}
    return next((name for name, value in own.items() if repr(value) != known.get(name)), None)


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether they were a list (not one text or one list of messages)."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes) and not _are_messages(prompts):
        return cast("list[Prompt]", list(prompts)), True
    return [cast("Prompt", prompts)], False


def with_drafts(prompts: Sequence[Prompt], is_list: bool, draft_text: str | Sequence[str] | None) -> list[str | None]:
    """Return one draft text or None for each prompt of `as_batch`. Raise ValueError if the numbers differ."""
    drafts: Any = [None] * len(prompts) if draft_text is None else draft_text if is_list else [draft_text]
    if isinstance(drafts, str) or not isinstance(drafts, Sequence) or len(drafts) != len(prompts):
        raise PromptError(f"{len(prompts)} prompts need as many draft texts, one each, or none.")
    if wrong := [draft for draft in drafts if not (isinstance(draft, str | None) or hasattr(draft, "propose"))]:
        raise PromptError(f"A draft text is a text, not {str(wrong[0])[:80]!r}.")
    return list(drafts)


def _are_messages(prompts: Sequence[Any]) -> bool:
    return len(prompts) > 0 and isinstance(prompts[0], Mapping)


def open_turn(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the answer continues: the assistant's, or a prompt that the tokenizer renders without chat
    template; "" if the answer begins a new turn."""
    prompt = content_of(prompt)
    if isinstance(prompt, Verbatim):
        return prompt.text
    if isinstance(prompt, str):
        return prompt if tokenizer.chat_template is None else ""
    return prompt[-1]["content"] if prompt and prompt[-1]["role"] == "assistant" else ""


def left_context(prompt: Prompt, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return the last prompt tokens if the answer continues the prompt's text, because some decoders strip a space
    from the first token."""
    return ids[-_CONTEXT:] if open_turn(prompt, tokenizer) else ()


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message] | Verbatim | Chat,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render the prompt to token ids that the answer continues.

    With a chat template a text becomes one user message; without a template it is tokenized directly. If the last
    message is the assistant's, the answer continues it. A `Verbatim` uses no template. `template_options` are options
    of the template (Qwen3: `{"enable_thinking": False}`).

    Raises ValueError for an empty prompt, for messages without a template, and for messages that the template rejects.
    """
    special = False
    if isinstance(prompt, Chat):
        special = prompt.add_special_tokens
        _check_options(tokenizer, prompt.template_options)
        template_options = {**(template_options or {}), **prompt.template_options}
    prompt = content_of(prompt)
    if isinstance(prompt, Verbatim):
        ids = prompt.ids if prompt.ids is not None else continued(tokenizer, prompt.text, prompt.add_special_tokens)
        if not ids:
            raise PromptError("The prompt is empty: give some text or at least one token.")
        return list(ids)
    _check(prompt)
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise PromptError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no chat template: give the prompt as plain text."
            )
        return continued(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    continues = messages[-1]["role"] == "assistant"
    text = render_chat(tokenizer, messages, template_options or {}, "continue" if continues else "reply")
    return continued(tokenizer, text, special)


def continued(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokenize a text that an answer continues: an end token never follows it, and it has at most one BOS token."""
    check_unicode(text)
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    before = special_prefix(tokenizer) if add_special_tokens else []
    return ids if before and ids[:1] == before[:1] else before + ids


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    whole, plain = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (True, False))
    starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[: next(starts, 0)]


def prompt_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return a rendered prompt, up to its last whole character, as text for a server, which tokenizes it and adds a
    BOS token."""
    begin = special_prefix(tokenizer)
    if begin and list(ids[: len(begin)]) == begin:
        ids = ids[len(begin) :]
    whole, read = 0, Detokenizer(tokenizer)
    for i, token in enumerate(ids, start=1):
        read.add([token])
        whole = i if read.complete else whole
    text = tokenizer.decode(list(ids[:whole]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    rest = Detokenizer(tokenizer, ids[:whole][-_CONTEXT:])
    rest.add(ids[whole:])
    return cast("str", text) + rest.text


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> list[int]:
    """Return the token ids that the chat template appends to an assistant's turn; [] if unknown."""
    marker = "@@TURN@@"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    if tokenizer.chat_template is None:
        return []
    try:
        text = render_chat(tokenizer, messages, template_options or {}, "nothing")
    except PromptError:
        return []
    suffix = text.rpartition(marker)[2] if marker in text else ""
    return list(tokenizer(suffix, add_special_tokens=False).input_ids)


def _check_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of `apply_chat_template` itself, which a prompt must not set."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in options:
        if name in taken:
            raise PromptError(f"{name!r} is no option of the chat template that a prompt may set.")


def _check(prompt: object) -> None:
    if isinstance(prompt, str):
        contents = [prompt]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        for message in prompt:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise PromptError(f"{message!r} is not a chat message: it needs the keys 'role' and 'content'.")
            if not isinstance(message["content"], str):
                raise PromptError(f"The content of a chat message is {message['content']!r}; it must be a text.")
        contents = [message["content"] for message in prompt]
    else:
        raise PromptError(f"A prompt is a text or a list of chat messages, not {prompt!r}.")
    if not any(content.strip() for content in contents):
        raise PromptError("The prompt is empty: give a text, or chat messages with some content.")
