"""Tasks: where problems come from and how an answer to them is checked."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from data_tools import wording

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One problem: `prompt` is plain text or chat messages, `reference` what `Task.check` compares with."""

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

    def check(self, problem: Problem, completion: str) -> bool:
        """Whether `completion` answers `problem` correctly."""
        ...


_ANSWER = re.compile(r"####\s*([^\n]*)")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_SAID = re.compile(r"answer(?:\s+is|\s*:)\s*([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(r"[-−]?\s*(?:[$€£]\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")


def read_number(text: str) -> Fraction | None:
    """The last number in `text`: thousands separators, currency, `%`, units and trailing zeros do not matter."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    clean = re.sub(r"[\s,$€£]", "", found[-1].replace("−", "-"))
    try:
        return Fraction(clean)
    except (ValueError, ZeroDivisionError):
        return None


def final_answer(completion: str) -> str:
    """What states the answer: the text after the last `####`, in `\\boxed{}`, after "answer is", else all of it."""
    for pattern in (_ANSWER, _BOXED, _SAID):
        found = pattern.findall(completion)
        if found:
            return found[-1]
    return completion


def same_number(reference: str, completion: str) -> bool:
    """Numeric equality of the stated answers, to one part in a million."""
    wanted, got = read_number(final_answer(reference)), read_number(final_answer(completion))
    if wanted is None or got is None:
        return False
    return abs(wanted - got) <= abs(wanted) / 1_000_000


@dataclass
class GsmSymbolic:
    """Word problems from the `gsm_symbolic` generator of reasoning-gym, with worked answers in varied wording.

    Splits use disjoint seed ranges, and a problem (template and numbers) belongs to exactly one of them for any seed.

    Args:
        max_number: no number in question, worked answer or intermediate result is larger; None for no bound.
        max_question_chars / max_solution_chars: longer ones are skipped.
    """

    max_number: float | None = 300
    max_question_chars: int = 360
    max_solution_chars: int = 330
    name: str = "gsm_symbolic"

    _REQUEST = " Give the result as your final answer. Do not include units."
    _CHUNK = 4096
    # Share of all problems, in hundredths of a hash of template and numbers.
    _SHARES = {"train": range(0, 90), "validation": range(90, 95), "test": range(95, 100)}

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise ValueError("task gsm_symbolic needs the package reasoning-gym: pip install reasoning-gym") from error
        _check_split(split)
        # 2**40 seeds a split, 2**24 (four thousand chunks) a seed: ranges of different splits and seeds never meet.
        base = (SPLITS.index(split) << 40) + (seed << 24)
        count, chunk, seen = 0, 0, set()
        while True:
            start = base + chunk * self._CHUNK
            generator = create_dataset("gsm_symbolic", seed=start, size=self._CHUNK)
            for index in range(self._CHUNK):
                if limit is not None and count >= limit:
                    return
                problem = self._problem(generator[index], generator.task_indices[index], start + index, split)
                if problem is None or (split != "train" and problem.metadata["key"] in seen):
                    continue
                seen.add(problem.metadata["key"]) if split != "train" else None
                count += 1
                yield problem
            chunk += 1

    def _problem(self, entry: dict[str, Any], template: int, seed: int, split: Split) -> Problem | None:
        question = _drop_zero_decimals(entry["question"].removesuffix(self._REQUEST)).strip()
        values = wording.numbers(question)
        key = f"{template}:{','.join(map(str, values))}"
        if int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 not in self._SHARES[split]:
            return None
        if len(question) > self.max_question_chars or (
            self.max_number is not None and any(v > self.max_number for v in values)
        ):
            return None
        answer = _drop_zero_decimals(str(entry["answer"]))
        steps = wording.read_steps(_drop_zero_decimals(entry["metadata"]["answer_cot"]), question, answer)
        if steps is None:
            return None
        solution = wording.write(steps, answer, Random(seed), self.max_number)
        if solution is None or len(solution) > self.max_solution_chars:
            return None
        return Problem(f"gsm_symbolic-{seed}", question, answer, solution, {"template": template, "key": key})

    def check(self, problem: Problem, completion: str) -> bool:
        return "####" in completion and same_number(problem.reference, completion)


@dataclass
class Gsm8k:
    """Grade-school word problems in the original format (`question`, `answer` ending in `#### 18`).

    Args:
        path: a Hugging Face data set id, or a local jsonl file in the original format (then it serves every split).
    """

    path: str = "openai/gsm8k"
    name: str = "gsm8k"
    _REQUEST = "\nReason step by step, one step a line, and end with a line `#### <number>`."

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        _check_split(split)
        if Path(self.path).suffix in (".jsonl", ".json"):
            rows: list[dict[str, Any]] = [row for _, row in read_jsonl(self.path, ("question", "answer"))]
        else:
            from datasets import load_dataset

            # GSM8K has no validation split: its training set lends the last 500 rows.
            loaded = load_dataset(self.path, "main", split="test" if split == "test" else "train")
            size = len(loaded)
            chosen = {"train": range(0, size - 500), "validation": range(size - 500, size), "test": range(size)}[split]
            rows = loaded.select(chosen)
        order = list(range(len(rows)))
        Random(seed).shuffle(order)
        for index in order[:limit]:
            row = rows[index]
            solution = re.sub(r"<<[^>]*>>", "", row["answer"])
            yield Problem(
                f"gsm8k-{split}-{index}", row["question"] + self._REQUEST, final_answer(solution).strip(), solution
            )

    def check(self, problem: Problem, completion: str) -> bool:
        return same_number(problem.reference, completion)


def _matches(reference: str, completion: str) -> bool:
    return re.search(reference, completion) is not None


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda reference, completion: final_answer(completion).strip() == reference.strip(),
    "numeric": same_number,
    "regex": _matches,
}


@dataclass
class Jsonl:
    """A user's own problems: a jsonl file with `prompt` (text or messages), `reference`, and maybe `id` and `split`.

    Args:
        path: the file.
        check_with: `exact`, `numeric` or `regex` (the reference is searched for as a pattern).
    """

    path: str = ""
    check_with: str = "numeric"
    name: str = "jsonl"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("task jsonl needs the option path: the jsonl file with prompts and references")
        if self.check_with not in CHECKS:
            raise ValueError(f"check_with is {self.check_with!r}; choose one of {', '.join(CHECKS)}")

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        _check_split(split)
        rows = [
            (line, row)
            for line, row in read_jsonl(self.path, ("prompt", "reference"))
            if row.get("split", split) == split
        ]
        for line, row in rows:
            if not row["prompt"]:
                raise ValueError(f"{self.path}, line {line}: the prompt is empty")
            if self.check_with == "regex":
                try:
                    re.compile(str(row["reference"]))
                except re.error as error:
                    raise ValueError(
                        f"{self.path}, line {line}: the reference is no valid pattern ({error})"
                    ) from error
        Random(seed).shuffle(rows)
        for line, row in rows[:limit]:
            yield Problem(str(row.get("id", f"line-{line}")), row["prompt"], str(row["reference"]))

    def check(self, problem: Problem, completion: str) -> bool:
        return CHECKS[self.check_with](problem.reference, completion)


TASKS: dict[str, Any] = {"gsm_symbolic": GsmSymbolic, "gsm8k": Gsm8k, "jsonl": Jsonl}


def load_task(name: str, **options: Any) -> Task:
    """The task called `name` with `options`; a ValueError for an unknown one names the closest known one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{_closest(name, TASKS)}; known tasks: {', '.join(TASKS)}")
    known = [key for key in TASKS[name].__dataclass_fields__ if key != "name"]
    for key in options:
        if key not in known:
            raise ValueError(
                f"task {name} has no option {key!r}{_closest(key, known)}; its options: {', '.join(known)}"
            )
    return TASKS[name](**options)


def read_jsonl(path: str | Path, required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row); a malformed row or a missing key is a ValueError that names file and line."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: give the path of a jsonl file")
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg})") from error
            missing = [key for key in required if not isinstance(row, dict) or key not in row]
            if missing:
                raise ValueError(
                    f"{path}, line {number}: no key {missing[0]!r}; every row needs {', '.join(required)}"
                )
            yield number, row


def _closest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")


def _drop_zero_decimals(text: str) -> str:
    return re.sub(r"(\d)\.0+\b", r"\1", text)
