"""Translation between a draft model and a target with different tokenizers or chat templates."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from parse_infer.drafters.source import Draft
from parse_infer.models.token_map import TokenMap
from parse_infer.request.answer import Answer
from parse_infer.text.detokenizer import Detokenizer, encode_continuation
from parse_infer.text.prompts import Prompt, RenderedPrompt, left_context, open_turn
from parse_infer.text.tokenizer_spec import TokenizerSpec, reads_alike

_CONTEXT = 8  # tokens, for a decoder that strips a space from the first one


class CrossTokenizerDraft:
    """One answer in the draft model's tokens.

    The draft model's own chat template renders the prompt. If both models share a tokenizer, token ids pass unchanged.
    Otherwise answer and draft pass between the models as text.

    Args:
        shares_tokens: `same_tokenizer` of the two.
        stop: a draft may end at the first of these strings.

    Raises:
        ValueError: a prompt with tokens that the draft model does not know.
    """

    def __init__(
        self,
        draft: TokenizerSpec,
        target: TokenizerSpec,
        shares_tokens: bool,
        prompt: Prompt,
        stop: Sequence[str] = (),
    ) -> None:
        prompt = RenderedPrompt.of(prompt)
        if not shares_tokens:
            prompt = prompt.as_text
        self.draft, self.target, self.shares_tokens, self.stop = draft, target, shares_tokens, stop
        self.end_ids = draft.eos_ids | target.eos_ids if shares_tokens else draft.eos_ids
        reader = target if shares_tokens and reads_alike(draft, target, prompt) else draft
        # A prompt beyond the draft model's window gets no draft, and the target answers.
        self.prompt_ids = reader.encode(prompt)
        draft.check_tokens(self.prompt_ids)
        self.before = open_turn(prompt, reader.tokenizer)
        self.left = left_context(prompt, self.prompt_ids, reader.tokenizer)
        self.target_before = open_turn(prompt, target.tokenizer)
        reads = self.target_before and not shares_tokens
        self.target_left = left_context(prompt, target.encode(prompt), target.tokenizer) if reads else ()

    def begin_block(
        self, answer_ids: Sequence[int], max_new_tokens: int, tokens: TokenMap | None
    ) -> DraftStream | TokenStream | None:
        """Start a block that continues the answer; None if the draft model cannot continue.

        Args:
            tokens: maps single tokens between models that do not share them; None: the block passes as text.
        """
        if tokens is None and not self.shares_tokens:
            return self.begin(answer_ids, max_new_tokens)
        written = list(answer_ids)
        if tokens is not None:
            written = [own for token in answer_ids for own in tokens.from_target(token)]
        if max(written, default=0) >= self.draft.n_embeddings or (written and written[-1] in self.end_ids):
            return None
        limit = min(max_new_tokens, self.draft.window - len(self.prompt_ids) - len(written))
        return TokenStream(self, written, limit, tokens) if limit > 0 else None

    def begin(self, answer_ids: Sequence[int], max_new_tokens: int) -> DraftStream | None:
        """Start a draft that continues the answer; None if the draft model cannot continue."""
        written = list(answer_ids)
        if not self.shares_tokens:
            answer = Detokenizer(self.target.tokenizer, self.target_left)
            answer.add(answer_ids)
            if not answer.complete:  # inside a character, which the target must complete
                return None
            written = encode_continuation(self.draft.tokenizer, self.before, answer.text)
        elif max(written, default=0) >= self.draft.n_embeddings:  # padding ids, which only untrained models write
            return None
        if written and written[-1] in self.end_ids:  # an end token of the draft model, but not of the answer
            return None
        limit = min(max_new_tokens, self.draft.window - len(self.prompt_ids) - len(written))
        return DraftStream(self, written, limit, begun=bool(answer_ids)) if limit > 0 else None


class DraftStream:
    """A draft in progress.

    Attributes:
        context: the draft model's context, in its own tokens.
        remaining_tokens: maximum length of the draft.

    Args:
        begun: the answer already has tokens.
    """

    def __init__(self, translation: CrossTokenizerDraft, written: list[int], max_new_tokens: int, begun: bool) -> None:
        self.context = translation.prompt_ids + written
        self.remaining_tokens = max_new_tokens
        self._translation, self._begun = translation, begun
        self._n_before = len(written)
        tokenizer = translation.draft.tokenizer
        size = len(written) + max_new_tokens
        # A stop string in the answer so far did not end it: see `GenerationSettings.min_tokens`.
        self._answer = Answer(
            tokenizer, translation.end_ids, translation.stop, size, translation.left, min_tokens=len(written)
        )
        self._answer.add(written, "target")
        self._before = self._answer.text

    @property
    def is_finished(self) -> bool:
        return self._answer.is_finished

    @property
    def text(self) -> str:
        """The draft up to its last whole character: a budget may end inside one."""
        return self._answer.whole_characters[len(self._before) :]

    @property
    def n(self) -> int:
        """Number of tokens so far, in the draft model's tokens."""
        return len(self._answer.ids) - self._n_before

    @property
    def own_ids(self) -> list[int]:
        """The draft in the draft model's tokens."""
        return self._answer.ids[self._n_before :]

    def add(self, ids: Sequence[int]) -> None:
        """Add the draft model's next tokens, up to the end of the answer."""
        # One token needs no truncation.
        self._answer.add(ids if len(ids) == 1 else self._answer.truncate(ids, self._answer.remaining_tokens), "draft")

    def draft(self) -> Draft:
        """Return the draft in the target's tokens."""
        answer, target = self._answer, self._translation.target
        ids, ended = self.own_ids, answer.finish_reason == "eos"
        if not self._translation.shares_tokens:
            # The first token may have no text, such as a "▁" that the decoder strips. It still begins the answer.
            before = self._translation.target_before + self._before or "\n" * self._begun
            ids = encode_continuation(target.tokenizer, before, self.text)
        else:
            size = target.n_embeddings
            if max(ids, default=0) >= size:
                return Draft(ids[: next(i for i, token in enumerate(ids) if token >= size)])
            if ended and ids[-1] in target.eos_ids:
                return Draft(ids, finished=True)
            if ended:
                ids = ids[:-1]
        if ended and target.end_token is not None:
            return Draft([*ids, target.end_token], finished=True)
        return Draft(ids)

    def block(self) -> Draft:
        """Return the draft so far, without text at its end that later tokens could tokenize differently."""
        if self.is_finished:
            return self.draft()
        text = without_last_word(self.text)
        before = self._translation.target_before + self._before or "\n" * self._begun
        return Draft(encode_continuation(self._translation.target.tokenizer, before, text))


