"""Properties of the search for the first error."""

from __future__ import annotations

import math

import pytest

from data_tools.labels.prefix_search import PrefixLabels, PrefixSearch


def run(search: PrefixSearch, values: list[float]) -> tuple[PrefixLabels, int]:
    """Answer every question of the search from `values`; the result and the number of questions."""
    asked = 0
    while pending := search.pending():
        for prefix in pending:
            search.record(prefix, values[prefix])
            asked += 1
    return search.result(), asked


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("own_answer", [False, None])
def test_binary_search_finds_every_first_error_in_logarithmic_time(n: int, own_answer: bool | None) -> None:
    for first_error in range(n + 1 if own_answer is None else n):
        values = [1.0 if k < first_error else 0.0 for k in range(n)]
        result, asked = run(PrefixSearch(n, 1.0, own_answer), values)
        assert result.labels == [k < first_error for k in range(n)]
        candidates = n if own_answer is None else n - 1
        assert asked <= math.ceil(math.log2(candidates + 1))
        known = [(value, true) for value, true in zip(result.values, values, strict=True) if value is not None]
        assert all(value == true for value, true in known)
        assert len(known) == asked + (own_answer is not None)


def test_a_right_draft_is_valid_throughout_without_rollouts() -> None:
    result, asked = run(PrefixSearch(5, 1.0, own_answer=True), [])
    assert (result.labels, asked) == ([True] * 5, 0)
    assert result.values == [None] * 4 + [1.0]


def test_no_prefix_lowers_a_chance_of_zero() -> None:
    result, asked = run(PrefixSearch(4, 0.0, own_answer=False), [])
    assert (result.labels, asked) == ([True, True, True, False], 0)
    assert run(PrefixSearch(4, 0.25, own_answer=None, margin=0.25), [])[0].labels == [True] * 4


def test_a_single_prefix_is_labelled_by_the_answer_if_there_is_one() -> None:
    assert run(PrefixSearch(1, 1.0, own_answer=False), [])[0] == PrefixLabels([False], [0.0])
    assert run(PrefixSearch(1, 1.0, own_answer=None), [0.0]) == (PrefixLabels([False], [0.0]), 1)


def test_the_margin_is_inclusive_and_safe_from_rounding() -> None:
    values = [0.7, 0.3, 0.1]  # 0.4 - 0.1 is slightly above 0.3 in floating point
    assert run(PrefixSearch(3, 0.4, None, margin=0.1), values)[0].labels == [True, True, False]
    assert run(PrefixSearch(3, 0.4, None, margin=0.05), values)[0].labels == [True, False, False]


def test_exhaustive_asks_for_every_value_and_infers_nothing() -> None:
    values = [1.0, 0.0, 1.0, 0.0]
    result, asked = run(PrefixSearch(4, 1.0, own_answer=True, exhaustive=True), values)
    assert (result.labels, result.values, asked) == ([True, False, True, True], [1.0, 0.0, 1.0, 1.0], 3)
    result, asked = run(PrefixSearch(4, 1.0, own_answer=None, exhaustive=True), values)
    assert (result.labels, result.values, asked) == ([True, False, True, False], values, 4)
    result, asked = run(PrefixSearch(2, 0.0, own_answer=False, exhaustive=True), [0.0, 0.0])
    assert (result.labels, asked) == ([True, False], 1)


def test_labels_before_the_end_are_refused() -> None:
    with pytest.raises(RuntimeError, match="missing"):
        PrefixSearch(3, 1.0, None).result()
    with pytest.raises(ValueError, match="nothing to label"):
        PrefixSearch(0, 1.0, None)
