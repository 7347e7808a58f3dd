"""Stop strings: whatever the pieces, what is released is the text before the first stop string."""

from __future__ import annotations

from random import Random

import pytest

from parse_infer.serve.choice_state import StopStrings


def ended(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text as the engine leaves it: right after the stop string that is complete first."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return (text[: min(ends)], True) if ends else (text, False)


@pytest.mark.parametrize("seed", range(200))
def test_pieces_make_no_difference_and_no_part_is_sent_too_early(seed: int) -> None:
    random = Random(seed)
    stops = ["".join(random.choices("ab", k=random.randint(1, 4))) for _ in range(random.randint(0, 3))]
    text, stopped = ended("".join(random.choices("abc", k=12)), stops)
    strings, sent, at = StopStrings(stops), "", 0
    while at < len(text):
        size = random.randint(1, 4)
        sent += strings.add(text[at : at + size])
        at += size
        assert not any(stop in sent for stop in stops)
    sent += strings.finish(stopped)
    longest = max((len(stop) for stop in stops if stopped and text.endswith(stop)), default=0)
    assert sent == strings.text == text[: len(text) - longest]
    assert not any(stop in sent for stop in stops)


def test_without_stop_strings_nothing_is_held_back() -> None:
    strings = StopStrings([])
    assert [strings.add("a"), strings.add("bc"), strings.finish(False)] == ["a", "bc", ""]
