"""Events of one answer, in the order in which `ParseEngine.stream` yields them."""

from __future__ import annotations

from dataclasses import dataclass

from parse_infer.request.output import Generation, Segment


@dataclass(frozen=True)
class Drafted:
    """The draft model has proposed `text`, already truncated at the first stop string and at the budget."""

    round: int
    text: str
    n_tokens: int


@dataclass(frozen=True)
class Verified:
    """One verification pass has read the draft. No segments in mode "exact" or for an empty draft."""

    round: int
    segments: list[Segment]


@dataclass(frozen=True)
class Accepted:
    """The loop has accepted `text`, which continues the answer, and dropped `rejected`."""

    round: int
    text: str
    n_tokens: int
    rejected: str


@dataclass(frozen=True)
class Resumed:
    """The target has written one token. `text` is "" while a character that spans several tokens is incomplete. The
    texts of all Accepted and Resumed events concatenate to the answer."""

    round: int
    text: str
    token_id: int


@dataclass(frozen=True)
class Done:
    """The answer is complete."""

    generation: Generation


Event = Drafted | Verified | Accepted | Resumed | Done


class Interrupted(Exception):
    """The caller has cancelled a stream."""
