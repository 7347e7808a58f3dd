"""Exclude training problems of judge and models from calibrations and benchmarks, where they would bias results."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from parse_infer.errors import CalibrationError, ParseError

if TYPE_CHECKING:
    from parse_infer.text.prompts import Prompt


class HasPrompt(Protocol):
    """A problem of any task."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...


P = TypeVar("P", bound=HasPrompt)


def prompt_hash(prompt: object) -> str:
    """Identify a prompt by 16 hex digits of its SHA-256, independent of its problem's id.

    A text and a single user message with that text are the same prompt.

    Args:
        prompt: a text, or chat messages.
    """
    match prompt:
        case [{"role": "user", "content": str(text), **others}] if not others:
            prompt = text
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=dict).encode()).hexdigest()[:16]


def check_ids(problems: Sequence[HasPrompt]) -> None:
    """Raise ValueError unless there are problems, with unique ids."""
    if not problems:
        raise ParseError("there are no problems to run: choose another task, split or limit")
    name, count = Counter(p.id for p in problems).most_common(1)[0]
    if count > 1:
        raise ParseError(f"{count} problems have the id {name!r}: ids must be unique")


def leave_out_learnt(problems: Sequence[P], learnt: Collection[str]) -> list[P]:
    """Return the problems that neither the judge nor the models were trained on, as far as their folders tell.

    Some generators repeat prompts. The function drops repeated training problems with a note on standard error.

    Args:
        problems: with unique ids.
        learnt: `prompt_hash` of every training problem. Older adapters list ids instead, which match only while the
            problems keep their ids.

    Raises:
        ValueError: more than half of the problems are training problems.
    """
    known = [p for p in problems if p.id in learnt or prompt_hash(p.prompt) in learnt] if learnt else []
    if not known:
        return list(problems)
    found = (
        f"{len(known)} of the {len(problems)} problems are among those that the adapter, target or draft model was "
        f"trained on (first: {known[0].id})"
    )
    if 2 * len(known) > len(problems):
        raise CalibrationError(f"{found}, which biases the results: choose another split or seed")
    print(f"note: {found}; they are left out", file=sys.stderr)
    left_out = {problem.id for problem in known}
    return [problem for problem in problems if problem.id not in left_out]
