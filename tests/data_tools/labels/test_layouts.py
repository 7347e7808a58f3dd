"""Public process-supervision sets as prefixes: each in its own format, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tools.cli import main
from data_tools.labels.layouts import LAYOUTS
from data_tools.labels.rows import LabelledDraft, read_rows


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_as(layout: str, *rows: dict[str, Any]) -> list[LabelledDraft]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return list(read_rows(tmp_path, layout))

    return read_as


def shown(draft: LabelledDraft) -> tuple[list[str], list[bool], bool | None]:
    return draft.completions, draft.labels, draft.finished


TRL = {
    "prompt": "What is 2 + 3 + 4?",
    "completions": ["2 + 3 = 6", "6 is even", "6 + 4 = 10", "The answer is 10."],
    "labels": [False, True, True, False],
}


def test_trl(read: Any) -> None:
    """A step that is right in itself does not make the prefix valid again."""
    (draft,) = read("trl", TRL)
    assert shown(draft) == (TRL["completions"], [False] * 4, None)
    (draft,) = read("trl", TRL | {"labels": [True, True, False, True], "finished": True})
    assert (draft.labels, draft.finished) == ([True, True, False, False], True)


def prm800k(steps: list[dict[str, Any]], finish_reason: str = "solution") -> dict[str, Any]:
    """One line of `phase1_train.jsonl` or `phase2_train.jsonl`."""
    return {
        "labeler": "d8aa7923-b970-45e1-9734-e4a7f6c4a7db",
        "timestamp": "2022-07-17T16:56:51.323252",
        "generation": None,
        "is_quality_control_question": False,
        "is_initial_screening_question": False,
        "question": {
            "problem": "What is $2 + 3 + 4$?",
            "ground_truth_solution": "$2 + 3 + 4 = \\boxed{9}$.",
            "ground_truth_answer": "9",
            "pre_generated_steps": None,
            "pre_generated_answer": None,
            "pre_generated_verifier_score": None,
        },
        "label": {"steps": steps, "total_time": 54356, "finish_reason": finish_reason},
    }


def step(*candidates: tuple[str, int | None], chosen: int | None = 0, human: Any = None) -> dict[str, Any]:
    completions = [{"text": text, "rating": rating, "flagged": False} for text, rating in candidates]
    return {"completions": completions, "human_completion": human, "chosen_completion": chosen}


def test_prm800k_follows_the_choices_and_knows_the_alternatives(read: Any) -> None:
    path = prm800k(
        [
            step(("I need a sum.", 0)),  # neutral
            step(("$2 + 3 = 6$.", -1), ("$2 + 3 = 5$.", 1), ("Who knows?", None), chosen=1),
            step(("$5 + 4 = 9$.\n\n# Answer\n\n9", 1)),
        ]
    )
    wrong, right = read("prm800k", path)
    assert shown(wrong) == (["I need a sum.", "$2 + 3 = 6$."], [True, False], False)
    end = "$5 + 4 = 9$.\n\n# Answer\n\n9"
    assert shown(right) == (["I need a sum.", "$2 + 3 = 5$.", end], [True, True, True], True)
    assert right.prompt == "What is $2 + 3 + 4$?"


def test_prm800k_stops_where_nothing_was_chosen(read: Any) -> None:
    """Phase 2 stops at the first error, with other steps to take instead; the path itself is part of all of them."""
    found = read(
        "prm800k",
        prm800k([step(("a", 1)), step(("b", -1), ("c", 1), chosen=None)], "found_error"),
        prm800k([step(("a", 1)), step(("b", -1), chosen=None, human={"text": "h", "rating": 1})], "give_up"),
        prm800k(
            [step(("a", 1)), {"completions": None, "human_completion": None, "chosen_completion": None}], "give_up"
        ),
        prm800k([step(("a", 1))], "bad_problem"),
    )
    assert [shown(draft) for draft in found] == [
        (["a", "b"], [True, False], False),
        (["a", "c"], [True, True], False),
        (["a", "b"], [True, False], False),
        (["a", "h"], [True, True], False),
        (["a"], [True], False),
    ]


SHEPHERD = {
    "input": "Tom has 2 pens and buys 3 packs of 4. How many has he now? Step 1: 3 * 4 = <<3*4=12>>12 pens. ки\n"
    "Step 2: 2 + 12 = <<2+12=15>>15 pens. ки\nStep 3: Tom has 15 pens. The answer is: 15 ки",
    "label": "Tom has 2 pens and buys 3 packs of 4. How many has he now? Step 1: 3 * 4 = <<3*4=12>>12 pens. +\n"
    "Step 2: 2 + 12 = <<2+12=15>>15 pens. -\nStep 3: Tom has 15 pens. The answer is: 15 +",
    "task": "GSM8K",
}


def test_math_shepherd(read: Any) -> None:
    (draft,) = read("math_shepherd", SHEPHERD)
    assert draft.prompt == "Tom has 2 pens and buys 3 packs of 4. How many has he now?"
    assert draft.completions[0] == "Step 1: 3 * 4 = <<3*4=12>>12 pens."
    assert draft.completions[2] == "Step 3: Tom has 15 pens. The answer is: 15"
    assert (draft.labels, draft.finished) == ([True, False, False], True)


def test_math_shepherd_as_it_really_is(read: Any) -> None:
    """A tag in the problem, a solution that breaks off, and a problem without a first step."""
    found = read(
        "math_shepherd",
        {"input": "One ки plus 1? Step 1: 2 ки", "label": "One + plus 1? Step 1: 2 -", "task": "MATH"},
        {"input": "1 + 1? Step 1: so ки\nStep 2: and", "label": "1 + 1? Step 1: so +\nStep 2: and", "task": "MATH"},
        {"input": "1 + 1? It is 2. ки", "label": "1 + 1? It is 2. +", "task": "MATH"},
    )
    assert [(draft.prompt, *shown(draft)) for draft in found] == [
        ("One  plus 1?", ["Step 1: 2"], [False], False),
        ("1 + 1?", ["Step 1: so"], [True], False),
    ]


def bench(label: int, right: bool) -> dict[str, Any]:
    return {
        "id": "gsm8k-0",
        "generator": "Qwen2-7B-Instruct",
        "problem": "Tom has 2 pens and buys 3 packs of 4. How many has he now?",
        "steps": ["3 packs are 12 pens.", "2 + 12 = 14.", "Tom has \\boxed{14} pens."],
        "final_answer_correct": right,
        "label": label,
    }


@pytest.mark.parametrize(
    ("label", "right", "labels"),
    [
        (-1, True, [True, True, True]),
        (1, True, [True, False, False]),  # a right answer by a wrong way
        (0, False, [False, False, False]),
        (-1, False, [True, True, False]),
    ],
)
def test_processbench(read: Any, label: int, right: bool, labels: list[bool]) -> None:
    (draft,) = read("processbench", bench(label, right))
    assert (draft.labels, draft.finished, draft.draft_correct) == (labels, True, right)


ROWS = {"trl": TRL, "prm800k": prm800k([step(("a", 1))]), "math_shepherd": SHEPHERD, "processbench": bench(1, True)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ROWS)
def test_other_layouts_are_refused(read: Any, layout: str, of: str) -> None:
    if layout == of:
        return
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: ") as caught:
        read(layout, ROWS[of])
    assert len(str(caught.value).splitlines()) == 1


def test_rows_that_no_build_wrote_need_a_layout(read: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name the layout \(trl, prm800k, math_shepherd, processbench\)"):
        read("build", TRL)
    with pytest.raises(ValueError, match="unknown layout 'prm80k'; did you mean 'prm800k'"):
        read("prm80k", TRL)
    assert main(["inspect", str(tmp_path), "--layout", "trl"]) == 0
    assert "valid prefixes" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 2


def test_damaged_rows_are_named(read: Any) -> None:
    damaged = prm800k([{"completions": [{"text": "a"}], "chosen_completion": 0}])
    with pytest.raises(ValueError, match="line 2: the row does not have the layout prm800k"):
        read("prm800k", ROWS["prm800k"], damaged)
    with pytest.raises(ValueError, match="label must equal input"):
        read("math_shepherd", SHEPHERD | {"label": SHEPHERD["input"]})
    with pytest.raises(ValueError, match="first wrong step"):
        read("processbench", bench(3, True))
