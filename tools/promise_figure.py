"""Figure of a calibration cross-validated on random halves: realised loss and speed-up of each risk promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parse_infer.evaluation.figure import plot

_COLOURS = ("#1b7837", "#b2611d", "#2166ac")


def block_tokens(row: dict[str, Any]) -> str:
    """The length of blocks of a row; files from before there were blocks name what followed a rejection."""
    return str(row.get("block_tokens") or row["resume"])


def draw_promises(results: dict[str, Any], path: Path) -> None:
    """Write a PNG: realised loss against the promised risk (bars: middle 90 % of the halves), and the speed-up."""
    rows = results["rows"]
    largest = 100 * max(row["risk"] for row in rows)
    with plot(path, results, columns=2) as (left, right):
        left.plot([0, largest], [0, largest], "--", color="#777777", linewidth=1, label="as promised")
        lengths = list(dict.fromkeys(block_tokens(row) for row in rows if row["shown"] > 0))
        for number, (length, colour) in enumerate(zip(lengths, _COLOURS, strict=False)):
            own = [row for row in rows if block_tokens(row) == length and row["shown"] > 0]
            risks = [100 * row["risk"] for row in own]
            beside = [risk * (1 + 0.04 * number) for risk in risks]  # offset, so that bars do not overlap
            lost = [100 * row["lost"] for row in own]
            ends = [[100 * end for end in row["lost_range"]] for row in own]  # rare losses: a mean beyond the range
            reach = [[max(0.0, x - low) for x, (low, _) in zip(lost, ends, strict=True)]]
            reach.append([max(0.0, high - x) for x, (_, high) in zip(lost, ends, strict=True)])
            left.errorbar(beside, lost, yerr=reach, fmt="o-", color=colour, linewidth=1.2, markersize=5, capsize=3)
            label = f"blocks: {length}"
            right.plot(risks, [row["speedup"] for row in own], "o-", color=colour, linewidth=1.2, label=label)
        left.set_ylabel("lost on other problems, %")
        right.set_ylabel("speed-up over the target alone")
        right.axhline(1, color="#777777", linewidth=1, linestyle=":")
        for axes in (left, right):
            axes.set_xlabel("promise: at most lost, %")
            axes.set_xlim(left=0)
