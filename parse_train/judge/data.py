"""In-memory data sets of labelled drafts, and their split by problem."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from data_tools.labels.rows import LabelledDraft
from parse_infer.errors import ParseError


class ValidityDataset(Dataset[Any]):
    """Examples in memory. `lengths` (tokens of each) are for length grouping."""

    def __init__(self, examples: Sequence[Any]) -> None:
        self.examples = list(examples)
        self.lengths = [example.length for example in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def split_by_problem(
    rows: Sequence[LabelledDraft], eval_share: float, seed: int
) -> tuple[list[LabelledDraft], list[LabelledDraft]]:
    """Split into training rows and rows of held-out problems, independently of the row order.

    Problems with different ids but the same prompt count as one problem.

    Raises:
        ValueError: fewer than two problems.
    """
    owners = problem_names([(row.problem, row.prompt_key) for row in rows])
    names = set(owners)
    if len(names) < 2:
        raise ParseError(
            f"the data holds drafts of {len(names)} problem(s); at least 2 problems are needed for held-out data"
        )
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    held_out = set(ordered[: min(max(1, round(eval_share * len(ordered))), len(ordered) - 1)])
    train = [row for row, owner in zip(rows, owners, strict=True) if owner not in held_out]
    return train, [row for row, owner in zip(rows, owners, strict=True) if owner in held_out]


def problem_names(drafts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the problem of each draft, independently of the order. Problems that share a prompt have one name.

    Args:
        drafts: problem and prompt of each draft.
    """
    first_with_prompt: dict[str, str] = {}
    owner: dict[str, str] = {}

    def find(problem: str) -> str:
        while owner.setdefault(problem, problem) != problem:
            problem = owner[problem]
        return problem

    for problem, prompt in drafts:
        owner[find(problem)] = find(first_with_prompt.setdefault(prompt, problem))
    # The smallest name of grouped problems does not depend on the order.
    names: dict[str, str] = {}
    for problem, _ in drafts:
        root = find(problem)
        names[root] = min(names.get(root, problem), problem)
    return [names[find(problem)] for problem, _ in drafts]
