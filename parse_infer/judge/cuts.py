"""Where a draft is cut: after each step (line), each sentence, or every few tokens.

A cut is a token offset in the draft: cut `c` ends the prefix `draft[:c]`. The last cut is always the whole draft.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

CutKind = Literal["step", "sentence", "tokens"]

# An end mark, optional closing quotes or brackets, and whitespace after it: "3.5" and "e.g.," are no ends.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*\d+$")  # the "1" of a list item "1. Add the apples."


@dataclass(frozen=True)
class CutPolicy:
    """How a draft is cut.

    Attributes:
        kind: "step" cuts after every line, "sentence" after every sentence, "tokens" every `every` tokens.
        every: distance of two cuts in tokens, for "tokens".
        max_cuts: number of cuts at a draft's beginning that are all judged; `Segmenter` chooses among the later ones.
            A labelled draft has at most this many labels, evenly spread.

    Raises:
        ValueError: a kind that does not exist, or a number below 1.
    """

    kind: CutKind = "step"
    every: int = 32
    max_cuts: int = 32

    def __post_init__(self) -> None:
        if self.kind not in get_args(CutKind):
            raise ValueError(f"unknown cut policy {self.kind!r}: choose one of {', '.join(get_args(CutKind))}")
        for name in ("every", "max_cuts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"the cut policy's {name} must be a whole number of at least 1, not {value!r}")

    def even_subset(self, cuts: Sequence[int]) -> list[int]:
        """At most `max_cuts` of the cuts, evenly spread; the last one stays."""
        n, limit = len(cuts), self.max_cuts
        return list(cuts) if n <= limit else [cuts[(j + 1) * n // limit - 1] for j in range(limit)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CutPolicy:
        unknown = sorted(set(values) - {"kind", "every", "max_cuts"})
        if unknown:
            raise ValueError(f"unknown cut policy key {unknown[0]!r}: the keys are kind, every and max_cuts")
        return cls(**values)


class Segmenter:
    """Finds the cuts at which a draft is judged, given as token ids of `tokenizer` (the target's).

    Without a probe a cut costs nothing, and every one is judged. With a probe of P tokens the first `max_cuts` are,
    and then each cut c that is at least sqrt(P * c) tokens behind the last one. A probe costs P tokens to read. A cut
    that is left out costs, where the first error follows it, half of a distance of tokens that the target writes
    again. Their sum is least at this distance if a first error is as likely in every e-fold of the draft (1 in 5) and
    a token costs 10 times as much to write as to read. A draft that grows keeps its cuts.

    Args:
        probe_tokens: P of the judge; 0: it has no probe.
    """

    def __init__(self, tokenizer: Any, policy: CutPolicy | None = None, probe_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.policy = policy or CutPolicy()
        self.probe_tokens = probe_tokens
        self._surfaces: dict[int, str] = {}
        # Tokens are decoded behind an anchor: sentencepiece decoders drop the leading space of a text's first token.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)

    def cuts(self, draft_ids: Sequence[int]) -> list[int]:
        """Strictly increasing token offsets in 1..len(draft_ids), the last one len(draft_ids); [] for an empty draft.

        A step or sentence never consists of whitespace or special tokens alone: such tokens join a neighbour.
        """
        n = len(draft_ids)
        if n == 0:
            return []
        texts = [self.surface(i) for i in draft_ids]
        if self.policy.kind == "tokens":
            cuts = list(range(self.policy.every, n, self.policy.every))
        else:
            ends = self._step_ends(texts) if self.policy.kind == "step" else self._sentence_ends(texts)
            cuts, start = [], 0
            for end in ends:
                if any(text.strip() for text in texts[start:end]):
                    cuts.append(end)
                    start = end
            if cuts and not any(text.strip() for text in texts[cuts[-1] :]):
                cuts.pop()  # what follows it is no segment of its own
        return self._worth_a_probe([c for c in cuts if c < n] + [n])

    def first_segment_end(self, ids: Sequence[int]) -> int | None:
        """Number of tokens up to and including the first complete segment, or None while it is not complete.

        Meant for tokens that are still being decoded: a line is complete with its newline; a sentence only once the
        whitespace after it has been seen (one token may then lie beyond the returned count).
        """
        if self.policy.kind == "tokens":
            return self.policy.every if len(ids) >= self.policy.every else None
        texts = [self.surface(i) for i in ids]
        if self.policy.kind == "step":
            ends = [i + 1 for i, text in enumerate(texts) if "\n" in text]
        else:
            ends = self._sentence_ends(texts)
        return next((end for end in ends if any(text.strip() for text in texts[:end])), None)

    def surface(self, token_id: int) -> str:
        """The text that one token adds inside a longer text ("" for special tokens); cached."""
        text = self._surfaces.get(token_id)
        if text is None:
            text = self._decode([*self._anchor, token_id])[len(self._anchor_text) :]
            self._surfaces[token_id] = text
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @staticmethod
    def _step_ends(texts: Sequence[str]) -> list[int]:
        """Offsets after the last token of every run of newline tokens."""
        ends = []
        for i, text in enumerate(texts):
            following = texts[i + 1] if i + 1 < len(texts) else ""
            run_goes_on = "\n" in following and not following.strip()
            if "\n" in text and not run_goes_on:
                ends.append(i + 1)
        return ends

    @staticmethod
    def _sentence_ends(texts: Sequence[str]) -> list[int]:
        """Offsets after the token that holds the last character of a sentence."""
        text = "".join(texts)
        marks = [m for m in _SENTENCE_END.finditer(text) if not _LIST_NUMBER.search(text[: m.start()][-24:])]
        ends: list[int] = []
        token = consumed = 0
        for mark in marks:
            while consumed < mark.end():
                consumed += len(texts[token])
                token += 1
            if not ends or ends[-1] != token:
                ends.append(token)
        return ends

    def _worth_a_probe(self, cuts: list[int]) -> list[int]:
        if not self.probe_tokens:
            return cuts
        kept = cuts[: self.policy.max_cuts]
        for cut in cuts[self.policy.max_cuts :]:
            if cut == cuts[-1] or (cut - kept[-1]) ** 2 >= self.probe_tokens * cut:
                kept.append(cut)
        return kept
