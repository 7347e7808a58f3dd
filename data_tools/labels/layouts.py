"""Conversion of public process-supervision sets from labels of steps to labels of prefixes.

A prefix is valid if none of its steps is wrong; a neutral step is not wrong. A solution with a final answer is
`finished`: its last prefix gets the target's end token, as in a build.

    trl            {"prompt", "completions": [step], "labels": [bool]}, and perhaps "finished"
    prm800k        openai/prm800k (arXiv 2305.20050): {"question": {"problem"}, "label": {"steps", "finish_reason"}}
    math_shepherd  peiyi9979/Math-Shepherd (arXiv 2312.08935): {"input": "… Step 1: … ки", "label": "… Step 1: … +"}
    processbench   Qwen/ProcessBench (arXiv 2412.06559): {"problem", "steps", "label": first wrong step or -1}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import and_
from typing import Any, TypeVar

from parse_infer.errors import ParseError

Row = Mapping[str, Any]
Part = TypeVar("Part")
_STEP_TAG = "ки"


def _build(row: Row) -> Iterator[Row]:
    if row.get("draft_ids") is None and {"prompt", "completions", "labels"} <= row.keys():
        raise ParseError(
            "the row has no draft_ids, so no build wrote it, and its labels may describe steps: name the layout "
            f"({', '.join(name for name in LAYOUTS if name != 'build')})"
        )
    yield row


def _trl(row: Row) -> Iterator[Row]:
    labels = row.get("labels")
    if isinstance(labels, list) and all(isinstance(label, bool) for label in labels):
        row = {**row, "labels": list(accumulate(labels, and_))}
    yield row


def _prm800k(row: Row) -> Iterator[Row]:
    """Yield the labeller's path, and each rejected alternative with the steps before it."""
    problem = _part(row, "question", "problem", str)
    if _part(row, "label", "finish_reason", str) == "bad_problem":
        return
    path: list[tuple[str, bool]] = []
    continued = False  # True where alternatives already yielded the path
    for step in _part(row, "label", "steps", list):
        candidates, chosen = step.get("completions") or [], step.get("chosen_completion")
        others = [c for i, c in enumerate(candidates) if i != chosen and c["rating"] is not None]
        for other in others:
            yield _draft(problem, [*path, (other["text"], other["rating"] >= 0)], "# Answer" in other["text"])
        if chosen is not None and candidates[chosen]["rating"] is not None:
            path.append((candidates[chosen]["text"], candidates[chosen]["rating"] >= 0))
        elif chosen is None and (
            written := step.get("human_completion")
        ):  # labellers wrote a step where all others are wrong
            path.append((written if isinstance(written, str) else written["text"], True))
        else:
            continued = bool(others)
            break
    if path and not continued:
        yield _draft(problem, path, "# Answer" in path[-1][0])


def _math_shepherd(row: Row) -> Iterator[Row]:
    """Yield one draft, or nothing for the few rows without a first step."""
    text, marks = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(marks, str) or _STEP_TAG not in text:
        raise ParseError(
            f"a row of math_shepherd has input (a text with {_STEP_TAG} after each step), and label (+ or - instead)"
        )
    *pieces, rest = text.split(_STEP_TAG)
    signs = [marks[end + i : end + i + 1] for i, end in enumerate(accumulate(map(len, pieces)))]
    if not set(signs) <= {"+", "-"}:
        raise ParseError(f"label must equal input, with + or - in place of each {_STEP_TAG}")
    for i in range(len(pieces)):  # the problem itself may contain a tag
        head = "".join(pieces[: i + 1])
        if first := re.search(r"step 1:", head, re.IGNORECASE):
            steps = [head[first.start() :], *pieces[i + 1 :]]
            ok = [sign == "+" for sign in signs[i:]]
            finished = not rest.strip() and "The answer is" in steps[-1]
            labelled = [(step.strip(), good) for step, good in zip(steps, ok, strict=True)]
            yield _draft(head[: first.start()].strip(), labelled, finished)
            return


def _processbench(row: Row) -> Iterator[Row]:
    problem, steps, first_error = (row.get(key) for key in ("problem", "steps", "label"))
    if not isinstance(problem, str) or not isinstance(steps, list) or first_error not in range(-1, len(steps)):
        raise ParseError(
            "a row of processbench has problem (a text), steps (a list) and label (the first wrong step, or -1)"
        )
    draft = _draft(problem, [(step, k != first_error) for k, step in enumerate(steps)], finished=True)
    if (right := row.get("final_answer_correct")) is not None and steps:
        # As in a build, the last prefix of a finished draft is valid only with a right answer.
        draft |= {"draft_correct": right, "labels": [*draft["labels"][:-1], draft["labels"][-1] and right]}
    yield draft


LAYOUTS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "build": _build,
    "trl": _trl,
    "prm800k": _prm800k,
    "math_shepherd": _math_shepherd,
    "processbench": _processbench,
}


def prefix_rows(row: Row, layout: str) -> Iterator[Row]:
    """Yield the drafts in one row of `layout`, a key of `LAYOUTS`, as rows with one label per prefix.

    Raises:
        ValueError: the row has another layout.
    """
    try:
        yield from LAYOUTS[layout](row)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ParseError(f"the row does not have the layout {layout} ({type(error).__name__}: {error})") from error


def _draft(problem: str, steps: Sequence[tuple[str, bool]], finished: bool) -> dict[str, Any]:
    """Return a row from the steps, each with whether the step is right or neutral."""
    texts, ok = [text for text, _ in steps], [good for _, good in steps]
    return {"prompt": problem, "completions": texts, "labels": list(accumulate(ok, and_)), "finished": finished}


def _part(row: Row, key: str, inner: str, kind: type[Part]) -> Part:
    outer = row.get(key)
    value = outer.get(inner) if isinstance(outer, Mapping) else None
    if not isinstance(value, kind):
        raise ParseError(
            "a row of prm800k has question with problem (a text), and label with steps (a list) and finish_reason"
        )
    return value
