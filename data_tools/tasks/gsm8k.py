"""Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from data_tools.tasks.final_answer import final_answer
from data_tools.tasks.stated_numbers import same_number
from data_tools.tasks.task import Problem, Split, check_split
from parse_infer.files import read_jsonl


@dataclass
class Gsm8k:
    """Grade-school word problems in the original format (`question`, `answer` ending in `#### 18`).

    Args:
        path: a Hugging Face data set id, or a local jsonl file in the original format. Split test is the whole file;
            splits train and validation are two disjoint parts.
    """

    path: str = "openai/gsm8k"
    name: str = "gsm8k"
    _REQUEST = "\nReason step by step, one step a line, and end with a line `#### <number>`."

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        file = Path(self.path)
        if file.suffix in (".jsonl", ".json"):
            rows = [row for _, row in read_jsonl(self.path, ("question", "answer"))]
            name = f"gsm8k-{file.stem}"
        else:
            from datasets import load_dataset

            part = "test" if split == "test" else "train"
            rows, name = load_dataset(self.path, "main", split=part), f"gsm8k-{part}"
        # GSM8K has no validation split, so the last 500 training rows serve as one.
        end = len(rows) - min(500, len(rows) // 4)
        order = list({"train": range(end), "validation": range(end, len(rows)), "test": range(len(rows))}[split])
        Random(seed).shuffle(order)
        for index in order[:limit]:
            row = rows[index]
            solution = re.sub(r"<<[^>]*>>", "", str(row["answer"]))
            yield Problem(
                f"{name}-{index}", row["question"] + self._REQUEST, final_answer(solution).text.strip(), solution
            )

    def check(self, problem: Problem, completion: str) -> bool:
        return same_number(problem.reference, completion)
