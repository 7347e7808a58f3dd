"""Simulate calibrations with known risks, and measure how often the calibrated bound is violated.

`python -m tools.calibration_simulation [--rounds 1000] [--out docs/results/calibration-simulation.json]`

A latent difficulty of each problem decides under which settings the problem is lost, so losses of neighbouring
settings are correlated, as with thresholds. The second part counts drafts instead of problems. The drafts of one
problem are lost together, so a test that assumes independent drafts claims a bound too often. The third part is
`--loss accuracy`: losses are -1, 0 and 1, the easiest problems are won, and the mean loss has the same shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from parse_infer.calibration.risk import n_passing
from parse_infer.files import write_json
from parse_infer.models.environment import describe_run

Floats = NDArray[np.float64]
SETTINGS = 40
RISK, LEVEL = 0.05, 0.1
# True risks, from the strictest setting to the most permissive.
SHAPES: dict[str, Floats] = {
    "rises evenly to 20 %": np.linspace(0, 0.2, SETTINGS),
    "jumps from 0 to 30 %": np.repeat([0.0, 0.3], SETTINGS // 2),
    "rests just above the promise": np.concatenate([np.linspace(0, 0.05, 5), np.full(SETTINGS - 5, 0.0501)]),
    "rises and falls again": np.concatenate([np.linspace(0, 0.08, 20), np.linspace(0.08, 0.02, 20)]),
}
SIZES = (100, 300, 1000, 2000)
DRAFTS = 4  # drafts per problem in the second part
WINS = 0.1  # share of the problems that every setting wins in the third part, with as many more losses


def broken_share(rates: Floats, n: int, rounds: int, seed: int, drafts: int = 1, wins: float = 0.0) -> float:
    """Return the share of calibrations on `n` problems that certify `RISK` for a setting with a higher true risk.

    Args:
        rates: true risks of the settings, which are means of losses minus wins.
        drafts: drafts per problem, which are lost together but count as independent.
        wins: share of the problems with a loss of -1; 0: losses are 0 or 1.
    """
    rng = np.random.default_rng(seed)
    broken = 0
    for _ in range(rounds):
        luck = rng.random(n).repeat(drafts)
        won = luck >= 1 - wins
        losses = ((luck < rate + wins).astype(float) - won for rate in rates)
        passed = n_passing(losses, RISK, LEVEL, binary=wins == 0)
        broken += bool((rates[:passed] > RISK).any())
    return broken / rounds


def simulate(rounds: int, seed: int = 0) -> dict[str, Any]:
    """Return `{"environment", "rows": [{shape, problems, by_problem, by_draft, accuracy}]}`.

    The last three are shares of violated bounds.
    """
    cases = [(shape, n) for shape in SHAPES for n in SIZES]
    rows = []
    for shape, n in track(cases, "simulate", transient=True):
        row = {"shape": shape, "problems": n}
        row["by_problem"] = broken_share(SHAPES[shape], n, rounds, seed)
        row["by_draft"] = broken_share(SHAPES[shape], n, rounds, seed, DRAFTS)
        row["accuracy"] = broken_share(SHAPES[shape], n, rounds, seed, wins=WINS)
        rows.append(row)
    settings = {"rounds": rounds, "risk": RISK, "confidence": 1 - LEVEL, "settings": SETTINGS}
    return {"environment": settings | {"drafts": DRAFTS, "wins": WINS}, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="calibrations per case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/calibration-simulation.json", help="result file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; it must be at least 1")
    result = simulate(arguments.rounds, arguments.seed)
    given = sys.argv[1:] if argv is None else list(argv)
    result["environment"] |= describe_run(["python", "-m", "tools.calibration_simulation", *given])
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, result)
    for row in result["rows"]:
        shares = "".join(f"{row[part]:>8.3f}" for part in ("by_problem", "by_draft", "accuracy"))
        print(f"{row['shape']:<30}{row['problems']:>6}{shares}")
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
