"""`Answer`: the growing answer with its tokens, their sources and its finish reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from parse_infer.request.output import FinishReason, Source, Span
from parse_infer.text.detokenizer import Detokenizer


@dataclass
class _Piece:
    source: Source
    n_tokens: int
    validity: float | None
    text_end: int  # offset in the text


class Answer:
    """Decides where an answer ends, by vLLM's rules: an end token, a stop string or the budget.

    Args:
        tokenizer: of the model whose tokens the answer holds.
        eos_ids: tokens that end an answer; they have no text.
        stop: stop strings; the answer ends after the first one, from any source.
        max_tokens: the budget, end token included.
        before: tokens of a text that the answer continues.
        ignore_eos: `eos_ids` do not end the answer.
        stop_token_ids: additional end tokens.
        min_tokens: the first `min_tokens` tokens contain no end token and complete no stop string.

    Attributes:
        end_ids: tokens that end this answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        before: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.end_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_ids))
        self._all_end_ids = frozenset(stop_token_ids) | frozenset(eos_ids)
        self._min_tokens = min_tokens
        self._stop = stop
        self._no_stop_before = 0  # text offset; stop strings must end after it
        self._max_tokens = max_tokens
        self._detokenizer = Detokenizer(tokenizer, before)
        self._text_end: int | None = None  # where a stop string ends the text
        self._whole: str | None = None  # the text before its end was flushed
        self._pieces: list[_Piece] = []

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - len(self.ids)

    @property
    def required(self) -> int:
        """Number of next tokens that must not be `banned_ids`."""
        return min(self.remaining_tokens, max(0, self._min_tokens - len(self.ids)))

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that must not come next: all end tokens, also those that `ignore_eos` disables."""
        return self._all_end_ids if self.required else frozenset()

    @property
    def text(self) -> str:
        """The text so far; `add` may have held back its end."""
        return self._detokenizer.text[: self._text_end]

    @property
    def complete(self) -> bool:
        """Whether the last token ends a character, so that `text` covers all tokens."""
        return self._detokenizer.complete

    @property
    def whole_characters(self) -> str:
        """The text without an incomplete character at its end, where a budget may end."""
        return self.text if self._whole is None else self._whole[: self._text_end]

    @property
    def spans(self) -> list[Span]:
        """One span per accepted segment and per run of target tokens; their texts concatenate to `text`."""
        starts = [0] + [piece.text_end for piece in self._pieces]
        return [
            Span(self.text[start : p.text_end], p.source, p.n_tokens, p.validity)
            for start, p in zip(starts, self._pieces, strict=False)
        ]

    def truncate(self, draft_ids: Sequence[int], limit: int) -> list[int]:
        """Truncate a draft to `limit`, to the budget, and after the end token or stop string that ends the answer.
        Truncate before an end token within `min_tokens`."""
        ids = list(draft_ids[: max(0, min(limit, self.remaining_tokens))])
        required = self.required
        for i, token in enumerate(ids):
            if token in (self._all_end_ids if i < required else self.end_ids):
                ids = ids[: i + (i >= required)]
                break
        if self._stop and ids:
            ahead = self._detokenizer.fork()
            no_stop_before = self._read(ahead, ids)
            if self._find_stop(ahead.text, len(self.text), no_stop_before) is not None:
                ahead = self._detokenizer.fork()
                for i, token in enumerate(ids):
                    ahead.add([token])
                    if i >= required and self._find_stop(ahead.text, len(self.text), no_stop_before) is not None:
                        return ids[: i + 1]
        return ids

    def preview(self, draft_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
        """Return the texts of a draft's segments as continuations of this answer, which stays unchanged."""
        parts = ([token for token in draft_ids[a:b] if token not in self.end_ids] for a, b in pairwise([0, *cuts]))
        return self._detokenizer.fork().segments(list(parts))

    def add(self, ids: Sequence[int], source: Source, validity: float | None = None, joins: bool = False) -> str:
        """Append tokens up to the end of the answer; `truncate` a draft first.

        Args:
            joins: extend the last span, if it is a draft's too.

        Returns the text that becomes final with these tokens; see `Detokenizer`.
        """
        if self.is_finished or not ids:
            return ""
        before, searched = len(self._detokenizer.released), len(self.text)
        ended = ids[-1] in self.end_ids and len(self.ids) + len(ids) > self._min_tokens
        no_stop_before = self._read(self._detokenizer, ids[:-1] if ended else ids)
        self.ids.extend(ids)
        if ended:
            self.finish_reason = "eos"
        elif len(self.ids) >= self._max_tokens:
            self.finish_reason = "length"
        if self.is_finished:
            self._flush()
        if self._stop:
            self._no_stop_before = no_stop_before
            self._text_end = self._find_stop(self._detokenizer.text, searched, no_stop_before)
            if self._text_end is not None:
                self.finish_reason = "stop"
                self._flush()
        self._note_author(len(ids), source, validity, joins)
        return self._detokenizer.released[before : self._text_end]

    def _flush(self) -> None:
        self._whole = self._detokenizer.text if self._whole is None else self._whole
        self._detokenizer.flush()

    def forget_validity(self) -> None:
        """Remove the validities of all spans: the draft turned out to be out of distribution."""
        for piece in self._pieces:
            piece.validity = None

    def _note_author(self, n_tokens: int, source: Source, validity: float | None, joins: bool) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.source == source and (joins or source == "target"):
            last.n_tokens += n_tokens
            last.validity = validity
            last.text_end = len(self.text)
        else:
            self._pieces.append(_Piece(source, n_tokens, validity, len(self.text)))

    def _read(self, detokenizer: Detokenizer, ids: Sequence[int]) -> int:
        """Feed tokens to the answer's detokenizer or a fork. Return the text offset after which stop strings count."""
        early = self._min_tokens - len(self.ids)
        if early <= 0:
            detokenizer.add(ids)
            return self._no_stop_before
        detokenizer.add(ids[:early])
        no_stop_before = len(detokenizer.text)
        if early < len(ids):
            detokenizer.add(ids[early:])
        return no_stop_before

    def _find_stop(self, text: str, start: int, no_stop_before: int) -> int | None:
        """Return the end offset of the first complete stop string; `start` is the offset of the unsearched text."""
        start = max(start, no_stop_before)
        ends = []
        for string in self._stop:
            at = text.find(string, max(0, start - len(string) + 1))
            if at >= 0:
                ends.append(at + len(string))
        return min(ends, default=None)
