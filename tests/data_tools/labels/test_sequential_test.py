"""The sequential test against exact probabilities: how often its labels are wrong, and how many rollouts they cost."""

from __future__ import annotations

from functools import cache
from math import comb
from random import Random

import pytest

from data_tools.labels.sequential_test import (
    UNDECIDED,
    GreedyRule,
    Label,
    SequentialTest,
    Tally,
    fewest_rollouts,
    log_ratio,
)

MARGIN, MAX_ERROR, STEP, LIMIT = 0.4, 0.05, 4, 32
NEGLIGIBLE = 1e-6  # probability of a course that is left out
CHANCES = (0.25, 0.66, 0.9, 1.0)  # of the target, from the bare prompt
SHARES = (0.2, 0.5, 0.55, 1.0)  # of that chance, from a prefix


@cache
def label(prompt: int, right: int, total: int, margin: float, max_error: float) -> Label:
    return SequentialTest(Tally(prompt, LIMIT), margin, max_error, STEP, LIMIT).decide(Tally(right, total))


def binomial(right: int, total: int, chance: float) -> float:
    return comb(total, right) * chance**right * (1 - chance) ** (total - right)


def outcomes(chance: float, share: float, margin: float, max_error: float) -> tuple[dict[Label, float], float]:
    """The probability of each label of a prefix with this share of the chance, and the mean rollouts."""
    found: dict[Label, float] = {}
    rollouts = 0.0
    for prompt in range(LIMIT + 1):
        going = {0: binomial(prompt, LIMIT, chance)}
        if going[0] < NEGLIGIBLE:
            continue
        for total in range(STEP, LIMIT + 1, STEP):
            drawn: dict[int, float] = {}
            for right, weight in going.items():
                for more in range(STEP + 1):
                    drawn[right + more] = drawn.get(right + more, 0.0) + weight * binomial(more, STEP, share * chance)
            rollouts += STEP * sum(going.values())
            going = {}
            for right, weight in drawn.items():
                if weight < NEGLIGIBLE:
                    continue
                one = label(prompt, right, total, margin, max_error)
                if one.valid is None and total < LIMIT:
                    going[right] = weight
                else:
                    found[one] = found.get(one, 0.0) + weight
    return found, rollouts


def share_of(found: dict[Label, float], valid: bool | None) -> float:
    return sum(weight for one, weight in found.items() if one.valid is valid)


@pytest.mark.parametrize(
    ("margin", "max_error"), [(0.25, 0.05), (0.4, 0.05), pytest.param(0.3, 0.2, marks=pytest.mark.slow)]
)
def test_stated_confidence_holds_for_every_true_chance(margin: float, max_error: float) -> None:
    """Also between the two limits, where either label is wrong, and for every confidence that a row may state."""
    for chance in CHANCES:
        for share in (*SHARES, margin, 1 - margin):
            found, _ = outcomes(chance, share, margin, max_error)
            wrong = {
                one: weight
                for one, weight in found.items()
                if (one.valid and share <= 1 - margin) or (one.valid is False and share >= margin)
            }
            for stated in {0.5, 1 - max_error, *(one.confidence for one in wrong)}:
                error = sum(weight for one, weight in wrong.items() if one.confidence >= stated)
                # A confidence averages over the target's chance, which may be 1: 2 % of the stated error.
                allowed = max_error if stated <= 1 - max_error else 1.02 * (1 - stated)
                assert error <= allowed, f"chance {chance}, share {share}: {error:.3f} wrong at {stated:.3f}"


def test_half_of_a_chance_of_nine_in_ten_gets_no_confident_label() -> None:
    """With the recipe's earlier margin 85 % of such prefixes were labelled, most of them valid."""
    for margin in (0.25, 0.4):
        found, _ = outcomes(0.9, 0.5, margin, MAX_ERROR)
        assert share_of(found, None) > 0.98


@pytest.mark.parametrize(
    ("chance", "intact", "lost", "most_rollouts"),
    [(0.5, 0.33, 0.45, 29), (0.66, 0.6, 0.6, 24), (0.9, 0.95, 0.8, 19)],
)
def test_clear_prefixes_get_labels(chance: float, intact: float, lost: float, most_rollouts: float) -> None:
    """A tenth of the chance left is clear enough; none left is certain to be found."""
    for share, valid, least in ((1.0, True, intact), (0.1, False, lost), (0.0, False, 0.99)):
        found, rollouts = outcomes(chance, share, MARGIN, MAX_ERROR)
        said = f"chance {chance}, share {share}: {share_of(found, valid):.1%} labelled, {rollouts:.1f} rollouts"
        assert share_of(found, valid) >= least and rollouts <= most_rollouts, said


