"""`TokenizerSpec`: a model without its weights, that is tokenizer, chat template, end tokens and context window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from parse_infer.errors import PromptError
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import (
    Chat,
    Prompt,
    RenderedPrompt,
    Verbatim,
    end_of_turn,
    render_prompt,
    special_prefix,
)
from parse_infer.text.thinking import Thinking, ThinkingMarks, find_marks, thinking_of


class TokenizerSpec(ABC):
    """
    Attributes:
        name: as the caller gave it.
        template_options: options of the chat template, for example `{"enable_thinking": False}`.
        eos_ids: all end tokens.
        window: context window, for prompt and answer together.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    template_options: Mapping[str, Any]
    eos_ids: set[int]
    window: int

    @property
    @abstractmethod
    def n_embeddings(self) -> int:
        """Number of embedded tokens, which may exceed the tokenizer's vocabulary (padding)."""

    @property
    @abstractmethod
    def generation(self) -> GenerationConfig | None:
        """The model's generation config, or None."""

    @property
    def default_sampling(self) -> Sampling:
        """Sampling defaults of a server; outside servers this library defaults to greedy.

        As in vLLM: temperature, top-p and top-k of the generation config. Without a temperature, greedy unless
        `do_sample` is set. Raises ValueError for a value outside its range.
        """
        own = self.generation
        if own is None:
            return Sampling()
        temperature = own.temperature
        if temperature is None:
            temperature = 1.0 if own.do_sample else 0.0
        return Sampling(temperature, 1.0 if own.top_p is None else own.top_p, max(0, own.top_k or 0))

    @cached_property
    def end_token(self) -> int | None:
        """The end token that this library appends: the chat template's token after an assistant's turn, else the
        tokenizer's end token."""
        candidates = [*end_of_turn(self.tokenizer, self.template_options), self.tokenizer.eos_token_id]
        return next((token for token in candidates if token in self.eos_ids), min(self.eos_ids, default=None))

    @cached_property
    def thinking_marks(self) -> ThinkingMarks | None:
        """The marks around this model's thinking, None for a model that does not think."""
        return find_marks(self.tokenizer)

    def thinking(self, prompt: Prompt, prompt_ids: Sequence[int]) -> Thinking | None:
        """The thinking of the answer to a rendered prompt, None for a model that does not think."""
        if self.thinking_marks is None:
            return None
        return thinking_of(self.tokenizer, self.thinking_marks, prompt, prompt_ids)

    def render(self, prompt: Prompt) -> list[int]:
        """Render the prompt to token ids with this model's chat template.

        Raises ValueError if the prompt is empty, fills the context window, or has a token unknown to the model.
        """
        ids = self.encode(prompt)
        if len(ids) >= self.window:
            raise PromptError(
                f"The prompt has {len(ids)} tokens for {self.name!r}, whose context window is {self.window}: "
                f"shorten the prompt or use a model with a longer window."
            )
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Render the prompt without a check of its length."""
        rendered = RenderedPrompt.of(prompt)
        ids = rendered.ids(self)
        if ids is None:
            ids = render_prompt(self.tokenizer, rendered.prompt, self.template_options)
            self.check_tokens(ids)
            rendered.remember(self, ids)
        return ids

    def check_tokens(self, ids: Iterable[int]) -> None:
        """Raise ValueError for a token unknown to the model."""
        size = self.n_embeddings
        unknown = next((token for token in ids if not 0 <= token < size), None)
        if unknown is not None:
            raise PromptError(f"{unknown} is no token of {self.name!r}, which has tokens 0 to {size - 1}.")


def reads_alike(a: TokenizerSpec, b: TokenizerSpec, prompt: Prompt) -> bool:
    """Whether models with the same tokens (`same_tokenizer`) also render the prompt to the same token ids."""
    prompt = RenderedPrompt.of(prompt).prompt
    if isinstance(prompt, Verbatim) and prompt.ids is not None:
        return True
    one, other = a.tokenizer, b.tokenizer
    untemplated = isinstance(prompt, Verbatim) or (one.chat_template is None and other.chat_template is None)
    adds = prompt.add_special_tokens if isinstance(prompt, (Verbatim, Chat)) else untemplated
    if untemplated or (adds and special_prefix(one) != special_prefix(other)):
        return not adds or special_prefix(one) == special_prefix(other)
    return (one.chat_template, dict(a.template_options), one.special_tokens_map) == (
        *(other.chat_template, dict(b.template_options), other.special_tokens_map),
    )


def check_vocabulary(language: TokenizerSpec) -> None:
    """Raise ValueError if the tokenizer can produce a token without embedding."""
    highest = max(language.tokenizer.get_vocab().values(), default=0)
    if highest >= language.n_embeddings:
        raise PromptError(
            f"The tokenizer of {language.name!r} goes up to token {highest}, but the model embeds only "
            f"{language.n_embeddings} tokens: tokenizer and model do not match."
        )
