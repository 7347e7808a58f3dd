"""Translation between a draft model and a target with different tokenizers or chat templates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parse_infer.answer import Answer
from parse_infer.drafters.source import Draft
from parse_infer.models.detokenizer import decode, encode_continuation
from parse_infer.models.prompts import Prompt, RenderedPrompt, left_context, open_turn
from parse_infer.models.token_map import TokenMap
from parse_infer.models.tokenizer_spec import TokenizerSpec, reads_alike


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
        self.before, self.left = open_turn(prompt), left_context(prompt, self.prompt_ids)

    def begin(
        self, answer_ids: Sequence[int], max_new_tokens: int, tokens: TokenMap | None = None
    ) -> DraftStream | None:
        """Start a draft that continues the answer; None if the draft model cannot continue.

        Args:
            tokens: translates the answer token by token instead of as text, so that the draft model's own tokens stay.
        """
        written = list(answer_ids)
        if tokens is not None:
            written = [own for token in answer_ids for own in tokens.from_target(token)]
        elif not self.shares_tokens:
            text = decode(self.target.tokenizer, answer_ids)
            if text.endswith("\ufffd"):  # inside a character, which the target must complete
                return None
            written = encode_continuation(self.draft.tokenizer, self.before, text)
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
        self._answer = Answer(tokenizer, translation.end_ids, translation.stop, size, translation.left)
        self._answer.add(written, "target")
        self._before = self._answer.text

    @property
    def is_finished(self) -> bool:
        return self._answer.is_finished

    @property
    def text(self) -> str:
        return self._answer.text[len(self._before) :]

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
            text = self.text.rstrip("\ufffd")  # the budget may end inside a character
            # The first token may have no text, such as a "▁" that the decoder strips. It still begins the answer.
            before = self._translation.before + self._before or "\n" * self._begun
            ids = encode_continuation(target.tokenizer, before, text)
        else:
            size = target.n_embeddings
            if max(ids, default=0) >= size:
                return Draft(ids[: next(i for i, token in enumerate(ids) if token >= size)])
            if ended and ids[-1] in target.eos_ids:
                return Draft(ids, finished=True)
            if ended:
                ids = ids[:-1]
        return self._ending(ids)

    def block(self, tokens: TokenMap | None) -> Draft:
        """Return the draft so far in the target's tokens, without text that later tokens could tokenize differently.

        Args:
            tokens: maps single tokens, so that a block may end after any of them.
        """
        ids = self.own_ids[:-1] if self._answer.finish_reason == "eos" else self.own_ids
        if tokens is not None and all(token in tokens.to_target for token in ids):
            return self._ending([tokens.to_target[token] for token in ids])
        if self.is_finished or self._translation.shares_tokens:
            return self.draft()
        text = self.text.rstrip("\ufffd")
        begin = re.search(r"\s+\S*\s*$", text)  # of the last word, which may go on
        if begin is not None and begin.start():
            text = text[: begin.start()]
        before = self._translation.before + self._before or "\n" * self._begun
        return Draft(encode_continuation(self._translation.target.tokenizer, before, text))

    def _ending(self, ids: list[int]) -> Draft:
        """The draft with the target's end token, if the draft model has ended the answer."""
        end = self._translation.target.end_token
        if self._answer.finish_reason == "eos" and end is not None:
            return Draft([*ids, end], finished=True)
        return Draft(ids)
