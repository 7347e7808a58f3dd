"""`DraftSource`: the interface of everything that proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parse_infer.decoding.plan import SourceKind
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Prompt


@dataclass(frozen=True)
class Draft:
    """A proposed continuation of the answer.

    `ids` are always target tokens. With `finished` the draft ends the answer, and the last id is the target's end
    token. An empty draft means that the source has no more tokens to propose.
    """

    ids: list[int]
    finished: bool = False


@dataclass(frozen=True)
class Block(Draft):
    """The beginning of a draft, up to where one more token is not faster.

    Attributes:
        n_drafted: number of tokens in the draft model's own; 0: it cannot continue. `ids` may be empty all the same,
            inside a character.
        confidences: the draft model's probability of each token.
        seconds_per_token: time of a decoding step, without the prefill; None if unknown.
    """

    n_drafted: int = 0
    confidences: list[float] = field(default_factory=list)
    seconds_per_token: float | None = None


class DraftSource(Protocol):
    """Proposes drafts for one answer at a time.

    Attributes:
        kind: what it can do.
    """

    kind: SourceKind

    @property
    def forwards(self) -> int:
        """Model forwards so far, over all answers; 0 without a model."""
        ...

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt that this source cannot read, without effect on the answer in progress."""
        ...

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        """Begin a new answer to a `prompt` that `check` accepts, without running a model.

        A draft may end at the first of the `stop` strings; the engine truncates it there in any case.
        """
        ...

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        """Continue the answer (`answer_ids`: target tokens without the prompt) by about `max_new_tokens` tokens. The
        engine truncates a draft that is too long."""
        ...
