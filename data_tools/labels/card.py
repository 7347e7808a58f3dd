"""The data set card, with which `datasets.load_dataset(folder)` knows what the folder holds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import read_rows
from data_tools.labels.summary import BINS, Summary
from parse_infer.files import write_text

# Column types are declared: a column that starts with thousands of nulls would be guessed wrongly.
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
    "problem_id": "string",
    "reference": "string",
    "target": "string",
    "draft": "string",
    "temperature": "float64",
    "seed": "int64",
}
_COLUMNS = """\
| column | meaning |
|---|---|
| `prompt` | the problem, as text or chat messages |
| `completions` | segments of the draft; their concatenation is its text |
| `labels` | for each segment, whether the prefix that ends with it is valid |
| `values` | share of target rollouts from that prefix that end right; null where the label was inferred |
| `confidence` | probability that the label is right |
| `undecided` | prefixes that could not be labelled; they have no cut, their segments join the next ones |
| `target_value` | share of target rollouts from the bare prompt that end right |
| `n_rollouts` | rollouts from the bare prompt, and the most from a prefix |
| `draft_ids`, `cuts` | the draft in target tokens, and where its segments end |
| `finished`, `draft_correct` | whether the draft came to its end, and whether its answer is right |
| `reference`, `task`, `problem_id` | what was asked, and the right answer |
| `target`, `draft`, `temperature`, `seed` | where the draft and the rollouts come from |"""


def write_card(folder: Path, config: BuildConfig, summary: Summary, n_problems: int) -> None:
    """Write README.md. `n_problems` counts problems without drafts too."""
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
    width = 100 // BINS
    errors = "\n".join(
        f"| {width * i}–{width * (i + 1)} % | {count:,} |" for i, count in enumerate(summary.error_position)
    )
    settings = yaml.safe_dump(config.identity(), sort_keys=False, allow_unicode=True).strip()
    return f"""
# Drafts of {config.draft}, labelled by rollouts of {config.target}

Problems of the task `{config.task}` (split `{config.split}`), answered by a draft model and cut into segments. A label
says whether the prefix that ends there is valid: {_rule(config)}
The last prefix of a finished draft is labelled by its own answer. A perfect judge, which goes by the labels, keeps
what stands before the first prefix that is not valid.
Columns are those of TRL's stepwise supervision, but a label is about the whole prefix, not about its last step alone.

```python
datasets.load_dataset("path/to/this/folder", split="{config.split}")
```

| | |
|---|---|
{rows}

Where the first error is, as a share of the draft's segments:

| position | drafts |
|---|---|
{errors}

{_COLUMNS}

Written by `parse-data build` with

```yaml
{settings}
```
"""


def _rule(config: BuildConfig) -> str:
    if config.rollout_sampling.greedy:
        return "the target, resuming from it greedily, ends right, or is wrong from the bare prompt too."
    return (
        f"the target, resuming from it, keeps at least {1 - config.margin:.0%} of the chance of a right answer that "
        f"it has from the bare prompt. It is not valid if at most {config.margin:.0%} is left. A sequential test on "
        f"rollouts decides between the two, with errors of at most {config.max_label_error:.0%}."
    )
