"""The tables of a benchmark in the documentation; `parse_infer.bench.documents` puts them there.

- headline: a mode a line, in words, with what matters to a reader;
- tokens: modes by name, with what token drafters are about;
- modes: everything, as `results.md` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parse_infer.bench.mode_names import title
from parse_infer.bench.tables import (
    HEADER,
    format_number,
    format_percent,
    format_points,
    format_times,
    machine,
    markdown_table,
    rows,
)
from parse_infer.suggest import suggestion

_HEADLINE = (
    "mode",
    "right, %",
    "against the target, points",
    "tokens/s",
    "speed-up",
    "draft tokens kept, %",
    "target forwards per answer",
)
_TOKENS = (
    "mode",
    "right, %",
    "tokens/s",
    "speed-up",
    "tokens per target forward",
    "target forwards per answer",
    "drafter forwards per answer",
)


def table(results: dict[str, Any], kind: str) -> list[str]:
    """Lines of Markdown, the last of which says where the table comes from. ValueError for an unknown kind."""
    if kind not in _KINDS:
        raise ValueError(f"unknown table {kind!r}; {suggestion(kind, _KINDS)}")
    return [*_KINDS[kind](results["modes"]), "", _origin(results["environment"])]


def _headline(modes: dict[str, dict[str, Any]]) -> list[str]:
    cells = [
        [
            title(name),
            format_percent(m["accuracy"], m["accuracy_ci"]),
            "" if name == "target" else format_points(m["accuracy_diff"], m["accuracy_diff_ci"]),
            format_number(m["tokens_per_s"], 0),
            format_times(m["speedup"], None if name == "target" else m["speedup_ci"]),
            "" if m["acceptance_rate"] is None else format_number(100 * m["acceptance_rate"], 0),
            format_number(m["target_forwards"], 1),
        ]
        for name, m in modes.items()
    ]
    return markdown_table(_HEADLINE, cells)


def _tokens(modes: dict[str, dict[str, Any]]) -> list[str]:
    cells = [
        [
            f"`{name}`",
            format_percent(m["accuracy"]),
            format_number(m["tokens_per_s"], 0),
            format_times(m["speedup"], None if name == "target" else m["speedup_ci"]),
            format_number(m["acceptance_length"] if m["target_forwards"] else None, 2),
            format_number(m["target_forwards"], 1),
            format_number(m["drafter_forwards"], 1),
        ]
        for name, m in modes.items()
    ]
    return markdown_table(_TOKENS, cells)


def _modes(modes: dict[str, dict[str, Any]]) -> list[str]:
    return markdown_table(HEADER, rows(modes))


_KINDS: dict[str, Callable[[dict[str, dict[str, Any]]], list[str]]] = {
    "headline": _headline,
    "tokens": _tokens,
    "modes": _modes,
}


def _origin(environment: dict[str, Any]) -> str:
    date = environment["date"].partition("T")[0]
    return (
        f"{environment['problems']} problems of {environment['task']}; {machine(environment)}, "
        f"{environment['dtype']}; `{environment['command']}`, {date}. Brackets: 95 % intervals."
    )
