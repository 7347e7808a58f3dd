"""Properties of the search for the first error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest

from data_tools.labels.prefix_search import PrefixSearch
from data_tools.labels.sequential_test import GreedyRule, Label, LabelRule, SequentialTest, Tally

SURE = GreedyRule(Tally(1, 1))


def run(search: PrefixSearch, right: list[int]) -> int:
    """Answer every question of the search; `right` has the right rollouts of each prefix, of those it may ask for.
    Returns the number of rollouts."""
    asked: dict[int, int] = {}
    while pending := search.pending():
        for prefix, rollouts in pending:
            assert rollouts > asked.get(prefix, 0)
            asked[prefix] = rollouts
            search.record(prefix, Tally(min(right[prefix], rollouts), rollouts))
    return sum(asked.values())


def labels(search: PrefixSearch) -> list[bool | None]:
    return search.result().labels


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("own_answer", [False, None])
def test_binary_search_finds_every_first_error_in_logarithmic_time(n: int, own_answer: bool | None) -> None:
    for first_error in range(n + 1 if own_answer is None else n):
        right = [int(k < first_error) for k in range(n)]
        asked = run(search := PrefixSearch(n, SURE, own_answer), right)
        result = search.result()
        assert result.labels == [k < first_error for k in range(n)]
        assert result.confidence == [1.0] * n
        candidates = n if own_answer is None else n - 1
        assert asked <= math.ceil(math.log2(candidates + 1))
        known = [(value, true) for value, true in zip(result.values, right, strict=True) if value is not None]
        assert all(value == true for value, true in known)
        assert len(known) == asked + (own_answer is not None)


def test_a_right_draft_is_valid_throughout_without_rollouts() -> None:
    assert run(search := PrefixSearch(5, SURE, own_answer=True), []) == 0
    assert labels(search) == [True] * 5
    assert search.result().values == [None] * 4 + [1.0]


def test_no_prefix_lowers_a_chance_of_zero() -> None:
    assert run(search := PrefixSearch(4, GreedyRule(Tally(0, 1)), own_answer=False), []) == 0
    assert labels(search) == [True, True, True, False]


def test_a_target_that_is_never_right_decides_nothing_about_samples() -> None:
    rule = SequentialTest(Tally(0, 32), margin=0.25, max_error=0.05, step=4, limit=32)
    assert run(search := PrefixSearch(4, rule, own_answer=False), []) == 0
    assert labels(search) == [None, None, None, False]
    assert run(search := PrefixSearch(2, rule, own_answer=None, exhaustive=True), [32, 0]) == 64
    assert labels(search) == [None, None]


def test_a_single_prefix_is_labelled_by_the_answer_if_there_is_one() -> None:
    assert labels(PrefixSearch(1, SURE, own_answer=False)) == [False]
    assert run(search := PrefixSearch(1, SURE, own_answer=None), [0]) == 1
    assert (labels(search), search.result().values) == ([False], [0.0])


def test_clear_prefixes_take_one_round_and_doubtful_ones_more() -> None:
    rule = SequentialTest(Tally(30, 32), margin=0.4, max_error=0.05, step=4, limit=32)
    search = PrefixSearch(3, rule, own_answer=None)
    assert run(search, [32, 32, 0]) <= 16
    assert labels(search) == [True, True, False]
    result = search.result()
    assert all(c >= 0.95 for c in result.confidence)
    assert result.confidence[0] == result.confidence[1]  # the first is inferred from the second

    assert run(PrefixSearch(1, rule, own_answer=None), [2]) > 8


def test_cut_rollouts_are_drawn_like_others_and_decide_nothing() -> None:
    """A search whose rollouts are all cut off ends at the limit, and without a value."""
    rule = SequentialTest(Tally(30, 32), margin=0.4, max_error=0.05, step=4, limit=32)
    search, drawn = PrefixSearch(1, rule, own_answer=None), []
    while pending := search.pending():
        ((prefix, rollouts),) = pending
        drawn.append(rollouts)
        search.record(prefix, Tally(0, 0, cut=rollouts))
    result = search.result()
    assert drawn == list(range(4, 33, 4)) and result.labels == result.values == [None]
    greedy = PrefixSearch(3, SURE, own_answer=False)
    while pending := greedy.pending():
        for prefix, _ in pending:
            greedy.record(prefix, Tally(0, 0, cut=1) if prefix == 1 else Tally(1, 1))
    assert greedy.result().labels == [True, None, False]


@dataclass(frozen=True)
class Doubtful:
    """Decides as `SURE`, but never about some prefixes: those whose rollouts are right half of the time."""

    step: int = 2
    limit: int = 6
    foregone: None = None

    def decide(self, prefix: Tally) -> Label:
        share = prefix.share
        return Label(None, 0.6) if 0 < share < 1 else Label(share == 1, 0.9 + 0.01 * prefix.total)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_the_search_goes_around_what_cannot_be_decided(n: int) -> None:
    """Valid, then undecided, then invalid prefixes: no label contradicts them, and few questions are asked."""
    rule: LabelRule = Doubtful()
    for valid in range(n + 1):
        for invalid in range(valid, n + 1):
            asked: dict[int, int] = {}
            search = PrefixSearch(n, rule, own_answer=None)
            while pending := search.pending():
                ((prefix, rollouts),) = pending
                asked[prefix] = rollouts
                share = 1.0 if prefix < valid else 0.5 if prefix < invalid else 0.0
                search.record(prefix, Tally(round(share * rollouts), rollouts))
            found = search.result()
            assert found.labels == [True] * valid + [None] * (invalid - valid) + [False] * (n - invalid)
            assert len(asked) <= 2 * math.ceil(math.log2(n + 1)), f"asked about {sorted(asked)} of {n}"
            assert all(rollouts == (6 if valid <= k < invalid else 2) for k, rollouts in asked.items())
            sure = [c for label, c in zip(found.labels, found.confidence, strict=True) if label is not None]
            assert all(c == 0.92 for c in sure)


def test_chance_does_not_break_the_order_of_labels() -> None:
    """Whatever the rollouts say, labels are valid, then undecided, then invalid."""
    random = Random(0)
    for _ in range(300):
        n = random.randint(1, 9)
        search = PrefixSearch(n, Doubtful(), own_answer=random.choice([None, False]))
        while pending := search.pending():
            for prefix, rollouts in pending:
                search.record(prefix, Tally(random.choice([0, rollouts // 2, rollouts]), rollouts))
        order = {True: 0, None: 1, False: 2}
        places = [order[label] for label in search.result().labels]
        assert places == sorted(places), places


def test_exhaustive_asks_for_every_value_and_infers_nothing() -> None:
    right = [1, 0, 1, 0]
    assert run(search := PrefixSearch(4, SURE, own_answer=True, exhaustive=True), right) == 3
    assert labels(search) == [True, False, True, True]
    assert search.result().values == [1.0, 0.0, 1.0, 1.0]
    assert run(search := PrefixSearch(4, SURE, own_answer=None, exhaustive=True), right) == 4
    assert labels(search) == [True, False, True, False]
    never = GreedyRule(Tally(0, 1))
    assert run(search := PrefixSearch(2, never, own_answer=False, exhaustive=True), [0, 0]) == 1
    assert labels(search) == [True, False]


def test_labels_before_the_end_are_refused() -> None:
    with pytest.raises(RuntimeError, match="missing"):
        PrefixSearch(3, SURE, None).result()
    with pytest.raises(ValueError, match="nothing to label"):
        PrefixSearch(0, SURE, None)
