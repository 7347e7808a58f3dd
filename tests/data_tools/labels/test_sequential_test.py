"""The sequential test against simulation: how often its labels are wrong, and how many rollouts they cost."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import pytest

from data_tools.labels.sequential_test import (
    GreedyRule,
    SequentialTest,
    Tally,
    Verdict,
    fewest_rollouts,
    probability_kept,
)

MARGIN, MAX_ERROR, STEP, LIMIT = 0.25, 0.05, 4, 32
RUINED = 0.2  # share of the target's chance that is left: one in two becomes one in ten
PROBLEMS = 4000
_kept = lru_cache(None)(probability_kept)


def sequential(chance: float, from_prefix: float, random: Random) -> tuple[bool | None, int]:
    """The label of one prefix and the rollouts it took."""
    prompt = Tally(sum(random.random() < chance for _ in range(LIMIT)), LIMIT)
    test = SequentialTest(prompt, MARGIN, MAX_ERROR, STEP, LIMIT)
    if test.foregone:
        return test.foregone.valid, 0
    right = 0
    for total in range(STEP, LIMIT + 1, STEP):
        right += sum(random.random() < from_prefix for _ in range(STEP))
        valid = test.decide(Tally(right, total)).valid
        if valid is not None:
            return valid, total
    return None, LIMIT


def absolute(chance: float, from_prefix: float, random: Random) -> bool | None:
    """The rule before: four rollouts each, and `value >= target_value - 0.25`; unsolved problems were dropped."""
    target_value, value = (sum(random.random() < c for _ in range(4)) / 4 for c in (chance, from_prefix))
    return value >= target_value - 0.25 if target_value else None


@pytest.mark.parametrize(
    ("chance", "most_undecided", "most_rollouts"),
    [(0.25, 0.85, 32), (0.5, 0.25, 23), (0.66, 0.1, 17), (0.9, 0.02, 11)],
)
def test_labels_are_hardly_ever_wrong(
    chance: float, most_undecided: float, most_rollouts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_tools.labels.sequential_test.probability_kept", _kept)
    random = Random(round(100 * chance))
    for name, share, wrong_label in (("kept", 1.0, False), ("ruined", RUINED, True)):
        found = [sequential(chance, share * chance, random) for _ in range(PROBLEMS)]
        labels = [label for label, _ in found]
        wrong, undecided = labels.count(wrong_label) / PROBLEMS, labels.count(None) / PROBLEMS
        rollouts = sum(n for _, n in found) / PROBLEMS
        before = sum(absolute(chance, share * chance, random) is wrong_label for _ in range(PROBLEMS)) / PROBLEMS
        said = f"chance {chance}, {name}: wrong {wrong:.1%} (absolute margin: {before:.1%}), undecided {undecided:.1%}"
        assert wrong <= 0.015 and (before > 5 * wrong or before < 0.05), f"{said}, {rollouts:.1f} rollouts"
        assert undecided <= most_undecided and rollouts <= most_rollouts, f"{said}, {rollouts:.1f} rollouts"


def test_the_absolute_margin_let_a_ruined_prefix_pass_every_third_time() -> None:
    """Two right answers in four from the prompt, a chance of one in ten left."""
    random = Random(0)
    passed = sum(any(random.random() < 0.1 for _ in range(4)) for _ in range(PROBLEMS)) / PROBLEMS
    assert 0.32 < passed < 0.37
    test = SequentialTest(Tally(16, 32), MARGIN, MAX_ERROR, STEP, LIMIT)
    assert test.decide(Tally(1, 4)).valid is None


def test_more_right_rollouts_speak_for_the_prefix_and_for_the_target_against_it() -> None:
    for prompt in (Tally(8, 32), Tally(30, 32), Tally(500, 2000)):
        shares = [probability_kept(prompt, Tally(right, 16), MARGIN) for right in range(17)]
        assert shares == sorted(shares) and 0 < shares[0] < 0.5 < shares[-1] <= 1
    against = [probability_kept(Tally(right, 32), Tally(0, 8), MARGIN) for right in range(33)]
    assert against == sorted(against, reverse=True)
    assert probability_kept(Tally(16, 32), Tally(0, 0), MARGIN) == pytest.approx(0.5)


def test_confidence_is_the_share_of_right_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prefixes stand at the two limits in equal numbers, labels of a confidence are right so often."""
    monkeypatch.setattr("data_tools.labels.sequential_test.probability_kept", _kept)
    random, found = Random(3), []
    for _ in range(PROBLEMS):
        chance, keeps = random.random(), random.random() < 0.5
        prompt = Tally(sum(random.random() < chance for _ in range(LIMIT)), LIMIT)
        share = 1 - MARGIN if keeps else MARGIN
        prefix = Tally(sum(random.random() < share * chance for _ in range(8)), 8)
        verdict = SequentialTest(prompt, MARGIN, 0.49, 8, LIMIT).decide(prefix)
        if verdict.valid is not None:
            found.append((verdict.confidence, verdict.valid is keeps))
    for low, high in ((0.5, 0.7), (0.7, 0.9), (0.9, 1.01)):
        chosen = [(confidence, right) for confidence, right in found if low <= confidence < high]
        said, true = (sum(column) / len(chosen) for column in zip(*chosen, strict=True))
        assert abs(said - true) < 0.03, f"confidence {said:.3f}, right {true:.3f} of {len(chosen)}"


def test_a_target_that_is_hardly_ever_right_decides_nothing() -> None:
    for right in range(5):
        foregone = SequentialTest(Tally(right, LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT).foregone
        assert foregone is not None and foregone.valid is None
    assert SequentialTest(Tally(16, LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT).foregone is None


def test_one_greedy_rollout_decides_with_certainty() -> None:
    right, wrong = Tally(1, 1), Tally(0, 1)
    assert GreedyRule(right).foregone is None
    assert [GreedyRule(right).decide(prefix) for prefix in (right, wrong)] == [Verdict(True, 1.0), Verdict(False, 1.0)]
    assert GreedyRule(wrong).foregone == GreedyRule(wrong).decide(wrong) == Verdict(True, 1.0)


@pytest.mark.parametrize(("margin", "max_error"), [(0.25, 0.05), (0.4, 0.05), (0.1, 0.01)])
def test_fewest_rollouts(margin: float, max_error: float) -> None:
    n = fewest_rollouts(margin, max_error)
    sure = Tally(10_000, 10_000)

    def decided(total: int) -> bool:
        return all(
            max(p := probability_kept(sure, Tally(right, total), margin), 1 - p) >= 1 - max_error - 1e-3
            for right in (0, total)
        )

    assert decided(n) and not decided(n - 1)
