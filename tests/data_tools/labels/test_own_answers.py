"""A log of prompts alone gives labels: the target's own answers are the references."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.own_answers import OwnAnswers
from data_tools.labels.rows import read_rows
from data_tools.labels.shards import check_identity
from data_tools.tasks.checkers import same_answer
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem
from parse_infer.models.loading import load_language_model

Make = Callable[..., BuildConfig]


@pytest.fixture
def log(pair: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of the task: a file of prompts, every other one with a category."""
    rows = [json.loads(line) for line in (pair / "problems.jsonl").read_text().splitlines()[:10]]
    for i, row in enumerate(rows):
        del row["reference"]
        row |= {"category": "qa"} if i % 2 else {}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "check_with": "none"}


def rows_of(config: BuildConfig) -> list[dict[str, Any]]:
    files = sorted(Path(config.output_dir, "data").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_greedy_answers_are_the_references(make_config: Make, pair: Path, log: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="labels need references, or the recipe key check_with: own_answer"):
        build(make_config(task_options=log))
    config = make_config(task_options=log, check_with="own_answer", limit=4, problems_per_group=4)
    build(config)
    config.limit = 8
    build(config)  # goes on, although the log has no references to compare
    rows, target = rows_of(config), load_language_model(pair / "target", role="target")

    def answer(prompt: str, prefix: list[int]) -> str:
        """Greedy, decoded alone; empty if it does not end."""
        target.decoder.seek(target.render(prompt) + prefix)
        ids = prefix + list(target.decoder.decode(config.max_rollout_tokens))
        return target.tokenizer.decode(ids, skip_special_tokens=True) if ids[-1] in target.eos_ids else ""

    asked = load_task("jsonl", **log).problems("train", limit=8)
    answered = {problem.id for problem in asked if answer(problem.prompt, [])}
    assert {row["problem_id"] for row in rows} == answered and 0 < len(answered) < 8
    found = set()
    for row in rows:
        assert row["reference"] == answer(row["prompt"], []) and row["target_value"] == 1.0
        assert row["checked_with"] == "own_answer"
        text = "".join(row["completions"])
        assert row["draft_correct"] == (row["finished"] and same_answer(row["reference"], text))
        for cut, value in list(zip(row["cuts"], row["values"], strict=True))[: len(row["cuts"]) - row["finished"]]:
            if value is not None:
                assert value == same_answer(row["reference"], answer(row["prompt"], row["draft_ids"][:cut]))
                found.add(value)
    assert found == {0.0, 1.0}
    card = Path(config.output_dir, "README.md").read_text()
    assert "the target's own from the bare prompt" in card and "check_with: own_answer" in card

    categories = {p.id: p.metadata.get("category", "jsonl") for p in load_task("jsonl", **log).problems("train")}
    assert set(categories.values()) == {"qa", "jsonl"}
    assert all(row.domain == categories[row.problem] for row in read_rows(config.output_dir))

    with pytest.raises(ValueError, match="was begun with check_with 'own_answer'"):
        check_identity(Path(config.output_dir), replace(config, check_with="task").identity())


@pytest.mark.slow
def test_the_share_of_the_most_frequent_answer_is_the_target_value(
    make_config: Make, log: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[str]] = {}
    take = OwnAnswers.with_reference

    def spy(self: OwnAnswers, problem: Problem, answers: list[str]) -> Problem:
        drawn[problem.id] = answers
        return take(self, problem, answers)

    monkeypatch.setattr(OwnAnswers, "with_reference", spy)
    sampled = {"rollouts": 8, "max_rollouts": 16, "rollout_temperature": 0.5, "margin": 0.25, "limit": 4}
    parts = {"parts": [{"task": "jsonl", "domain": "log", **log}]}
    config = make_config(task="mixture", task_options=parts, check_with="own_answer", **sampled)
    build(config)
    rows = rows_of(config)
    for row in rows:
        votes = [
            sum(same_answer(one, other) for other in drawn[row["problem_id"]]) for one in drawn[row["problem_id"]]
        ]
        assert row["target_value"] == max(votes) / len(votes) and row["domain"] == "log"  # of the finished answers
        assert len(votes) <= row["n_rollouts"] == 16
    assert len({row["target_value"] for row in rows}) > 1


def test_prompts_without_an_answer_of_the_target_have_no_rows(make_config: Make, log: dict[str, Any]) -> None:
    options = {"task_options": log, "check_with": "own_answer", "limit": 10, "max_rollout_tokens": 4}
    build(config := make_config("all", **options))
    rows = rows_of(config)
    assert all(row["reference"] and row["target_value"] for row in rows), "else nothing is known"
    assert 0 < len({row["problem_id"] for row in rows}) < 10
    build(dropped := make_config("dropped", **options, drop_unsolved=True))
    assert rows_of(dropped) == rows


@pytest.mark.parametrize(
    ("answers", "reference"),
    [
        (["#### 3", "so \\boxed{4}", "#### 4.0"], "#### 4"),
        (["#### 3", "#### 4"], "#### 3"),
        (["It is 5.\nThe answer is (B).", "**Answer: B) 5**", "#### A"], "#### (B)"),
        (["She has 18", "She has 7"], "She has 18"),
        ([], ""),
    ],
)
def test_the_most_frequent_answer_wins_and_the_first_of_a_tie(answers: list[str], reference: str) -> None:
    task = OwnAnswers(load_task("gsm_symbolic"))
    problem = task.with_reference(Problem("p", "q", "old"), answers)
    assert problem.reference == reference
    assert not task.check(Problem("p", "q", ""), ""), "an empty text equals no reference"


def test_folders_of_earlier_versions_have_no_such_key(make_config: Make) -> None:
    assert "check_with" not in make_config().identity()
    assert make_config(check_with="own_answer").identity()["check_with"] == "own_answer"
    with pytest.raises(ValueError, match="check_with is own; it must be task or own_answer"):
        make_config(check_with="own")
