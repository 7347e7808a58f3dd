"""Figure of a benchmark: speed-up against accuracy over thresholds, with the chosen threshold marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parse_infer.evaluation.results_file import digest
from parse_infer.files import atomic_write

ORIGIN = "Results"  # PNG text key of the digest of the shown results
CURVES = {
    "parse": ("PARSE, trained judge", "#1b7837"),
    "parse-min-p": ("PARSE without training, min-p", "#5aae61"),
    "parse-zero-shot": ("PARSE, zero-shot judge", "#b2611d"),
}
_OTHERS = ("#2166ac", "#d6604d", "#8073ac", "#35978f")  # colours of other modes, in turn
POINTS = {
    "target": ("target alone", "o", "#222222"),
    "draft": ("draft model alone", "s", "#777777"),
    "sequential": ("sequential verification", "D", "#2166ac"),
    "target+draft": ("target + draft model, lossless", "p", "#c51b7d"),
    "assisted": ("assisted generation", "^", "#7b3294"),
    "transformers": ("target, transformers' loop", "v", "#999999"),
}


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Write a PNG. All points use the same problems: those of the sweep if there is one, else all.

    Without mode "target", speed is in tokens per second.
    """
    sweep = results["sweep"]
    modes = sweep["modes"] if sweep else results["modes"]
    n = sweep["problems"] if sweep else results["environment"]["problems"]
    speed = "speedup" if "target" in modes else "tokens_per_s"
    with plot(path, results) as (axes,):
        swept = sweep["points"] if sweep else []
        curves = _curves([*modes, *(p["mode"] for p in swept)])
        for name, (label, colour) in curves.items():
            points = [p for p in swept if p["mode"] == name]
            _curve(axes, points, speed, label, colour)
            if name in modes:
                chosen = name == "parse"
                threshold = results["environment"].get("chosen_threshold") if chosen else None
                suffix = "" if threshold is None else f", chosen threshold {threshold:.3g}"
                _point(axes, modes[name], speed, label + suffix, "*" if chosen else "P", colour, 15 if chosen else 8)
        colours = itertools.cycle(_OTHERS)
        for name in modes:
            kind, _, sizes = name.partition(":")
            if kind in POINTS:
                label, marker, colour = POINTS[kind]
                own = f", {sizes.replace(':', ', ').replace('=', ' ')}" if sizes else ""
                _point(axes, modes[name], speed, label + own, marker, colour, 7)
            elif name not in curves:
                _point(axes, modes[name], speed, name, "X", next(colours), 7)
        what = "right answers, %" if results["environment"].get("scored", True) else "same answers as the target, %"
        if any(figures["accuracy"] is None for figures in modes.values()):
            what = "tokens per target forward"
        axes.set_xlabel(f"{what} (bars: 95 % interval; {n} problems)")
        axes.set_ylabel("speed-up over the target alone (tokens/s)" if speed == "speedup" else "tokens/s")
        axes.margins(x=0.08)


@contextmanager
def plot(path: Path, results: dict[str, Any], columns: int = 1) -> Iterator[list[Axes]]:
    """Yield axes side by side, then give them the common style and one legend, and write them as a PNG.

    The file's metadata holds the digest of the results.
    """
    figure = Figure(figsize=(7.2, 4.8) if columns == 1 else (8.4, 4.0), dpi=150, layout="constrained")
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    yield panels
    for axes in panels:  # y axis from zero, a faint grid, no frame
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=columns + 1, fontsize=8, frameon=False)
    with atomic_write(path) as beside:
        figure.savefig(beside, format="png", metadata={ORIGIN: digest(results)})


def _curves(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Label and colour of each kind of PARSE that accepts or rejects by a judge."""
    others = [name for name in dict.fromkeys(names) if name.startswith("parse-") and name not in CURVES]
    return CURVES | {
        name: (f"PARSE without training, {name.removeprefix('parse-').replace(':', ', ')}", colour)
        for name, colour in zip(others, itertools.cycle(_OTHERS), strict=False)
    }


def _curve(axes: Axes, points: list[dict[str, Any]], speed: str, label: str, colour: str) -> None:
    """Plot the thresholds as a line; points that nearly coincide share a label."""
    if not points:
        return
    xs, ys = [_x(p) for p in points], [p[speed] for p in points]
    axes.plot(xs, ys, "-", color=colour, linewidth=1.2, marker=".", markersize=6, label=f"{label}: thresholds")
    width, height = (max(xs) - min(xs)) or 1.0, max(ys)
    labelled: list[tuple[float, float]] = []
    for point, x, y in zip(points, xs, ys, strict=True):
        if all(abs(x - a) > 0.05 * width or abs(y - b) > 0.04 * height for a, b in labelled):
            text = f"{point['threshold']:g}"
            axes.annotate(text, (x, y), (5, 4), textcoords="offset points", fontsize=7, color=colour)
            labelled.append((x, y))


def _point(axes: Axes, figures: dict[str, Any], speed: str, label: str, marker: str, colour: str, size: float) -> None:
    x, y = _x(figures), figures[speed]
    if figures["accuracy_ci"] is not None:
        low, high = figures["accuracy_ci"]
        axes.plot([100 * low, 100 * high], [y, y], "-", color=colour, linewidth=0.8, alpha=0.35)
    if figures["speedup_ci"] is not None and speed == "speedup":
        axes.plot([x, x], list(figures["speedup_ci"]), "-", color=colour, linewidth=0.8, alpha=0.35)
    axes.plot([x], [y], marker, color=colour, markersize=size, markeredgecolor="white", label=label, zorder=3)


def _x(figures: dict[str, Any]) -> float:
    """Right answers in percent; of answers that were not checked, the tokens per target forward."""
    shown = figures["acceptance_length"] if figures["accuracy"] is None else 100 * figures["accuracy"]
    return float(shown)
