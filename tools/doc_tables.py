"""Tables of results for the documentation, which `tools.render_docs` inserts.

For a benchmark (`parse-infer bench`):

- headline: one row per results file, so that every pair stands beside the others;
- tokens: one row per mode with the figures of token-level drafters;
- modes: all figures, as in `results.md`;
- categories: tokens per target forward by category of prompt;
- thresholds: accuracy and speed-up by threshold of the sweep.

For a benchmark with several clients (`parse-infer bench --backend vllm`):

- clients: one row per mode and number of clients.

For a comparison of judges (`tools.judge_ladder`):

- ladder: one row per rung, and the differences to the first; a second table has the decisions at strict thresholds.

For a comparison of rules (`tools.comparison`):

- rules: one row per rule and promise;
- points: one row per rule and operating point.

For calibrations:

- simulation: share of violated bounds by shape of the risk and number of problems (`tools.calibration_simulation`);
- splits: losses and speed-up on other problems, by risk (`tools.calibration_splits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parse_infer.errors import ParseError
from parse_infer.evaluation.tables import (
    category_table,
    format_number,
    format_percent,
    format_points,
    format_times,
    header,
    machine,
    markdown_table,
    rows,
    threshold_table,
)
from parse_infer.files import read_json
from parse_infer.suggest import suggestion
from tools.comparison_results import machines_of, markdown, markdown_of_points
from tools.ladder_figures import few_errors
from tools.promise_figure import block_tokens

_ABOUT = {
    "qwen-coder-3850": "Qwen2.5-Coder 1.5B and 0.5B, untuned: [GSM8K](docs/results/qwen-coder.md#gsm8k), own judge",
    "qwen-coder-humaneval": "the same, transferred judge, which accepts nothing by default: HumanEval",
    "qwen-coder-mt-bench": "the same: MT-Bench",
    "spec-bench-qwen-coder": "the same: Spec-Bench",
    "smollm2": "SmolLM2-135M and 5 M, tuned: [word problems](docs/results/smollm2.md)",
    "smollm2-h200": "the same on an [NVIDIA H200](docs/results/gpu.md)",
    "embedded": "12 M and 2 M, trained here: [word problems](docs/results/embedded.md)",
}
_HEADLINE = (
    "models, problems",
    "target right, %",
    "draft model right, %",
    "PARSE right, against the target, points",
    "draft model alone",
    "lossless speculation",
    "**PARSE**",
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
_SIMULATION = (
    "true risk, from strict to lax",
    "problems",
    "broken, %",
    "broken if drafts were counted, %",
    "of accuracy: broken, %",
)
_SPLITS = ("promise, %", "blocks", "promised by, %", "lost on the others, %", "more than promised, %", "speed-up")
_CLIENTS = (
    "mode",
    "clients",
    "right, %",
    "tokens/s",
    "answers/s",
    "median first text, s",
    "median answer, s",
    "99th percentile, s",
)
_LADDER = {
    "auroc": "AUROC, prefixes",
    "ap_error": "AP of errors, prefixes",
    "auroc_draft": "AUROC, drafts",
    "ap_error_draft": "AP of errors, drafts",
}
_DECISIONS = {
    "behind_at": "right tokens behind a rejection, %, at {} % missed errors",
    "corrections_at": "corrections per 100 right tokens, at {} % missed errors",
    "kept_at_lost": "draft tokens kept, %, at {} % of requests lost",
}


def table(paths: Sequence[Path], kind: str) -> list[str]:
    """Render result files as lines of Markdown; the last line states the origin of the table.

    Args:
        paths: several for `headline`, else one.

    Raises:
        FileNotFoundError, ValueError: no such file or kind of table, or a file with other results.
    """
    if kind == "headline":
        return [*_headline(paths), "", "Brackets: 95 % intervals."]
    if len(paths) > 1:
        raise ValueError(f"table={kind} shows one file: write one block for each")
    (path,) = paths
    if kind == "clients":
        results = read_results(path, needed=("about", "cells"))
        return [*_clients(results["cells"]), "", _origin_of_clients(results["about"])]
    if kind == "ladder":
        results = read_results(path, needed=("environment", "rungs", "wrong_drafts", "auroc_of_length"))
        return [*_ladder(results), "", _origin_of_ladder(results)]
    if kind in ("rules", "points"):
        results = read_results(path, needed=("environment", "rules"))
        shown = markdown(results) if kind == "rules" else markdown_of_points(results)
        return [*shown.rstrip().split("\n"), "", _origin_of_rules(results)]
    if kind == "simulation":
        results = read_results(path, needed=("environment", "rows"))
        return [*_simulation(results["rows"]), "", _origin_of_simulation(results["environment"])]
    if kind == "splits":
        results = read_results(path, needed=("environment", "rows"))
        return [*_splits(results["rows"]), "", _origin_of_splits(results["environment"])]
    if kind not in _KINDS:
        known = [*_KINDS, "headline", "clients", "ladder", "points", "rules", "simulation", "splits"]
        raise ValueError(f"unknown table {kind!r}; {suggestion(kind, known)}")
    results = read_results(path)
    return [*_KINDS[kind](results), "", _origin(results["environment"])]


FEWEST = 100  # problems; fewer prove nothing about accuracy, so the README shows their speeds only


def _headline(paths: Sequence[Path]) -> list[str]:
    """Render one row per results file."""
    cells = []
    for path in paths:
        results = read_results(path)
        environment = results["environment"]
        scored = environment.get("scored", True) and environment["problems"] >= FEWEST
        target, draft, lossless, parse = (
            results["modes"].get(m) for m in ("target", "draft", "target+draft", "parse")
        )
        cells.append(
            [
                f"{_ABOUT.get(path.stem, environment['task'])}, {environment['problems']}",
                *(format_percent(m["accuracy"]) if m and scored else "" for m in (target, draft)),
                format_points(parse["accuracy_diff"], parse["accuracy_diff_ci"]) if scored else "",
                *(format_times(m["speedup"], m["speedup_ci"]) if m else "" for m in (draft, lossless, parse)),
            ]
        )
    return markdown_table(_HEADLINE, cells)


def _tokens(results: dict[str, Any]) -> list[str]:
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
        for name, m in results["modes"].items()
    ]
    return markdown_table(_TOKENS, cells)


def _modes(results: dict[str, Any]) -> list[str]:
    return markdown_table(header(results["environment"]), rows(results["modes"]))


def _categories(results: dict[str, Any]) -> list[str]:
    if not results.get("categories"):
        raise ValueError("table=categories: the prompts of these results have no category")
    return category_table(results)


def _clients(cells: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            f"`{cell['mode']}`",
            str(cell["clients"]),
            format_percent(cell["accuracy"]),
            format_number(cell["tokens_per_s"], 0),
            format_times(cell["speedup"], cell.get("speedup_range")),
            *(format_number(cell[figure], 1) for figure in ("first_p50_s", "p50_s", "p99_s")),
        ]
        for cell in cells
    ]
    return markdown_table(_CLIENTS, rows)


def _origin_of_clients(about: dict[str, Any]) -> str:
    host, turns = about["coordinator"], about.get("turns", 1)
    brackets = f" Brackets: the lowest and the highest of {turns} turns." if turns > 1 else ""
    return (
        f"{about['n_problems']} problems of {about['task']}; {host['cpu']}, {host['cores']} cores, all on this one "
        f"machine; `{about['command']}`, {about['date'][:10]}. Answers/s: over the target alone with as many clients."
        f"{brackets}"
    )


def _simulation(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            row["shape"],
            str(row["problems"]),
            *(format_percent(row[part]) for part in ("by_problem", "by_draft", "accuracy")),
        ]
        for row in rows
    ]
    return markdown_table(_SIMULATION, cells)


def _origin_of_simulation(environment: dict[str, Any]) -> str:
    e = environment
    return (
        f"{e['rounds']} calibrations each, {e['settings']} settings, promise {100 * e['risk']:g} % at "
        f"{100 * e['confidence']:g} % confidence, {e['drafts']} drafts a problem. Of accuracy: every setting "
        f"wins {100 * e['wins']:g} % of the problems, and loses as many and the risk; `{e['command']}`, "
        f"{e['date'][:10]}."
    )


def _origin_of_rules(results: dict[str, Any]) -> str:
    first = next(iter(results["rules"].values()))
    options, made = first["options"], results["environment"]
    return (
        f"{options['task']}, {options['split']} split, seed {options['seed']}; {' and '.join(machines_of(results))}, "
        f"{first['models']['dtype']}; `{made['command']}`, "
        f"{made['date'][:10]}."
    )


def _splits(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            f"{100 * row['risk']:g}",
            f"`{block_tokens(row)}`",
            format_percent(row["shown"]),
            format_percent(row["lost"], row["lost_range"]),
            format_percent(row["above"]),
            format_times(row["speedup"]),
        ]
        for row in rows
    ]
    return markdown_table(_SPLITS, cells)


def _origin_of_splits(environment: dict[str, Any]) -> str:
    e = environment
    return (
        f"{e['n_problems']} problems of {e['task']}, {e['splits']} times in random halves: one promises at "
        f"{100 * e['confidence']:g} % confidence (as often as stated), the other is measured. Brackets: the middle "
        "90 % of the splits; 1.00×: nothing could be promised, and the target answers alone. "
        f"`{e['command']}`, {e['date'][:10]}."
    )


def _ladder(results: dict[str, Any]) -> list[str]:
    """Render ranking and decisions. Files of earlier versions have only a part of the figures."""
    rungs = results["rungs"]
    first = next(iter(rungs.values()))
    names = [f"{name} ({rung['seeds']} seeds)" if rung["seeds"] > 1 else name for name, rung in rungs.items()]

    def rows(figures: Sequence[str], scale: int, digits: int) -> list[list[str]]:
        cells = []
        for i, (name, rung) in enumerate(zip(names, rungs.values(), strict=True)):
            row = [name]
            for figure in figures:
                apart, low, high = (scale * each for each in rung["to_first"][figure])
                below = f"<br>{apart:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
                row.append(f"{scale * rung[figure]:.{digits}f}" + (below if i else ""))
            cells.append(row)
        return cells

    ranking, heading = rows([*_LADDER], 1, 3), ["judge", *_LADDER.values()]
    if "over_read" in first:
        heading += ["seconds per 100 tokens", "over a read alone"]
        costs = ("seconds_per_100_tokens", "over_read")
        for row, rung in zip(ranking, rungs.values(), strict=True):
            row += [format_number(rung.get(costs[0]), 3), format_times(rung[costs[1]]) if costs[1] in rung else ""]
    lines = markdown_table(heading, ranking)
    for kind, title in _DECISIONS.items():
        figures = [figure for figure in first if figure.startswith(kind)]
        if figures:
            shares = [f"{100 * float(figure.rpartition('_')[2]):g}" for figure in figures]
            heading = ["judge", title.format(shares[0]), *(f"at {share} %" for share in shares[1:])]
            scale, digits = (1, 2) if kind == "corrections_at" else (100, 1)
            lines += ["", *markdown_table(heading, rows(figures, scale, digits))]
    return lines


def _origin_of_ladder(results: dict[str, Any]) -> str:
    notes = [few_errors(results["wrong_drafts"])]
    if "best_rule" in results:
        notes.append(f"best rule, by the tokens kept at 2 % of requests lost: {results['best_rule']}")
    return (
        f"{results['drafts']:,} held-out drafts of {results['problems']:,} problems, {results['wrong_drafts']:,} with "
        f"an error; the length alone has an AUROC of {results['auroc_of_length']:.2f}. "
        f"{''.join(f'{note[0].upper()}{note[1:]}. ' for note in notes if note)}Below each figure: its "
        f"difference to the first row. {_measured(results['environment'])}"
    )


def _thresholds(results: dict[str, Any]) -> list[str]:
    if not results["sweep"]:
        raise ValueError("table=thresholds: these results have no sweep")
    return threshold_table(results)


_KINDS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "tokens": _tokens,
    "modes": _modes,
    "categories": _categories,
    "thresholds": _thresholds,
}


def _origin(environment: dict[str, Any]) -> str:
    return f"{environment['problems']} problems of {environment['task']}; {_measured(environment)}"


def _measured(environment: dict[str, Any]) -> str:
    date = environment["date"].partition("T")[0]
    where = f"{machine(environment)}, {environment['dtype']}"
    return f"{where}; `{environment['command']}`, {date}. Brackets: 95 % intervals."


def read_results(path: Path, needed: Sequence[str] = ("environment", "modes", "sweep")) -> dict[str, Any]:
    """Read the results of a benchmark, or other results with the `needed` keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a needed key is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run parse-infer bench, and keep its results.json there")
    results = read_json(path, "write it again with parse-infer bench")
    missing = [key for key in needed if key not in results]
    if missing:
        raise ParseError(f"{path} has no key {missing[0]!r}: give the results.json of parse-infer bench")
    return results
