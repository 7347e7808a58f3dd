"""Promises hold as often as they say: the tests of risks on losses whose true risk is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binom

from parse_infer.calibration.risk import least_problems, n_passing, p_value, upper_bound


@pytest.mark.parametrize("risk", [0.01, 0.1, 0.4])
def test_a_p_value_is_rarely_small_where_the_risk_is_above_the_promise(risk):
    """At the edge, where it is hardest: P(p <= level) <= level, for every level."""
    rng = np.random.default_rng(0)
    losses = (rng.random((4000, 150)) < risk).astype(float)
    values = np.array([p_value(row, risk, 0.1) for row in losses])
    for level in (0.05, 0.1, 0.3):
        assert (values <= level).mean() <= level + 0.01, level
    # And not for want of trying: the test uses what its steps allow.
    steps = binom.cdf(np.arange(150), 150, risk)
    assert (values <= 0.3).mean() == pytest.approx(steps[steps <= 0.3].max(initial=0.0), abs=0.03)


def test_bad_losses_are_named():
    for losses in ([], [0.5, 1.0], [-1]):
        with pytest.raises(ValueError, match="a non-empty list of 0 or 1"):
            p_value(losses, 0.1, 0.1)
    for losses in ([], [0.5, 1.5]):
        with pytest.raises(ValueError, match="a non-empty list of numbers from -1 to 1"):
            p_value(losses, 0.1, 0.1, binary=False)


def test_the_fewest_problems_that_show_a_risk():
    assert least_problems(0.01, 0.1) == 230
    for n, shown in ((229, False), (230, True)):
        assert (p_value([0] * n, 0.01, 0.1) <= 0.1) is shown
    assert least_problems(0.05, 0.1, binary=False) == 60, "of means over samples"
    for n, shown in ((59, False), (60, True)):
        assert (p_value([0.0] * n, 0.05, 0.1, binary=False) <= 0.1) is shown


def test_an_upper_bound_is_what_a_test_at_that_risk_just_passes():
    losses = [1.0] * 3 + [0.0] * 197
    bound = upper_bound(losses, 0.1)
    assert bound == pytest.approx(0.0330, abs=2e-4)  # Clopper-Pearson
    assert p_value(losses, bound + 1e-6, 0.1) <= 0.1 < p_value(losses, bound - 1e-6, 0.1)
    assert upper_bound([1.0, 1.0], 0.1) == 1.0


def differences(
    rng: np.random.Generator, shape: tuple[int, ...], wins: float, losses: float, k: int = 1
) -> np.ndarray:
    """Mean over k samples of 1 where the target alone is right and PARSE is not, -1 the other way round."""
    return rng.choice([-1.0, 0.0, 1.0], p=[wins, 1 - wins - losses, losses], size=(*shape, k)).mean(-1)


@pytest.mark.parametrize(("risk", "wins", "k"), [(0.02, 0.0, 1), (0.02, 0.03, 1), (0.05, 0.05, 4), (0.05, 0.25, 1)])
def test_a_bet_against_a_true_hypothesis_is_rarely_won(risk, wins, k):
    """At the edge, where the accuracy that is lost is just what was promised."""
    rows = differences(np.random.default_rng(1), (2000, 300), wins, wins + risk, k)
    for level in (0.05, 0.1):
        won = np.mean([p_value(row, risk, level, binary=False) <= level for row in rows])
        assert won <= level + 3 * (level * (1 - level) / 2000) ** 0.5, level
        assert won > level / 4, "a test that never rejects shows nothing"


def test_wins_pay_for_losses_and_many_problems_show_little_loss():
    rng = np.random.default_rng(2)
    rows = differences(rng, (200, 1000), 0.05, 0.05)
    shown = np.mean([p_value(row, 0.02, 0.1, binary=False) <= 0.1 for row in rows])
    assert shown > 0.5, "10 % of the answers change, as many for the better as for the worse: 2 points are shown"
    assert np.mean([p_value(np.abs(row), 0.02, 0.1) <= 0.1 for row in rows]) == 0, "but 5 % are lost"
    bounds = [upper_bound(row, 0.1, binary=False) for row in rows]
    assert np.mean(np.array(bounds) < 0) <= 0.1 and np.median(bounds) < 0.03
    bound = bounds[0]
    assert p_value(rows[0], bound, 0.1, binary=False) <= 0.1 < p_value(rows[0], bound - 1e-5, 0.1, binary=False)
    assert upper_bound([1.0, 1.0], 0.1, binary=False) == 1.0


def simulate(rates: np.ndarray, n: int, risk: float, level: float, rounds: int, seed: int) -> float:
    """Share of the calibrations whose laxest passing setting has a true risk above the promise. Losses of a problem
    are nested, as those of thresholds mostly are: one number decides about all of them."""
    rng = np.random.default_rng(seed)
    broken = 0
    for _ in range(rounds):
        luck = rng.random(n)
        passed = n_passing(((luck < rate).astype(float) for rate in rates), risk, level)
        broken += passed > 0 and rates[passed - 1] > risk
    return broken / rounds


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("shape", ["linear", "cliff", "plateau at the promise"])
def test_a_promise_is_broken_no_more_often_than_it_says(shape, n):
    rates = {
        "linear": np.linspace(0, 0.2, 40),
        "cliff": np.repeat([0.0, 0.3], 20),
        "plateau at the promise": np.concatenate([np.linspace(0, 0.05, 5), np.full(30, 0.0501)]),
    }[shape]
    broken = simulate(rates, n, risk=0.05, level=0.1, rounds=400, seed=n)
    assert broken <= 0.1 + 3 * (0.1 * 0.9 / 400) ** 0.5


@pytest.mark.slow
def test_the_simulation_separates_problems_from_drafts(tmp_path, capsys):
    """Drafts counted as problems promise too much where the risk rests above the promise; problems do not."""
    from tools.calibration_simulation import SHAPES, WINS, broken_share, main

    rates = SHAPES["rests just above the promise"]
    assert broken_share(rates, 300, 300, seed=1) <= 0.1 + 3 * (0.1 * 0.9 / 300) ** 0.5
    assert broken_share(rates, 300, 300, seed=1, drafts=4) > 0.2
    broken = broken_share(rates, 300, 300, seed=1, wins=WINS)
    assert 0 < broken <= 0.1 + 3 * (0.1 * 0.9 / 300) ** 0.5, "losses of -1, 0 and 1; never broken would show nothing"
    assert main(["--rounds", "2", "--out", str(tmp_path / "out.json")]) == 0
    assert "rests just above the promise" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 16 and {"shape", "problems", "by_problem", "by_draft", "accuracy"} == set(rows[0])
