"""Result table of an evaluation, for the terminal and in Markdown."""

from __future__ import annotations

import re
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from parse_infer.evaluation.tables import format_percent, format_times, machine, markdown_table

HEADER = ("task, problems", "metric", "target", "PARSE", "difference", "tokens/s", "speed-up", "accepted, %")
AGREES = "same text"  # share of answers identical to the target's, for tasks without metrics
NOTE = (
    "Metrics are lm-eval's, ± its standard error; brackets: 95 % intervals (paired; Newcombe's for shares, else the "
    "bootstrap over problems). Both modes answered each problem one right after the other. Speed-up: ratio of "
    "tokens/s. Accepted: share of the draft tokens that became part of the answer."
)


def rows(results: dict[str, Any]) -> list[list[str]]:
    """Cells under `HEADER`, one row per metric of a task; the first row has the speed."""
    cells = []
    for name, task in results["tasks"].items():
        speed = [
            " → ".join(f"{task['speed'][mode]['tokens_per_s']:.0f}" for mode in ("target", "parse")),
            format_times(task["speedup"], task["speedup_ci"]),
            format_percent(task["acceptance_rate"]),
        ]
        label = name if name == task["lm_eval_task"] else f"{name} ({task['lm_eval_task']})"
        agreement = [AGREES, "", f"{task['same_text']:.3f}", ""]
        told = [[key, *_compared(metric)] for key, metric in task["metrics"].items()] or [agreement]
        cells.append([f"{label}, {task['n']}", *told[0], *speed])
        cells += [["", *columns, *[""] * len(speed)] for columns in told[1:]]
    return cells


def _proposer(drafter: dict[str, Any] | None) -> str:
    if drafter is None:
        return "none"
    sizes = ", ".join(f"{key} {value}" for key, value in drafter.items() if key not in ("kind", "weights"))
    return f"{drafter['kind']} ({sizes})"


def _compared(metric: dict[str, Any]) -> list[str]:
    errors, interval = metric["stderr"], metric["difference_ci"]
    values = [
        f"{metric[mode]:.3f}" + ("" if errors[mode] is None else f" ± {errors[mode]:.3f}")
        for mode in ("target", "parse")
    ]
    around = f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
    return [*values, f"{metric['difference']:+.3f}{around}"]


def terminal_table(results: dict[str, Any]) -> Table:
    """Build a narrow table, with each interval, error and filter on its own line."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, caption=NOTE, caption_justify="left")
    for i, name in enumerate(HEADER):
        table.add_column(name.replace(", ", "\n"), justify="right" if i > 1 else "left", no_wrap=i < 4)
    for row in rows(results):
        named = [cell.replace(",", "\n") for cell in row[:2]]
        figures = [re.sub(r"(?<![±→]) ", "\n", cell) for cell in row[2:]]
        table.add_row(*named, *figures)
    return table


def markdown(results: dict[str, Any]) -> str:
    """The content of `results.md`."""
    environment = results["environment"]
    models = " and ".join(environment[role]["name"] for role in ("target", "draft") if environment[role])
    lines = [
        f"`{environment['command']}`, {environment['date']}: {models}, threshold {environment['threshold']:.4g}, "
        f"block tokens {environment['block_tokens']}, "
        f"token proposer of the target: {_proposer(environment['target_drafter'])}; "
        f"{machine(environment)}, {environment['dtype']}.",
        "",
        *markdown_table(HEADER, rows(results)),
        "",
        NOTE,
    ]
    return "\n".join(lines) + "\n"
