"""Training and held-out problems, and the facts of a build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.rows import LabelledDraft, check_row
from parse_infer.models.fingerprint import describe_target
from parse_train.judge.build_info import BuildInfo, read_build_info
from parse_train.judge.data import split_by_problem


def draft(problem: str | None, prompt: str) -> LabelledDraft:
    row = {"prompt": prompt, "problem_id": problem, "completions": ["a"], "labels": [True]}
    return check_row(row | {"draft_ids": [5], "cuts": [1]}, "here")


def test_no_problem_stands_on_both_sides_of_the_split() -> None:
    # Problem 7 also goes by the name "alias", with the same prompt.
    rows = [draft(f"p{i % 20}", f"q{i % 20}") for i in range(60)] + [draft("alias", "q7"), draft(None, "q3")]
    train, held_out = split_by_problem(rows, 0.25, seed=1)
    assert len(train) + len(held_out) == 62
    assert not {row.prompt_key for row in train} & {row.prompt_key for row in held_out}
    assert len({row.prompt_key for row in held_out}) == 5
    again, _ = split_by_problem(rows[::-1], 0.25, seed=1)
    assert {row.prompt_key for row in again} == {row.prompt_key for row in train}
    other, _ = split_by_problem(rows, 0.25, seed=2)
    assert {row.prompt_key for row in other} != {row.prompt_key for row in train}


def test_one_problem_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        split_by_problem([draft("p", "q"), draft("p", "q")], 0.5, seed=0)


def test_a_build_says_how_it_was_made(make_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_model("llama")
    assert read_build_info(str(tmp_path)) == BuildInfo()
    content = {
        "config": {
            "cut_policy": {"kind": "sentence"},
            "rollouts": 4,
            "max_rollouts": 32,
            "margin": 0.25,
            "template_options": {"a": 1},
            "draft": "d",
        },
        "models": {"target": describe_target(model), "draft": {"name": "last-part", "fingerprint": "w1:0"}},
    }
    (tmp_path / "build.json").write_text(json.dumps(content))
    info = read_build_info(str(tmp_path))
    assert (info.cut_policy, info.template_options) == ({"kind": "sentence"}, {"a": 1})
    assert info.label == {"rollouts": 4, "max_rollouts": 32, "margin": 0.25}
    assert info.draft == {"name": "d", "fingerprint": "w1:0"}
    info.check_target(model, "here")
    with pytest.raises(ValueError, match="here was labelled by rollouts of"):
        info.check_target(make_model("llama", seed=1), "here")
    (tmp_path / "build.json").write_text("{")
    with pytest.raises(ValueError, match=r"build.json is damaged"):
        read_build_info(str(tmp_path))
