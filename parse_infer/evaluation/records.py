"""Records of answers, as `records.jsonl` of a benchmark and of an evaluation holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from parse_infer.request.output import Generation


@dataclass(frozen=True, kw_only=True)
class AnswerFigures:
    """Figures of one answer. Tokens are target tokens; None: not applicable to the mode.

    `of` fills each field from the field of that name in the generation's `Statistics` or `Timings`. A new figure
    there becomes part of the records by a field here.
    """

    text: str
    seconds: float
    """Wall-clock time from prompt to answer, from empty caches; rounded to 0.1 ms."""
    n_tokens: int
    """Length of the answer, end token included."""
    finish_reason: str
    target_forwards: int
    draft_forwards: int | None = None
    drafter_forwards: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    exact_tail_tokens: int | None = None
    """The part of `accepted_tokens` accepted because it equals the target's greedy choice."""
    first_text_s: float | None = None
    longest_wait_s: float | None = None

    @classmethod
    def of(cls, generation: Generation, seconds: float, **own: object) -> Self:
        """Build the record of an answer that took `seconds`; `own` has the fields that the generation lacks."""
        known = {
            **vars(generation.timings),
            **vars(generation.stats),
            **vars(generation),
            "seconds": round(seconds, 4),
            "n_tokens": len(generation.token_ids),
        }
        return cls(**{field.name: known[field.name] for field in fields(AnswerFigures) if field.name in known} | own)


@dataclass(frozen=True, kw_only=True)
class Record(AnswerFigures):
    """One answer of one mode to one problem, in a benchmark."""

    problem_id: str
    digest: str
    """Identifies the problem, see `parse_infer.evaluation.modes.problems_digest`."""
    mode: str
    repeat: int
    correct: bool | None
    """None: the task has no references."""
    prefill_s: float | None = None
    """Mode "draft" only: seconds of one target forward over prompt and draft, the other part of the limit."""
    token_exact_tokens: int | None = None
    """Mode "draft" only: number of leading draft tokens that equal the target's greedy choice."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.digest, self.mode, self.repeat


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def costs(rows: Sequence[AnswerFigures]) -> dict[str, Any]:
    """Figures of one mode's answers: tokens/s, and averages per answer."""
    n, tokens, seconds = len(rows), sum(r.n_tokens for r in rows), sum(r.seconds for r in rows)
    return {
        "tokens_per_s": tokens / seconds,
        "seconds_per_answer": seconds / n,
        "tokens_per_answer": tokens / n,
        "target_forwards": sum(r.target_forwards for r in rows) / n,
        "first_text_s": mean(r.first_text_s for r in rows),
        "longest_wait_s": mean(r.longest_wait_s for r in rows),
        "drafted": mean(None if r.draft_tokens is None else r.draft_tokens / max(1, r.n_tokens) for r in rows),
        "cut_off": sum(r.finish_reason == "length" for r in rows) / n,
    }


def acceptance_rate(rows: Sequence[AnswerFigures]) -> float:
    """Accepted / proposed draft tokens; 0.0 without a draft."""
    return sum(r.accepted_tokens or 0 for r in rows) / max(1, sum(r.draft_tokens or 0 for r in rows))
