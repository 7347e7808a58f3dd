"""Benchmark record of one answer."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str, str, int]  # problem, mode, repeat


@dataclass(frozen=True)
class Record:
    """One answer of one mode to one problem. Tokens are target tokens; None: not applicable to the mode."""

    problem_id: str
    mode: str
    repeat: int
    correct: bool | None
    """None: the task has no references."""
    seconds: float
    """Wall-clock time from prompt to answer, from empty caches; rounded to 0.1 ms."""
    n_tokens: int
    """Length of the answer, end token included."""
    text: str
    finish_reason: str
    target_forwards: int
    draft_forwards: int | None = None
    drafter_forwards: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    exact_tail_tokens: int | None = None
    """The part of `accepted_tokens` accepted because it equals the target's greedy choice."""
    prefill_s: float | None = None
    """Mode "draft" only: seconds of one target forward over prompt and draft, the other part of the limit."""
    token_exact_tokens: int | None = None
    """Mode "draft" only: number of leading draft tokens that equal the target's greedy choice."""

    @property
    def key(self) -> Key:
        return self.problem_id, self.mode, self.repeat
