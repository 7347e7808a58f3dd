"""Cuts of a draft: after each step (line), after each sentence, at a fixed distance in tokens, or by a rule of yours.

A cut is a token offset in the draft: cut `c` ends the prefix `draft[:c]`. The last cut is always the whole draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from parse_infer.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ends = Callable[[Sequence[str], int], list[int]]
"""Maps the texts of a draft's tokens, and `CutPolicy.every`, to the increasing offsets after which a segment ends.

A draft that grows must keep the offsets that it had, except at its very end.
"""

# An end mark, optional closing quotes or brackets, then whitespace. "3.5" and "e.g.," do not match.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*\d+$")  # the "1" of a list item "1. Add the apples."


@dataclass(frozen=True)
class CutRule:
    """A way to cut, see `cut_rule`."""

    ends: Ends
    by_tokens: bool


CUT_RULES: dict[str, CutRule] = {}
"""All rules by name, the kinds of a `CutPolicy`."""


def cut_rule(name: str, *, by_tokens: bool = False) -> Callable[[Ends], Ends]:
    """Register a function as the rule `name`.

    Args:
        by_tokens: the rule uses `every`, and segments of whitespace alone are kept. Other rules join such a segment
            to a neighbour.
    """

    def register(ends: Ends) -> Ends:
        CUT_RULES[name] = CutRule(ends, by_tokens)
        return ends

    return register


@cut_rule("step")
def step_ends(texts: Sequence[str], every: int) -> list[int]:
    """Return the offsets after every run of newline tokens."""
    ends = []
    for i, text in enumerate(texts):
        following = texts[i + 1] if i + 1 < len(texts) else ""
        run_goes_on = "\n" in following and not following.strip()
        if "\n" in text and not run_goes_on:
            ends.append(i + 1)
    return ends


@cut_rule("sentence")
def sentence_ends(texts: Sequence[str], every: int) -> list[int]:
    """Return the offset after the last token of each sentence."""
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


@cut_rule("tokens", by_tokens=True)
def token_ends(texts: Sequence[str], every: int) -> list[int]:
    """Return every `every`-th offset."""
    return list(range(every, len(texts) + 1, every))


@dataclass(frozen=True)
class CutPolicy:
    """Rules for cutting a draft.

    Attributes:
        kind: a name in `CUT_RULES`; "step" cuts after every line, "sentence" after every sentence, "tokens" every
            `every` tokens.
        every: distance of two cuts in tokens, for "tokens".
        max_cuts: the judge scores the first `max_cuts` cuts; `Segmenter` selects among later cuts. A labelled draft
            has at most `max_cuts` labels, evenly spread.

    Raises:
        ValueError: an unknown kind, or a number below 1.
    """

    kind: str = "step"
    every: int = 32
    max_cuts: int = 32

    def __post_init__(self) -> None:
        if self.kind not in CUT_RULES:
            raise SettingsError(f"unknown cut policy {self.kind!r}: choose one of {', '.join(CUT_RULES)}")
        for name in ("every", "max_cuts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"the cut policy's {name} must be a whole number of at least 1, not {value!r}")

    @property
    def rule(self) -> CutRule:
        return CUT_RULES[self.kind]

    def even_subset(self, cuts: Sequence[int]) -> list[int]:
        """Return at most `max_cuts` of the cuts, evenly spread, including the last cut."""
        n, limit = len(cuts), self.max_cuts
        return list(cuts) if n <= limit else [cuts[(j + 1) * n // limit - 1] for j in range(limit)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CutPolicy:
        unknown = sorted(set(values) - {"kind", "every", "max_cuts"})
        if unknown:
            raise SettingsError(f"unknown cut policy key {unknown[0]!r}: the keys are kind, every and max_cuts")
        return cls(**values)

    @classmethod
    def parse(cls, name: str | CutPolicy) -> CutPolicy:
        """Read a name such as "step" or "tokens:4" (`every`); a policy stays as it is. Raise ValueError for another
        one."""
        if isinstance(name, CutPolicy):
            return name
        if not isinstance(name, str):
            raise SettingsError(f"the cut policy is {name!r}; it must be a name such as step, or a CutPolicy")
        kind, colon, every = name.partition(":")
        policy = cls(kind)
        if not colon:
            return policy
        if not (policy.rule.by_tokens and every.isdecimal()):
            raise SettingsError(f"the cut policy {name!r} has no whole number of tokens, as in tokens:4")
        return cls(kind, int(every))


class Segmenter:
    """Selects the cuts for the judge, in a draft of target token ids.

    A judge that appends no tokens scores every cut, at no cost. One that appends P tokens scores the first `max_cuts`
    cuts, then each cut c at least sqrt(P * c) tokens after the previous selected cut. Each cut costs P tokens of
    prefill. A skipped cut before the first error makes the target decode half a distance of tokens again. This
    distance minimises the sum, given two assumptions. Every e-fold of the draft holds the first error with the same
    probability (1 in 5), and decoding a token costs 10 times its prefill. A draft that grows keeps its cuts.

    Args:
        tokens_per_cut: P of the judge (`Judge.tokens_per_cut`).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, policy: CutPolicy | None = None, tokens_per_cut: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.policy = policy or CutPolicy()
        self.tokens_per_cut = tokens_per_cut
        self._surfaces: dict[int, str] = {}
        # Decode tokens after an anchor, because sentencepiece decoders drop the leading space of the first token.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)

    @property
    def max_appended_tokens(self) -> int:
        """Tokens that the judge appends for all cuts of a draft."""
        return self.tokens_per_cut * self.policy.max_cuts

    def cuts(self, draft_ids: Sequence[int]) -> list[int]:
        """Return strictly increasing token offsets in 1..len(draft_ids), ending with len(draft_ids); [] if empty.

        No step or sentence consists of whitespace or special tokens alone: such tokens join a neighbour.
        """
        n = len(draft_ids)
        if n == 0:
            return []
        texts = self._texts(draft_ids)
        cuts = self._joined(texts)
        if not self.policy.rule.by_tokens and cuts and not any(text.strip() for text in texts[cuts[-1] :]):
            cuts.pop()  # the rest is whitespace and joins the last segment
        return self._affordable([c for c in cuts if c < n] + [n])

    def first_segment_end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens of the first complete segment, or None while it is incomplete.

        For use during decoding. A newline completes a line. The whitespace after a sentence completes it, so one token
        may lie beyond the returned count.
        """
        return next(iter(self._joined(self._texts(ids))), None)

    def _joined(self, texts: Sequence[str]) -> list[int]:
        """Return the ends of the segments; one of whitespace alone joins the next, unless the rule is by tokens."""
        ends, start = [], 0
        for end in self.policy.rule.ends(texts, self.policy.every):
            if self.policy.rule.by_tokens or any(text.strip() for text in texts[start:end]):
                ends.append(end)
                start = end
        return ends

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a split character belongs to the token that completes it."""
        from parse_infer.text.detokenizer import Detokenizer  # it needs transformers, which help does without
        from parse_infer.text.token_text import REPLACEMENT

        texts = [self.surface(i) for i in ids]
        if not any(REPLACEMENT in text for text in texts):
            return texts
        return Detokenizer(self.tokenizer, self._anchor).segments([[i] for i in ids])

    def surface(self, token_id: int) -> str:
        """Return the text that a token adds inside a longer text ("" for special tokens); cached."""
        text = self._surfaces.get(token_id)
        if text is None:
            text = self._decode([*self._anchor, token_id])[len(self._anchor_text) :]
            self._surfaces[token_id] = text
        return text

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast("str", text)

    def _affordable(self, cuts: list[int]) -> list[int]:
        if not self.tokens_per_cut:
            return cuts
        kept = cuts[: self.policy.max_cuts]
        for cut in cuts[self.policy.max_cuts :]:
            if cut == cuts[-1] or (cut - kept[-1]) ** 2 >= self.tokens_per_cut * cut:
                kept.append(cut)
        return kept