class TokenStream:
    """A block in progress whose tokens need no text: both models share them, or a `TokenMap` maps them.

    Attributes:
        context: the draft model's context, in its own tokens.
        remaining_tokens: maximum length of the block.
        own_ids: the block in the draft model's tokens.
    """

    def __init__(
        self, translation: CrossTokenizerDraft, written: list[int], max_new_tokens: int, tokens: TokenMap | None
    ) -> None:
        self.context = translation.prompt_ids + written
        self.remaining_tokens = max_new_tokens
        self.own_ids: list[int] = []
        self._translation, self._tokens = translation, tokens
        self._stopped = False
        self._text = Detokenizer(translation.draft.tokenizer, self.context[-_CONTEXT:])  # for stop strings

    @property
    def n(self) -> int:
        return len(self.own_ids)

    @property
    def is_finished(self) -> bool:
        ended = self.n > 0 and self.own_ids[-1] in self._translation.end_ids
        return ended or self._stopped or self.n >= self.remaining_tokens

    def add(self, ids: Sequence[int]) -> None:
        self.own_ids += ids
        if stop := self._translation.stop:  # the engine finds the exact place; this ends the block
            begin = max(0, len(self._text.text) - max(map(len, stop)))
            self._text.add(ids)
            self._stopped = any(string in self._text.text[begin:] for string in stop)

    def block(self) -> Draft:
        """Return the block in the target's tokens, up to a token that the target does not know."""
        target, ids = self._translation.target, self.own_ids
        ended = bool(ids) and ids[-1] in self._translation.end_ids
        own = ids[:-1] if ended else ids
        known = own if self._tokens is None else [self._tokens.to_target.get(token, sys.maxsize) for token in own]
        if max(known, default=0) >= target.n_embeddings:
            return Draft(known[: next(i for i, token in enumerate(known) if token >= target.n_embeddings)])
        if self._tokens is None and ended and ids[-1] in target.eos_ids:
            return Draft(ids, finished=True)
        if ended and target.end_token is not None:
            return Draft([*known, target.end_token], finished=True)
        return Draft(known)


def without_last_word(text: str) -> str:
    """Cut a draft before its last word, which may go on; text without another word stays."""
    begin = re.search(r"\s+\S*\s*$", text)
    return text if begin is None or not begin.start() else text[: begin.start()]
