"""The data set card, which declares files and columns to `datasets.load_dataset(folder)`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import read_rows
from data_tools.labels.summary import BINS, Summary
from parse_infer.files import write_text

# datasets infers a wrong type for a column that starts with thousands of nulls, so the card declares all types.
_LISTS = {
    "completions": "string",
    "labels": "bool",
    "values": "float64",
    "confidence": "float64",
    "draft_ids": "int64",
    "cuts": "int64",
}
_SCALARS = {
    "undecided": "int64",
    "target_value": "float64",
    "n_rollouts": "int64",
    "finished": "bool",
    "draft_correct": "bool",
    "task": "string",
    "domain": "string",
    "problem_id": "string",
    "reference": "string",
    "target": "string",
    "draft": "string",
    "temperature": "float64",
    "seed": "int64",
    "checked_with": "string",
}
_COLUMNS = """\
| column | meaning |
|---|---|
| `prompt` | the problem, as text or chat messages |
| `completions` | segments of the draft; their concatenation is its text |
| `labels` | for each segment, whether the prefix that ends with it is valid |
| `values` | share of finished target rollouts from that prefix with a right answer; null for an inferred label |
| `confidence` | for no chance of the prefix is a wrong label more likely than 1 minus this |
| `undecided` | number of prefixes without a label; they have no cut, and their segments join the next segments |
| `target_value` | share of finished target rollouts from the bare prompt with a right answer |
| `n_rollouts` | rollouts from the bare prompt, and the maximum from a prefix |
| `draft_ids`, `cuts` | the draft in target tokens, and the offsets where its segments end |
| `finished`, `draft_correct` | whether the draft ends with an end token, and whether its answer is right |
| `reference`, `task`, `domain`, `problem_id` | the right answer, the task, the kind and the id of the problem |
| `checked_with` | `own_answer` where the reference is the target's own final answer; else absent |
| `target`, `draft`, `temperature`, `seed` | the two models, and the sampling of the draft |"""


def write_card(folder: Path, config: BuildConfig, summary: Summary, n_problems: int) -> None:
    """Write README.md. `n_problems` includes problems without drafts."""
    header = yaml.safe_dump(_header(config, folder), sort_keys=False, allow_unicode=True)
    write_text(folder / "README.md", f"---\n{header}---\n{_text(config, summary, n_problems)}")


def _header(config: BuildConfig, folder: Path) -> dict[str, Any]:
    prompt: dict[str, Any] = {"name": "prompt", "dtype": "string"}
    if _has_messages(folder):
        keys = [{"name": key, "dtype": "string"} for key in ("role", "content")]
        prompt = {"name": "prompt", "list": keys}
    features: list[dict[str, Any]] = [prompt]
    features += [{"name": name, "list": kind} for name, kind in _LISTS.items()]
    features += [{"name": name, "dtype": kind} for name, kind in _SCALARS.items()]
    return {
        "tags": ["process-supervision", "stepwise-supervision", "parse"],
        "task_categories": ["text-generation"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": config.split, "path": f"data/{config.split}-*.jsonl"}],
            }
        ],
        "dataset_info": {"features": features},
    }


def _has_messages(folder: Path) -> bool:
    return any(isinstance(row.prompt, list) for row in islice(read_rows(folder), 1))


def _text(config: BuildConfig, summary: Summary, n_problems: int) -> str:
    table = [("problems", f"{n_problems:,}"), *summary.lines()]
    rows = "\n".join(f"| {name} | {figure} |" for name, figure in table)
    settings = yaml.safe_dump(config.identity(), sort_keys=False, allow_unicode=True).strip()
    return f"""
{_about(config)}

```python
datasets.load_dataset("path/to/this/folder", split="{config.split}")
```

| | |
|---|---|
{rows}
{_errors(summary) if config.prefix_labels else ""}
{_COLUMNS}

Written by `parse-data build` with

```yaml
{settings}
```
"""


def _about(config: BuildConfig) -> str:
    own = "\nAn answer is right if its final answer is the target's own from the bare prompt."
    own = own if config.check_with == "own_answer" else ""
    problems = f"Problems of the task `{config.task}` (split `{config.split}`), answered by a draft model"
    if not config.prefix_labels:
        return f"""# Whole drafts of {config.draft} for {config.target}

{problems}.
A draft is one segment with one label, whether its answer is right. A draft that was cut off is wrong, or has no label
if its text has the right answer already.{own}"""
    return f"""# Drafts of {config.draft}, labelled by rollouts of {config.target}

{problems} and cut into segments. A label
says whether the prefix that ends with its segment is valid: {_rule(config)}{own}
The answer of a finished draft labels its last prefix. A perfect judge, which knows the labels, keeps the draft up to
the last prefix before the first invalid prefix.
Columns follow TRL's stepwise supervision, but a label describes the whole prefix, not its last step alone."""


def _errors(summary: Summary) -> str:
    width = 100 // BINS
    errors = "\n".join(
        f"| {width * i}–{width * (i + 1)} % | {count:,} |" for i, count in enumerate(summary.error_position)
    )
    return f"""
Position of the first error, as a share of the draft's segments:

| position | drafts |
|---|---|
{errors}
"""


def _rule(config: BuildConfig) -> str:
    if config.rollout_sampling.greedy:
        return (
            "the target answers right when it resumes greedily from the prefix, or answers wrong from the bare prompt."
        )
    return (
        f"the target, resuming from the prefix, keeps at least {1 - config.margin:.0%} of its chance of a right "
        f"answer from the bare prompt. The prefix is invalid if at most {config.margin:.0%} of that chance is left. "
        "A sequential test on rollouts decides. Whatever the chance, a wrong label has a probability of at most "
        f"{config.max_label_error:.0%}; a prefix between the two limits has no right label."
    )