def test_rollouts_that_were_cut_off_count_for_neither_side() -> None:
    prompt, prefix = Tally(28, 30, cut=2), Tally(3, 8, cut=24)
    for valid in (True, False):
        known = log_ratio(Tally(28, 30), Tally(3, 8), MARGIN, valid)
        assert log_ratio(prompt, prefix, MARGIN, valid) == known
    rule = SequentialTest(Tally(28, 30, cut=2), MARGIN, MAX_ERROR, STEP, LIMIT)
    assert rule.decide(Tally(0, 0, cut=LIMIT)) == UNDECIDED
    assert SequentialTest(Tally(0, 0, cut=LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT).foregone == UNDECIDED
    assert Tally(0, 0, cut=3).share is None and Tally(1, 2, cut=3).share == 0.5 and Tally(1, 2, cut=3).rollouts == 5


def test_cut_rollouts_do_not_make_labels_wrong() -> None:
    """A budget that cuts off half of the rollouts, with a fixed seed: fewer labels, and hardly a wrong one."""
    random, wrong, labelled, n = Random(0), 0, 0, 150

    def tally(chance: float, rollouts: int) -> Tally:
        finished = sum(random.random() < 0.5 for _ in range(rollouts))
        return Tally(sum(random.random() < chance for _ in range(finished)), finished, rollouts - finished)

    for _ in range(n):
        rule, found = SequentialTest(tally(0.9, LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT), Tally(0, 0)
        while (label := rule.decide(found).valid) is None and found.rollouts < LIMIT:
            found = Tally(*map(sum, zip(found, tally(0.9, STEP), strict=True)))
        wrong, labelled = wrong + (label is False), labelled + (label is not None)
    assert wrong <= MAX_ERROR * n and labelled > 0.7 * n


def test_more_right_rollouts_speak_for_the_prefix_and_for_the_target_against_it() -> None:
    for prompt in (Tally(8, 32), Tally(30, 32), Tally(500, 2000)):
        for valid in (True, False):
            ratios = [log_ratio(prompt, Tally(right, 16), MARGIN, valid) for right in range(17)]
            assert ratios == sorted(ratios, reverse=not valid) and ratios[0] * ratios[-1] < 0
    against = [log_ratio(Tally(right, 32), Tally(0, 8), MARGIN, valid=False) for right in range(33)]
    assert against == sorted(against)
    assert log_ratio(Tally(16, 32), Tally(0, 0), MARGIN, valid=True) == pytest.approx(0)


def test_a_target_that_is_hardly_ever_right_decides_nothing() -> None:
    for right in range(4):
        assert SequentialTest(Tally(right, LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT).foregone == UNDECIDED
    assert SequentialTest(Tally(16, LIMIT), MARGIN, MAX_ERROR, STEP, LIMIT).foregone is None


def test_one_greedy_rollout_decides_with_certainty() -> None:
    right, wrong = Tally(1, 1), Tally(0, 1)
    assert GreedyRule(right).foregone is None
    assert [GreedyRule(right).decide(prefix) for prefix in (right, wrong)] == [Label(True, 1.0), Label(False, 1.0)]
    assert GreedyRule(wrong).foregone == GreedyRule(wrong).decide(wrong) == Label(True, 1.0)


def test_a_greedy_rollout_that_was_cut_off_decides_nothing() -> None:
    right, cut = Tally(1, 1), Tally(0, 0, cut=1)
    assert GreedyRule(right).decide(cut) == UNDECIDED
    assert GreedyRule(cut).foregone == GreedyRule(cut).decide(right) == UNDECIDED


@pytest.mark.parametrize(("margin", "max_error"), [(0.25, 0.05), (0.4, 0.05), (0.1, 0.01)])
def test_fewest_rollouts_allow_either_label_and_fewer_do_not(margin: float, max_error: float) -> None:
    def possible(n: int) -> bool:
        rule = SequentialTest(Tally(n, n), margin, max_error, step=n, limit=n)
        return {rule.decide(Tally(right, n)).valid for right in (0, n)} == {True, False}

    n = fewest_rollouts(margin, max_error)
    assert possible(n) and not possible(n - 1)
