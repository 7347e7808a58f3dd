"""Interface of a task: a source of problems with a checker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from parse_infer.text.prompts import Prompt

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One problem: `prompt` is plain text or chat messages, `reference` the right answer for `Task.check`."""

    id: str
    prompt: str | list[dict[str, str]]
    reference: str
    solution: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A source of problems with a checker."""

    name: str

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        """Yield at most `limit` problems of `split`, the same ones for the same `seed`."""
        ...

    def check(self, problem: Problem, completion: str) -> bool | None:
        """Whether `completion` answers `problem` correctly; None where the task does not check answers."""
        ...


def comparison(task: Task, problem: Problem) -> Callable[[str, str], bool] | None:
    """Return the task's own function to compare two answers to the problem; None: `checkers.same_answer` does."""
    own = getattr(task, "comparison", None)
    return own(problem) if own else None


def prompt_id(prompt: Prompt) -> str:
    """Return an id, derived from the prompt alone, for a problem without id."""
    return f"prompt-{prompt_hash(prompt)}"


def split_of(prompt: Prompt, sharing: Collection[Split]) -> Split:
    """Return the split of a prompt, by its hash, among the splits that share one source.

    Validation and test get 10 % each. The first of train, test and validation that shares the source gets the rest."""
    shares: dict[int, Split] = {0: "validation", 1: "test"}
    preferred = shares.get(int(prompt_hash(prompt), 16) % 10, "train")
    order: tuple[Split, ...] = (preferred, "train", "test", "validation")
    return next(split for split in order if split in sharing)


def check_split(split: str) -> Split:
    """Return the split; raise ParseError for an unknown name."""
    for known in SPLITS:
        if split == known:
            return known
    raise ParseError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
