"""What a benchmark writes down about one answer."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str, str, int]  # problem, mode, repeat


@dataclass(frozen=True)
class Record:
    """One answer of one mode to one problem. Tokens are target tokens; None where a mode has no such thing."""

    problem_id: str
    mode: str
    repeat: int
    correct: bool | None
    """None: the task has no references."""
    seconds: float
    """Wall clock from prompt to answer, all caches empty at the start; to 0.1 ms."""
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
    """The part of `accepted_tokens` that was kept because it equals the target's greedy choice."""
    prefill_s: float | None = None
    """Mode "draft" only: one target forward over prompt and draft, the other half of the limit."""
    token_exact_tokens: int | None = None
    """Mode "draft" only: how many leading draft tokens equal the target's greedy choice."""

    @property
    def key(self) -> Key:
        return self.problem_id, self.mode, self.repeat
