"""Results: `Generation` with its spans, statistics and timings, and `Score`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "stop", "length"]
Source = Literal["draft", "target"]
Fallback = Literal["no_draft", "draft_refused", "judge_failed", "unusual_draft"]
"""Why the target answered without a draft: no draft server responds; the draft model or its server refuses; the judge
failed on the draft; the draft is out of distribution, so that only greedy matches are accepted."""
FALLBACKS: dict[Fallback, str] = {
    "no_draft": "no draft server responds",
    "draft_refused": "the draft model refuses the prompt",
    "judge_failed": "the judge failed on the draft",
    "unusual_draft": "the draft is unlike the judge's training drafts",
}


@dataclass(frozen=True)
class Span:
    """Text from one source. A draft span is one accepted segment, with the validity of its cut; of blocks judged token
    by token, all accepted tokens up to the next correction. `validity` is None for
    the greedy match, for mode "exact", for an unusual draft and for the target's text."""

    text: str
    source: Source
    n_tokens: int
    validity: float | None = None


@dataclass(frozen=True)
class Segment:
    """One segment of a draft or of a scored response, with the validity of the prefix that ends with it; None for a
    draft out of distribution."""

    text: str
    n_tokens: int
    validity: float | None


@dataclass
class Statistics:
    """Counts for one answer: target tokens, and model forwards of any width."""

    draft_tokens: int = 0
    accepted_tokens: int = 0
    exact_tail_tokens: int = 0
    """The part of `accepted_tokens` that was accepted as the target's greedy choice."""
    rounds: int = 0
    target_forwards: int = 0
    """Forwards of the target, verification passes included."""
    draft_forwards: int = 0
    drafter_forwards: int = 0
    """Forwards of token drafters. If the draft model is the proposer, `draft_forwards` includes them."""
    verification_passes: int = 0
    block_tokens: int | Literal["auto", "whole"] | None = None
    """What the setting `block_tokens` became: whole drafts, blocks of at most this many tokens, or "auto", blocks that
    ended where measurements said so. None: no drafts."""
    blocks: list[int] = field(default_factory=list)
    """Draft tokens of each block that the target read."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0.0 without a draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass
class Timings:
    """Wall-clock seconds. `total_s` includes the time that a consumer of `stream` spends between events."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    resume_s: float = 0.0
    total_s: float = 0.0
    first_text_s: float | None = None
    """Seconds to the first text; None without any."""
    longest_wait_s: float = 0.0
    """Longest time without new text, from the first text on."""

    @property
    def work_s(self) -> float:
        return self.draft_s + self.verify_s + self.resume_s


@dataclass(frozen=True)
class Generation:
    """One answer. `text` is the concatenation of the spans' texts. `token_ids` are target tokens; with `finish_reason`
    "eos" the last one is an end token or stop token. With "stop" the text may end inside the last token."""

    text: str
    token_ids: list[int]
    spans: list[Span]
    finish_reason: FinishReason
    stats: Statistics
    timings: Timings
    fallback: Fallback | None = None
    """Tokens accepted before the fallback stay in the answer."""
    lossless: bool = False
    """No judge decided about a token: the answer is the target's own (greedy, in float32), or a sample of it."""


@dataclass(frozen=True)
class Score:
    """Validity of a response, segment by segment. The segments' texts concatenate to the response.

    Attributes:
        unusual: the judge was trained on no drafts like this response, so no segment has a validity.
    """

    segments: list[Segment]
    threshold: float
    unusual: bool = False

    @property
    def validity(self) -> float | None:
        """Validity of the whole response; None if it is unusual."""
        return self.segments[-1].validity

    @property
    def first_error(self) -> int | None:
        """Index of the first segment whose prefix is below the threshold; None if no prefix is, or if unusual."""
        below = (i for i, s in enumerate(self.segments) if s.validity is not None and s.validity < self.threshold)
        return next(below, None)
