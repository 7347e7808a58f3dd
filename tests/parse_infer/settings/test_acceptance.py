"""Acceptance: which prefix is kept."""

from __future__ import annotations

import itertools

import pytest

from parse_infer.settings.acceptance import (
    ACCEPT_NOTHING,
    check_threshold,
    describe_threshold,
    maximal_valid_prefix,
    reachable_prefixes,
)
from parse_infer.settings.sampling import Sampling


def test_a_threshold_that_accepts_nothing_is_shown_as_such():
    shown = [describe_threshold(threshold) for threshold in (None, 0.5, 1.0, ACCEPT_NOTHING)]
    assert shown == ["none", "0.5", "1", "accepts nothing"]


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf"), 10**400])
def test_a_threshold_is_a_finite_number(threshold):
    with pytest.raises(ValueError, match="the threshold must be a finite number of at least 0"):
        check_threshold(threshold)
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=threshold)


def test_first_failure_stops_at_the_first_cut_below_the_threshold():
    assert maximal_valid_prefix([0.9, 0.8, 0.3, 0.95], 0.5) == 2
    assert maximal_valid_prefix([0.2, 0.9], 0.5) == 0


def test_longest_skips_a_dip():
    assert maximal_valid_prefix([0.9, 0.8, 0.3, 0.95], 0.5, "longest") == 4
    assert maximal_valid_prefix([0.9, 0.2, 0.3], 0.5, "longest") == 1


@pytest.mark.parametrize("rule", ["first_failure", "longest"])
def test_limits(rule):
    assert maximal_valid_prefix([], 0.5, rule) == 0
    assert maximal_valid_prefix([0.5, 0.5], 0.5, rule) == 2  # at the threshold is accepted
    assert maximal_valid_prefix([0.0, 0.0], 0.0, rule) == 2  # 0 accepts everything
    assert maximal_valid_prefix([1.0, 1.0], 1.01, rule) == 0  # above 1 accepts nothing
    assert maximal_valid_prefix([float("nan")], 0.0, rule) == 0


def test_the_rules_agree_exactly_where_passing_cuts_come_first():
    for validity in itertools.product([0.2, 0.8], repeat=5):
        first = maximal_valid_prefix(validity, 0.5)
        longest = maximal_valid_prefix(validity, 0.5, "longest")
        assert first <= longest
        assert all(v >= 0.5 for v in validity[:first])
        assert all(v < 0.5 for v in validity[longest:])
        assert (first == longest) == (list(validity) == sorted(validity, reverse=True))


@pytest.mark.parametrize("rule", ["first_failure", "longest"])
def test_reachable_prefixes_are_those_that_some_threshold_accepts(rule):
    for validity in itertools.product([0.0, 0.4, 0.7, 1.0], repeat=4):
        accepted = {maximal_valid_prefix(validity, t, rule) for t in (*validity, 0.0, ACCEPT_NOTHING)}
        assert reachable_prefixes(validity, rule) == sorted(accepted), validity
    assert reachable_prefixes([], rule) == [0]
    assert set(reachable_prefixes([0.5, float("nan"), 0.3], rule)) >= {0, 1}


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf"), "0.5", None, True])
def test_a_threshold_out_of_range_is_named(threshold):
    with pytest.raises(ValueError, match="the threshold must be"):
        check_threshold(threshold)
    with pytest.raises(ValueError, match="the threshold must be"):
        maximal_valid_prefix([0.5], threshold)


def test_thresholds_in_range_pass_unchanged():
    assert [check_threshold(t) for t in (0, 0.5, 1, 1.5)] == [0.0, 0.5, 1.0, 1.5]


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(ValueError, match="first_failure, longest"):
        maximal_valid_prefix([0.5], 0.5, "best")
