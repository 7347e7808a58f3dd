"""Unlimited word problems from the `gsm_symbolic` generator of reasoning-gym."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from typing import Any, ClassVar

from data_tools.tasks.final_answer import final_answer
from data_tools.tasks.reading import reading
from data_tools.tasks.stated_numbers import same_number
from data_tools.tasks.task import SPLITS, Problem, Split, check_split
from parse_infer.errors import ParseError
from parse_infer.optional_dependencies import missing_package
from parse_zoo.tasks import paraphrase


@dataclass
class GsmSymbolic:
    """Word problems from the `gsm_symbolic` generator of reasoning-gym, with paraphrased worked solutions.

    Splits use disjoint seed ranges, and a problem (template and numbers) belongs to exactly one split for any seed.

    Args:
        max_number: largest number in question, solution and intermediate results; None for no bound.
        max_question_chars / max_solution_chars: maximum lengths; longer problems are skipped.
        in_parts: work out sums, differences, products and quotients digit by digit: `52 - 26 = 52 - 20 - 6 = 32 - 6`.
        exclude_seeds: {seed: number} excludes the prompts of the first `number` problems of another seed from the
            train split. Train splits of different seeds share prompts; the other splits share no prompts with them.
    """

    max_number: float | None = 300
    max_question_chars: int = 360
    max_solution_chars: int = 330
    in_parts: bool = False
    exclude_seeds: dict[int, int] = field(default_factory=dict)
    name: str = "gsm_symbolic"

    _REQUEST = " Give the result as your final answer. Do not include units."
    _CHUNK = 4096
    # Share of all problems, in hundredths of a hash of template and numbers.
    _SHARES: ClassVar[dict[str, range]] = {"train": range(0, 90), "validation": range(90, 95), "test": range(95, 100)}

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        others = self._other_seeds(seed) if split == "train" else {}
        return self._generated(split, seed, limit, others)

    def _generated(self, split: Split, seed: int, limit: int | None, others: dict[int, int]) -> Iterator[Problem]:
        try:
            from reasoning_gym import create_dataset
        except ModuleNotFoundError as error:
            raise ParseError(f"task gsm_symbolic: {missing_package(error)}") from error
        task = replace(self, exclude_seeds={})
        of_others = chain.from_iterable(task.problems("train", other, number) for other, number in others.items())
        total = sum(others.values())
        excluded = {p.prompt for p in reading(of_others, "reading the prompts of exclude_seeds", total)}
        # 2**40 generator seeds per split, 2**24 (four thousand chunks) per seed: ranges never overlap.
        base = (SPLITS.index(split) << 40) + (seed << 24)
        count, chunk, seen = 0, 0, set()
        while True:
            start = base + chunk * self._CHUNK
            generator = create_dataset("gsm_symbolic", seed=start, size=self._CHUNK)
            for index in range(self._CHUNK):
                if limit is not None and count >= limit:
                    return
                problem = self._problem(generator[index], generator.task_indices[index], start + index, split)
                if problem is None or problem.prompt in excluded:
                    continue
                if split != "train" and problem.metadata["key"] in seen:
                    continue
                seen.add(problem.metadata["key"]) if split != "train" else None
                count += 1
                yield problem
            chunk += 1

    def _other_seeds(self, seed: int) -> dict[int, int]:
        try:
            others = {int(other): int(number) for other, number in self.exclude_seeds.items()}  # JSON keys are strings
        except (TypeError, ValueError):
            others = {seed: 0}
        if seed in others:
            raise ParseError(
                f"option exclude_seeds of task gsm_symbolic is {self.exclude_seeds!r}; it must map seeds other than "
                f"{seed} to numbers of problems, for example {{0: 50000}}"
            )
        return others

    def _problem(self, entry: dict[str, Any], template: int, seed: int, split: Split) -> Problem | None:
        question = _drop_zero_decimals(entry["question"].removesuffix(self._REQUEST)).strip()
        values = paraphrase.numbers(question)
        key = f"{template}:{','.join(map(str, values))}"
        if int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 not in self._SHARES[split]:
            return None
        if len(question) > self.max_question_chars or (
            self.max_number is not None and any(v > self.max_number for v in values)
        ):
            return None
        answer = _drop_zero_decimals(str(entry["answer"]))
        steps = paraphrase.read_steps(_drop_zero_decimals(entry["metadata"]["answer_cot"]), question, answer)
        if steps is None:
            return None
        solution = paraphrase.write(steps, answer, Random(seed), self.max_number, self.in_parts)
        if solution is None or len(solution) > self.max_solution_chars:
            return None
        return Problem(f"gsm_symbolic-{seed}", question, answer, solution, {"template": template, "key": key})

    def check(self, problem: Problem, completion: str) -> bool:
        marked = "####" in completion and final_answer(completion).mark in ("hashes", "box")
        return marked and same_number(problem.reference, completion)


def _drop_zero_decimals(text: str) -> str:
    return re.sub(r"(\d)\.0+\b", r"\1", text)
