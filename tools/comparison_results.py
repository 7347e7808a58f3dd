"""Results of a comparison of rules: accuracy lost and speed of every operating point, as JSON, table and figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.schema import LOSSES, Calibration
from parse_infer.evaluation.figure import plot
from parse_infer.evaluation.statistics import (
    difference_interval,
    ratio_intervals,
    share_interval,
)
from parse_infer.settings.acceptance import describe_threshold

_HEADER = ("rule", "promise, %", "threshold", "block tokens", "lost here", "over lossless", "over the target alone")
_POINTS = (
    "rule",
    "threshold",
    "lost here",
    "tokens",
    "the target's own, %",
    "tokens per forward",
    "over lossless",
    "over the target alone",
)
_COLOURS = ("#1b7837", "#b2611d", "#2166ac", "#d6604d", "#8073ac", "#35978f", "#c51b7d", "#666666")
_MARKERS = "os^vDPX*"


def summarise(outcomes: Sequence[Outcome], calibration: Calibration) -> dict[str, Any]:
    """The operating points of one calibration, each with 95 % intervals over problems.

    - lost: mean loss;
    - speed, if answers were timed: mean time of lossless speculation over mean time of this point, in the same run on
      the same problems. Lossless is the fastest point whose threshold accepts nothing;
    - speedup, likewise: mean time of the target alone over mean time of this point;
    - pace: mean tokens per forward of the target, if the records have them.

    `target_right` is the share of right samples of the target alone; None: the checker cannot decide.
    """
    settings = [tried.setting for tried in calibration.tried]
    losses = np.array([list(itertools.chain(*outcome.losses)) for outcome in outcomes], dtype=np.float64)
    timed = [outcome for outcome in outcomes if outcome.target_seconds is not None]
    points = [
        {**asdict(setting), "lost": float(lost.mean()), "lost_ci": interval}
        for setting, lost, interval in zip(settings, losses.T, _loss_intervals(losses, calibration.loss), strict=True)
    ]
    fastest = None
    if timed:
        seconds = np.array([list(itertools.chain(*outcome.seconds)) for outcome in timed], dtype=np.float64)
        lossless = [i for i, setting in enumerate(settings) if setting.threshold > 1]
        fastest = min(lossless, key=lambda i: seconds[:, i].sum())
        alone = np.array([[outcome.target_seconds] for outcome in timed], dtype=np.float64)
        for name, theirs in (("speed", seconds[:, [fastest]]), ("speedup", alone)):
            values, intervals = theirs.sum(0) / seconds.sum(0), ratio_intervals(theirs, seconds).tolist()
            for point, value, interval in zip(points, values.tolist(), intervals, strict=True):
                point |= {name: value, f"{name}_ci": interval}
        if all(outcome.tokens_per_forward for outcome in timed):
            paces = np.array([list(itertools.chain(*outcome.tokens_per_forward)) for outcome in timed])
            for point, pace in zip(points, paces.mean(0).tolist(), strict=True):
                point["pace"] = pace
    shares = [outcome.target_right for outcome in outcomes if outcome.target_right is not None]
    decided = len(shares) == len(outcomes)
    return {
        "problems": len(outcomes),
        "timed": len(timed),
        "target_right": float(np.mean(shares)) if decided else None,
        "target_right_ci": list(share_interval(shares, calibration.samples)) if decided else None,
        "loss": calibration.loss,
        "confidence": calibration.confidence,
        "models": calibration.models,
        "lossless": fastest,
        "promises": {str(risk): place for risk, place in calibration.promises.items()},
        "points": points,
    }


def _loss_intervals(losses: NDArray[np.float64], loss: str) -> list[list[float]]:
    """Intervals of the mean losses [n, m]: of shares of answers, of answers lost minus answers won (loss "accuracy"),
    or of means over samples."""
    drawn = ratio_intervals(losses, np.ones_like(losses)).tolist()
    intervals = []
    for lost, interval in zip(losses.T, drawn, strict=True):
        if np.isin(lost, (-1.0, 0.0, 1.0)).all():
            won = (-lost).clip(min=0)
            whole = difference_interval(lost.clip(min=0), won) if loss == "accuracy" else share_interval(lost)
            interval = list(whole or interval)
        intervals.append(interval)
    return intervals


def markdown(results: dict[str, Any]) -> str:
    """The table of the promises, and what its columns mean."""
    paced = any("pace" in point for rule in results["rules"].values() for point in rule["points"])
    header = _in_units((*_HEADER[:-2], *(["tokens per forward"] if paced else []), *_HEADER[-2:]), results)
    rows = [header, tuple(["---"] * len(header))]
    for name, rule in results["rules"].items():
        for risk, place in rule["promises"].items():
            cells = ["not proven", *["-"] * (len(header) - 3)]
            if place is not None:
                point = rule["points"][place]
                cells = _cells(point)
                cells[3:3] = [_pace(point)] if paced else []
            rows.append((label(name, rule), f"{100 * float(risk):g}", *cells))
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *_notes(results), ""])


def markdown_of_points(results: dict[str, Any]) -> str:
    """The table of all operating points, for rules with few of them."""
    rows = [_in_units(_POINTS, results), tuple(["---"] * len(_POINTS))]
    for name, rule in results["rules"].items():
        for point in rule["points"]:
            threshold, _, lost, *times = _cells(point)
            sizes = ["-", "-"]
            if "tokens" in point:
                sizes = [f"{point['tokens']:.0f}", f"{100 * point['written'] / point['tokens']:.1f}"]
            rows.append((label(name, rule), threshold, lost, *sizes, _pace(point), *times))
    meant = "Tokens are those of an answer. The target's own are those that it wrote in place of a draft token."
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *_notes(results), meant, ""])


def _in_units(header: Sequence[str], results: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}, {_unit(results)}" if name == "lost here" else name for name in header)


def _unit(results: dict[str, Any]) -> str:
    """Of a loss: points of accuracy, where wins count too, else percent of the requests."""
    return "points" if {rule["loss"] for rule in results["rules"].values()} == {"accuracy"} else "%"


def _notes(results: dict[str, Any]) -> list[str]:
    rules = results["rules"].values()
    sizes = sorted({f"{rule['problems']} problems, {rule['timed']} timed" for rule in rules})
    losses = sorted({f"{rule['loss']} ({LOSSES.get(rule['loss'], rule['loss'])})" for rule in rules})
    notes = [
        f"{'; '.join(sizes)}. Loss: {'; '.join(losses)}. Brackets: 95 % intervals over problems. A promise holds for "
        "new problems, with the confidence of its calibration. Over lossless: the time of lossless speculation with "
        "the same models in the same run, over the time of the rule.",
        f"Right answers of the target alone, at 1.00× by definition: {_target_alone(results)}.",
    ]
    if joint := {name: rule for name, rule in results["rules"].items() if "written" in rule["points"][0]}:
        rounded = any(rule["models"]["dtype"] != "float32" for rule in joint.values())
        nothing = (
            "the target compared with itself, by construction: its loss of 0 is no measurement of lossless sampling"
        )
        if rounded:
            nothing = "the target beside other answers, and rounding in 16 bits makes it differ from the target alone"
        names = ", ".join(label(name, rule) for name, rule in joint.items())
        notes.append(f"Answers of {names} were decoded jointly. There 'accepts nothing' is {nothing}.")
    machines = machines_of(results)
    if len(machines) > 1:
        places = "; ".join(f"{', '.join(names)}: {machine}" for machine, names in machines.items())
        notes.append(
            f"The rules were timed on different machines, each beside its own lossless speculation ({places})."
        )
    return notes


def _target_alone(results: dict[str, Any]) -> str:
    """Its accuracies, with the rules that were measured beside each. Older results have none."""
    names: dict[str, list[str]] = {}
    for name, rule in results["rules"].items():
        right, interval = rule.get("target_right"), rule.get("target_right_ci")
        shown = "not recorded" if right is None else f"{100 * right:.1f} % [{_percents(interval)}]"
        names.setdefault(shown, []).append(label(name, rule))
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{shown} ({', '.join(rules)})" for shown, rules in names.items())


def machines_of(results: dict[str, Any]) -> dict[str, list[str]]:
    """The rules by the machine that timed them."""
    machines: dict[str, list[str]] = {}
    for name, rule in results["rules"].items():
        own = rule["machine"] or {"cpu": "another machine", "threads": None}
        shown = f"{own['cpu']}, {own['threads']} thread{'' if own['threads'] == 1 else 's'}"
        shown += f", {own['gpu']}" if own.get("gpu") else ""
        machines.setdefault(shown, []).append(label(name, rule))
    return machines


def _cells(point: dict[str, Any]) -> list[str]:
    return [
        describe_threshold(point["threshold"]),
        str(point["block_tokens"]),
        f"{100 * point['lost']:.1f} [{_percents(point['lost_ci'])}]",
        *(_times(point, name) if name in point else "-" for name in ("speed", "speedup")),
    ]


def _percents(interval: Sequence[float]) -> str:
    return ", ".join(f"{100 * end:.1f}" for end in interval)


def _pace(point: dict[str, Any]) -> str:
    return f"{point['pace']:.1f}" if "pace" in point else "-"


def _times(point: dict[str, Any], name: str) -> str:
    low, high = point[f"{name}_ci"]
    return f"{point[name]:.2f}× [{low:.2f}, {high:.2f}]"


def label(name: str, rule: dict[str, Any]) -> str:
    return str(rule["options"].get("label", name))


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG of the points of every rule that was timed, if any. Its background is opaque, for dark pages too.

    A line has one length of blocks. Bars are the intervals of the promised points. The axis of the loss ends at twice
    the largest promise, or sooner.
    """
    shown = {name: rule for name, rule in results["rules"].items() if rule["timed"]}
    if not shown:
        return
    with plot(path, results) as (axes,):
        styles = itertools.cycle(zip(_COLOURS, _MARKERS, strict=True))
        for name, rule in shown.items():
            lengths = dict.fromkeys(point["block_tokens"] for point in rule["points"])
            promised = set(rule["promises"].values())
            for length in lengths:
                colour, marker = next(styles)
                own = [point for point in rule["points"] if point["block_tokens"] == length]
                label_ = label(name, rule) + (f", blocks {length}" if len(lengths) > 1 else "")
                xs, ys = [100 * point["lost"] for point in own], [point["speed"] for point in own]
                axes.plot(xs, ys, "-", color=colour, marker=marker, markersize=4, linewidth=1.2, label=label_)
                for point in (point for i, point in enumerate(rule["points"]) if i in promised and point in own):
                    x, y = 100 * point["lost"], point["speed"]
                    low, high = point["lost_ci"]
                    axes.plot([100 * low, 100 * high], [y, y], "-", color=colour, linewidth=0.8, alpha=0.5)
                    axes.plot([x, x], point["speed_ci"], "-", color=colour, linewidth=0.8, alpha=0.5)
        risks = [float(risk) for rule in results["rules"].values() for risk in rule["promises"]]
        axes.axhline(1, color="#777777", linewidth=1, linestyle=":")
        axes.axvline(0, color="#777777", linewidth=1, linestyle=":")
        axes.set_xlim(right=min(axes.get_xlim()[1], 200 * max(risks)))
        lost = "accuracy lost, points" if _unit(results) == "points" else "lost, % of problems"
        sampled = all(rule["options"].get("sampling") for rule in results["rules"].values())
        axes.set_xlabel(f"{lost} (bars: 95 % intervals of the promised points)")
        axes.set_ylabel(f"speed over lossless {'sampling' if sampled else 'speculation'}")
