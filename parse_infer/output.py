"""What a generation returns: the answer with its spans, statistics and timings, and the score of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "stop", "length"]
Source = Literal["draft", "target"]
Fallback = Literal["no_draft", "draft_refused", "judge_failed", "judge_replaced"]
"""Why the target wrote alone although a draft was wanted: no draft server answers; the draft server refuses the
request; the draft could not be judged; the target's servers run another adapter."""


@dataclass(frozen=True)
class Span:
    """A stretch of text by one author. A draft span is one accepted segment; validity is that of its cut
    (None for the exact tail, for mode "exact" and for the target's text)."""

    text: str
    source: Source
    n_tokens: int
    validity: float | None = None


@dataclass(frozen=True)
class Segment:
    """One segment of a draft or of a scored response, with the validity of the prefix that ends with it."""

    text: str
    n_tokens: int
    validity: float


@dataclass
class Statistics:
    """Counts for one answer. Tokens are target tokens; forwards are model forwards of any width."""

    draft_tokens: int = 0
    accepted_tokens: int = 0
    exact_tail_tokens: int = 0
    """The part of `accepted_tokens` that was kept because it equals the target's greedy choice."""
    rounds: int = 0
    target_forwards: int = 0
    """All forwards of the target, verification passes included."""
    draft_forwards: int = 0
    drafter_forwards: int = 0
    """Of token drafters; where the draft model is one, also part of `draft_forwards`."""
    verification_passes: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0.0 without a draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass
class Timings:
    """Seconds of wall clock. `total_s` includes what a consumer of `stream` does between events."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    resume_s: float = 0.0
    total_s: float = 0.0

    @property
    def work_s(self) -> float:
        return self.draft_s + self.verify_s + self.resume_s


@dataclass(frozen=True)
class Generation:
    """One answer. `text` equals the concatenation of the spans' texts; `token_ids` (target tokens) end with the end
    token (the model's own, or a stop token) if `finish_reason` is "eos". With "stop", text ends inside the last token
    if the stop string does."""

    text: str
    token_ids: list[int]
    spans: list[Span]
    finish_reason: FinishReason
    stats: Statistics
    timings: Timings
    fallback: Fallback | None = None
    """Only over servers. What was accepted of drafts before stays."""


@dataclass(frozen=True)
class Score:
    """Validity of a response, segment by segment; the texts of the segments concatenate to the response."""

    segments: list[Segment]
    threshold: float

    @property
    def validity(self) -> float:
        """Validity of the whole response."""
        return self.segments[-1].validity

    @property
    def first_error(self) -> int | None:
        """Index of the first segment whose prefix is below the threshold; None if all hold."""
        return next((i for i, s in enumerate(self.segments) if s.validity < self.threshold), None)
