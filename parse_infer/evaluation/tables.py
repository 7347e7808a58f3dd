"""Benchmark results as a terminal table and a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from parse_infer.evaluation.mode_names import describe_mode, lossless_of
from parse_infer.settings.acceptance import describe_threshold
from parse_infer.settings.sampling import Sampling

HEADER = (
    *("mode", "right, %", "to target", "tokens/s", "speed-up", "over lossless"),
    *(
        "s/answer",
        "first text, s",
        "longest wait, s",
        "accepted, %",
        "drafted",
        "forwards",
        "tokens each",
        "of limit, %",
    ),
)
SAMPLED = ("one of k right, %", "distinct texts, %")  # of k samples
AGREES = "as the target, %"  # replaces "right, %" for tasks without references
_INTERVAL = r" (?=\[)"  # the space before it
_LONGEST_NAME = 28  # characters; a longer first cell is folded


def rows(modes: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Cells under `HEADER`, one row per mode; intervals in brackets are 95 % intervals."""
    lossless = lossless_of(modes)
    own = "target" if "target" in modes else lossless
    return [
        [
            name,
            format_percent(m["accuracy"], m["accuracy_ci"]),
            "" if name == own else format_points(m["accuracy_diff"], m["accuracy_diff_ci"]),
            format_number(m["tokens_per_s"], 0),
            format_times(m["speedup"], None if name == "target" else m["speedup_ci"]),
            format_times(m.get("over_lossless"), None if name == lossless else m.get("over_lossless_ci")),
            format_number(m["seconds_per_answer"], 3),
            format_number(m.get("first_text_s"), 3),
            format_number(m.get("longest_wait_s"), 3),
            format_percent(m["acceptance_rate"]),
            format_number(m.get("drafted"), 2),
            format_number(m["target_forwards"], 1),
            format_number(m["acceptance_length"] if m["target_forwards"] else None, 2),
            format_percent(m["limit_share"]),
            *([format_percent(m["pass_at_k"]), format_percent(m["distinct"])] if "pass_at_k" in m else []),
        ]
        for name, m in modes.items()
    ]


def header(environment: dict[str, Any]) -> tuple[str, ...]:
    """Column headings of `rows`."""
    heading = HEADER if environment.get("scored", True) else (HEADER[0], AGREES, *HEADER[2:])
    return (*heading, *SAMPLED) if environment.get("sampling") and environment.get("repeats", 1) > 1 else heading


def terminal_tables(results: dict[str, Any], width: int) -> list[Table]:
    """Build the tables of `bench`: as few as show all columns whole in `width` characters."""
    heading = [re.sub(",? ", "\n", name, count=1) for name in header(results["environment"])]
    cells = [[_name(row[0]), *(_broken(cell) for cell in row[1:])] for row in rows(results["modes"])]
    widths = [max(map(_width, column)) for column in zip(heading, *cells, strict=True)]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(heading)):
        if len(parts[-1]) > 1 and sum(widths[column] + 1 for column in (*parts[-1], i)) > width:
            parts.append([0])
        parts[-1].append(i)
    title = f"{results['environment']['problems']} problems; brackets: 95 % intervals"
    return [
        terminal_table(
            [heading[i] for i in part],
            [[row[i] for i in part] for row in cells],
            title=title if part is parts[0] else None,
        )
        for part in parts
    ]


