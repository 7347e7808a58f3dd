"""An alarm about a promise: rarely false however often one looks, and soon there when the promise is broken."""

from __future__ import annotations

import random

import pytest

from parse_infer.serve.audit import DriftTest


def alarms(allowed: float, true: float, rounds: int = 400, observations: int = 500) -> list[int]:
    """After how many observations each alarm came, looking after every one."""
    rng, found = random.Random(0), []
    for _ in range(rounds):
        test = DriftTest(allowed, 0.1)
        for i in range(observations):
            test.see(rng.random() < true)
            if test.implausible:
                found.append(i + 1)
                break
    return sorted(found)


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.3])
@pytest.mark.slow
def test_a_promise_that_holds_is_rarely_rejected(rate):
    assert len(alarms(rate, rate)) <= 400 * 0.1
    assert len(alarms(rate, rate / 2)) <= 400 * 0.02


@pytest.mark.parametrize(("allowed", "true", "soon"), [(0.05, 0.3, 12), (0.05, 0.12, 200), (0.01, 0.05, 100)])
def test_a_broken_promise_is_noticed(allowed, true, soon):
    found = alarms(allowed, true)
    assert len(found) >= 396
    assert found[200] <= soon


def test_evidence_starts_at_one_and_the_alarm_stays():
    test = DriftTest(0.1, 0.1)
    assert test.evidence == pytest.approx(1)
    for _ in range(3):
        test.see(True)
    assert test.implausible and (test.observations, test.events) == (3, 3)
    for _ in range(200):
        test.see(False)
    assert test.evidence < 1 and test.implausible
    with pytest.raises(ValueError, match=r"rate is 1.0"):
        DriftTest(1.0, 0.1)
