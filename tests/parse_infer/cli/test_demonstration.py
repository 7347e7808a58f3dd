"""The demonstration: which problem comes first, what its verdicts say, and whose answers its table counts."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from parse_infer.cli.demonstration import NAMES, run_demo, verdict
from parse_infer.evaluation.records import Record
from parse_infer.settings.generation import GenerationSettings


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    reference: str = "42"


PROBLEMS = [Problem(f"p{i}", f"What is {i} and {i}?") for i in range(3)]


def record(mode: str, correct: bool) -> Record:
    return Record(
        text="",
        seconds=0.5,
        n_tokens=8,
        finish_reason="eos",
        target_forwards=2,
        problem_id="p",
        digest="d",
        mode=mode,
        repeat=0,
        correct=correct,
    )


@pytest.mark.parametrize(("right", "order"), [({"p1", "p2"}, "102"), ({"p0"}, "012"), (set(), "012")])
def test_a_problem_answered_right_comes_first_and_every_problem_counts(make_engine, right, order):
    shown = io.StringIO()
    records = run_demo(
        make_engine(),
        PROBLEMS,
        lambda problem, text: problem.id in right,
        Console(file=shown, width=100),
        max_new_tokens=4,
    )
    assert list(records) == list(NAMES)
    for rows in records.values():
        assert [row.problem_id for row in rows] == [f"p{i}" for i in order]
        assert sum(bool(row.correct) for row in rows) == len(right)
    text = shown.getvalue()
    assert ("comes first" in text) == (order != "012")
    assert text.count(f"{len(right)} of 3") == len(NAMES)


def test_lossless_speculation_gives_the_answers_of_the_target_alone(make_engine):
    engine = make_engine(noise=0.3)
    records = run_demo(engine, PROBLEMS, lambda *_: True, Console(file=io.StringIO()), max_new_tokens=12)
    assert [row.text for row in records["lossless"]] == [row.text for row in records["target"]]
    assert records["parse"][0].text == engine.generate(PROBLEMS[0].prompt, GenerationSettings(12)).text


@pytest.mark.parametrize(
    ("parse", "target", "words"),
    [
        (True, False, "right  "),
        (False, False, "wrong, as the target alone (it is 42)  "),
        (False, True, "wrong, where the target alone is right (it is 42)  "),
    ],
)
def test_a_verdict_compares_with_the_target_alone(parse, target, words):
    right = dict.fromkeys(NAMES, True) | {"parse": parse, "target": target}
    text = verdict("42", {name: record(name, correct) for name, correct in right.items()}).plain
    assert text.startswith(words)
    assert "target alone 0.50 s, draft model alone 0.50 s, lossless speculation 0.50 s" in text