def terminal_table(
    heading: Sequence[str],
    cells: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
    breaks: str = _INTERVAL,
) -> Table:
    """Build a table for the terminal. `breaks` matches where a figure's cell is broken: before its interval."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.title_justify = table.caption_justify = "left"
    broken = [(_name(name), [_broken(cell, breaks) for cell in figures]) for name, *figures in cells]
    longest = max((_width(name) for name, _ in broken), default=0)
    for i, title in enumerate(heading):  # a head's folder name may be long
        min_width = None if i else min(longest, _LONGEST_NAME)
        table.add_column(title, justify="right" if i else "left", overflow="fold", no_wrap=i > 0, min_width=min_width)
    for name, figures in broken:
        table.add_row(name, *figures, style="bold" if name.lower() == "parse" else None)
    return table


def _name(mode: str) -> str:
    """Break the name of a mode before each of its sizes."""
    return mode.replace(":", "\n  ")


def _broken(cell: str, breaks: str = _INTERVAL) -> str:
    return re.sub(breaks, "\n", cell)


def _width(cell: str) -> int:
    """Characters of the longest line, as `terminal_table` folds it."""
    return min(_LONGEST_NAME, max((len(line) for line in cell.splitlines()), default=0))


def markdown(results: dict[str, Any]) -> str:
    """Build `results.md`: environment, results table, acceptance, sweep and definitions."""
    environment = results["environment"]
    lines = [
        f"# {environment['problems']} problems of {environment['task']}",
        "",
        *_environment(environment),
        "",
        *markdown_table(header(environment), rows(results["modes"])),
        "",
    ]
    lines += [f"- {name}: {describe_mode(name)}" for name in results["modes"]]
    lines += ["", *_notes(results), ""]
    if results.get("categories"):
        lines += ["## Tokens per target forward, by category", "", *category_table(results), ""]
    if results["sweep"]:
        sweep = results["sweep"]
        lines += [f"## Thresholds, first {sweep['problems']} problems", ""]
        lines += [*threshold_table(results), "", "![speed-up against accuracy](figure.png)", ""]
    return "\n".join(lines)


def _sampling(environment: dict[str, Any]) -> str:
    described = str(Sampling(**environment.get("sampling", {})))
    if drafts := environment.get("draft_temperature"):
        described += f" (drafts that a judge reads: {drafts:g})"
    return described[0].upper() + described[1:]


def threshold_table(results: dict[str, Any]) -> list[str]:
    """Markdown table of accuracy and speed-up, per mode and threshold of the sweep."""
    right = header(results["environment"])[1]
    heading = ("mode", "threshold", right, "against target, points", "speed-up", "accepted, %")
    cells = [
        [row[0], f"{point['threshold']:g}", row[1], row[2], row[4], row[9]]
        for point in results["sweep"]["points"]
        for row in rows({point["mode"]: point})
    ]
    return markdown_table(heading, cells)


def category_table(results: dict[str, Any]) -> list[str]:
    """Markdown table of tokens per target forward and speed-up, per category and mode."""
    names = [name for name in results["modes"] if name not in ("target", "draft")]
    cells = [
        [category, str(part["n"])]
        + [
            f"{part['modes'][name]['acceptance_length']:.2f} ({format_times(part['modes'][name]['speedup'])})"
            for name in names
        ]
        for category, part in results["categories"].items()
    ]
    return markdown_table(("category", "prompts", *(f"`{name}`" for name in names)), cells)


def acceptance_note(results: dict[str, Any]) -> str:
    """Compare the share of the draft accepted by validity with its token-exact share; "" if unknown."""
    acceptance = results["acceptance"]
    if not acceptance or acceptance["token_exact"] is None:
        return ""
    return (
        f"Share of the draft accepted by validity: {format_percent(acceptance['semantic'])} %; share before the first "
        f"token that differs from the target's greedy choice: {format_percent(acceptance['token_exact'])} %."
    )


def machine(environment: dict[str, Any]) -> str:
    """Describe the hardware: GPU or CPU, cores and threads."""
    name = environment.get("gpu") or environment["cpu"]
    counts = [f"{environment[f'{part}s']} {part}{'s' * (environment[f'{part}s'] != 1)}" for part in ("core", "thread")]
    return ", ".join([name, *counts])


def _environment(environment: dict[str, Any]) -> list[str]:
    lines = [
        f"`{environment['command']}`, {environment['date']}.",
        "",
        f"{machine(environment)}; {environment['device']}, "
        f"{environment['dtype']}; torch {environment['torch']}, transformers {environment['transformers']}.",
    ]
    for role in ("target", "draft"):
        model = environment.get(role)
        if model:
            lines.append(f"{role.capitalize()}: {model['name']}, {model['parameters'] / 1e6:.1f} M parameters.")
    lines.append(
        f"{_sampling(environment)}, at most {environment['max_new_tokens']} tokens, {environment['repeats']} run(s) "
        f"per problem and mode; threshold {_threshold(environment['chosen_threshold'])}, block tokens "
        f"{environment['block_tokens']}. "
        "Modes take turns on each problem, from empty caches, after a warm-up that does not count."
    )
    return lines


def _threshold(value: float | None) -> str:
    return str(value) if value is None or value <= 1 else describe_threshold(value)


def _notes(results: dict[str, Any]) -> list[str]:
    limit = f" Here it is {results['limit']['tokens_per_s']:.0f} tokens/s." if results["limit"] else ""
    lines = [
        "To target: difference in percentage points (without that mode: to target+draft, whose greedy answers in "
        "float32 are the target's own). Forwards: of the target, per answer; tokens each: tokens per forward. "
        "Brackets: 95 % intervals over problems (Wilson for shares, Newcombe for differences of them, a paired "
        "bootstrap for speed-ups). Speed-up: ratio of tokens per second, all tokens over all seconds, over the target "
        "alone; over lossless: over target+draft. Accepted: share of draft tokens that became part of the answer. "
        f"Limit: the draft model alone plus one target forward over prompt and draft.{limit}"
    ]
    note = acceptance_note(results)
    return [*lines, "", note] if note else lines


def markdown_table(heading: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(heading) - 1)
    return ["| " + " | ".join(row) + " |" for row in (heading, rule, *cells)]


def format_number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def format_percent(value: float | None, interval: Sequence[float] | None = None) -> str:
    return _figure(value, interval, ".1f", 100)


def format_points(value: float | None, interval: Sequence[float] | None) -> str:
    return _figure(value, interval, "+.1f", 100)


def format_times(value: float | None, interval: Sequence[float] | None = None) -> str:
    return _figure(value, interval, ".2f", 1, "×")


def _figure(value: float | None, interval: Sequence[float] | None, digits: str, scale: int, unit: str = "") -> str:
    if value is None:
        return ""
    around = f" [{scale * interval[0]:{digits}}, {scale * interval[1]:{digits}}]" if interval else ""
    return f"{scale * value:{digits}}{unit}{around}"
