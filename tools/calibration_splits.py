"""Cross-validate a finished calibration on random halves of its problems.

`python -m tools.calibration_splits runs/calibration [--splits 50] [--out FILE]`

In each split, one half chooses the setting for every risk, and the other half measures its losses and speed-up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from parse_infer.calibration.calibration_file import FILE, load_calibrations
from parse_infer.calibration.measure import certify, speedup
from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.schema import Calibration
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.files import read_json, read_jsonl, write_json
from parse_infer.models.environment import describe_run
from parse_infer.settings.sampling import Sampling


def read_outcomes(folder: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Read configuration and records from a calibration folder; raise FileNotFoundError or ValueError if missing."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no calibration: run `parse-infer calibrate --out {folder}` first")
    config = read_json(path, "run `parse-infer calibrate` again")
    if not {"blocks", "loss", "max_new_tokens"} <= config.keys():
        raise ValueError(f"{folder} is no folder of parse-infer calibrate: {path} has no blocks and loss")
    names = [f.name for f in fields(Outcome)]
    needed = tuple(f.name for f in fields(Outcome) if f.default is MISSING and f.default_factory is MISSING)
    rows = [{key: row[key] for key in names if key in row} for _, row in read_jsonl(folder / "records.jsonl", needed)]
    return config, [Outcome(**row) for row in rows]


def split(
    config: dict[str, Any], outcomes: Sequence[Outcome], settings: CalibrationSettings, n: int
) -> dict[str, Any]:
    """Return `{"environment", "rows": [{block_tokens, risk, shown, lost, lost_range, above, speedup}]}`.

    - shown: share of the splits with a certified setting for the risk;
    - lost, lost_range: mean share of lost problems in the other half, and its middle 90 % over the splits;
    - above: share of the splits that lose more than the risk (sampling noise exceeds a valid bound in some splits);
    - speedup: mean speed-up in the other half; 1 without a certified setting, as the target then answers alone.
    """
    order = {length: i for i, length in enumerate(config["blocks"])}
    rng = np.random.default_rng(0)
    timed = [k for k, outcome in enumerate(outcomes) if outcome.target_seconds is not None]
    others = [k for k, outcome in enumerate(outcomes) if outcome.target_seconds is None]
    halves = []
    for _ in range(n):  # each half gets half of the timed problems
        parts = [np.array_split(rng.permutation(np.array(some, dtype=int)), 2) for some in (timed, others)]
        halves.append([np.concatenate(half) for half in zip(*parts, strict=True)])
    rows = []
    for length, i in order.items():
        own = [
            replace(o, losses=[o.losses[i]], disagreed=[o.disagreed[i]], seconds=o.seconds[i : i + 1])
            for o in outcomes
        ]
        one = replace(settings, blocks=(length,), max_new_tokens=config["max_new_tokens"])
        found = [certify(_blank(one), [own[k] for k in first], one) for first, _ in halves]
        for risk in one.risks:
            places = [calibration.promises[risk] for calibration in found]
            lost, speed = [], []
            for place, (_, second) in zip(places, halves, strict=True):
                test = [own[k] for k in second]
                lost.append(0.0 if place is None else float(np.mean([o.losses[0][place] for o in test])))
                speed.append(1.0 if place is None else speedup(test, 0, place))
            rows.append(
                {
                    "block_tokens": length,
                    "risk": risk,
                    "shown": float(np.mean([place is not None for place in places])),
                    "lost": float(np.mean(lost)),
                    "lost_range": [float(x) for x in np.quantile(lost, [0.05, 0.95])],
                    "above": float(np.mean(np.array(lost) > risk)),
                    "speedup": float(np.mean(speed)),
                }
            )
    environment = {**config, "splits": n, "confidence": settings.confidence, "n_problems": len(outcomes)}
    return {"environment": environment, "rows": rows}


def _tried(folder: Path, settings: CalibrationSettings) -> tuple[float, ...]:
    """The thresholds of a calibration that has ended; of another, the default ones."""
    if not (folder / FILE).is_file():
        return ()
    points = [tried.setting for tried in load_calibrations(folder / FILE)[0].tried]
    return tuple(point.threshold for point in points if point.block_tokens == settings.blocks[0])


def _blank(settings: CalibrationSettings) -> Calibration:
    return Calibration("", 0, "", settings.loss, settings.confidence, settings.max_new_tokens, {}, [], {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--out of parse-infer calibrate")
    parser.add_argument("--splits", type=int, default=50)
    parser.add_argument("--risk", default="0.01,0.02,0.05,0.1", help="risks to test")
    parser.add_argument("--confidence", type=float, default=0.9)
    parser.add_argument("--out", help="result file; default: splits.json in the folder")
    arguments = parser.parse_args(argv)
    try:
        if arguments.splits < 1:
            raise ValueError(f"--splits is {arguments.splits}; it must be at least 1")
        config, outcomes = read_outcomes(arguments.folder)
        try:
            risks = tuple(float(part) for part in arguments.risk.split(","))
        except ValueError:
            raise ValueError(f"--risk is {arguments.risk!r}; give numbers such as 0.05,0.1") from None
        settings = CalibrationSettings(risks, arguments.confidence, config["loss"], tuple(config["blocks"]))
        settings = replace(settings, thresholds=_tried(arguments.folder, settings))
        if "sampling" in config:
            settings = replace(settings, sampling=Sampling(**config["sampling"]), samples=config["samples"])
        if outcomes and len(outcomes[0].losses[0]) != len(settings.orders[0]):
            raise ValueError(f"{arguments.folder} tried other thresholds, and has no {FILE}: let the calibration end")
        result = split(config, outcomes, settings, arguments.splits)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given = sys.argv[1:] if argv is None else list(argv)
    result["environment"] |= describe_run(["python", "-m", "tools.calibration_splits", *given])
    out = Path(arguments.out or arguments.folder / "splits.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    for row in result["rows"]:
        print(json.dumps(row))
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
