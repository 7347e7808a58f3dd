"""lm-eval's tasks as tasks of builds and benchmarks: its prompts, and its own checks."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.parse_infer.lm_eval_tasks import own_tasks, write_apples

from data_tools.tasks.lm_eval import tasks as lm_eval_tasks  # isort: skip  (after the skip where lm-eval is missing)
from data_tools.tasks.lm_eval.problems import LmEval  # isort: skip

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    folder = write_apples(tmp_path_factory.mktemp("tasks"), ["4", "5", "6"], stops=["\n\n"])
    return own_tasks(folder)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch, registered):
    monkeypatch.setattr(lm_eval_tasks, "_manager", lambda: registered)


@pytest.fixture
def gsm8k(tmp_path):
    files = {}
    for split, count in (("train", 40), ("test", 3)):
        rows = [{"question": f"{split} {i}?", "answer": f"So <<{i}>>.\n#### {i}"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files[split] = str(tmp_path / f"{split}.jsonl")
    return LmEval("gsm8k", data=files)


def test_the_task_is_registered():
    points = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["entry-points"]["parse_engine.tasks"]
    assert EntryPoint("lm_eval", points["lm_eval"], "parse_engine.tasks").load() is LmEval


def test_prompts_are_lm_evals_without_examples_and_splits_are_disjoint(gsm8k):
    found = {split: list(gsm8k.problems(split)) for split in ("train", "validation", "test")}
    assert sorted(p.prompt for p in found["test"]) == [f"Question: test {i}?\nAnswer:" for i in range(3)]
    assert {p.id for p in found["test"]} == {f"gsm8k-test-{i}" for i in range(3)}
    train, validation = ({p.prompt for p in found[split]} for split in ("train", "validation"))
    assert len(train | validation) == 40 and validation and not train & validation
    assert found["train"][:3] == list(gsm8k.problems("train", limit=3)) != list(gsm8k.problems("train", 1, 3))


def test_answers_are_checked_by_the_tasks_filters_and_metric(gsm8k):
    problem = next(p for p in gsm8k.problems("test") if p.id == "gsm8k-test-2")
    assert gsm8k.check(problem, "One more is 2.\n#### 2")
    assert gsm8k.check(problem, "First 1, and then it is 2."), "the filter flexible-extract"
    assert gsm8k.check(problem, "#### 2\n\nQuestion: And 5?\nAnswer: 5"), "ends at the task's stop string"
    assert not gsm8k.check(problem, "First 2, and then it is 3.\n#### 3")


def test_a_task_with_test_problems_alone(registered):
    task = LmEval("apples")
    found = {p.reference: p for p in task.problems("test")}
    assert found.keys() == {"4", "5", "6"}
    assert task.check(found["4"], "4\n\nMore.") and not task.check(found["4"], "5")
    with pytest.raises(ValueError, match="'apples' has no problems for the split train, only test"):
        next(task.problems("train"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "needs the option lm_eval_task: a generative task"),
        ("gsm9k", "unknown task 'gsm9k'; did you mean 'gsm8k'"),
        ("arc_easy", "scored by log-likelihoods"),
        ("mt_bench", "mt_bench.* has the metrics .*: choose a task with exact_match"),
        ("pears", "has several tasks: choose one of apples, plums"),
    ],
)
def test_tasks_that_cannot_serve_are_refused(name, message, tmp_path, monkeypatch):
    if name == "pears":
        for each in ("apples", "plums"):
            write_apples(tmp_path, ["4"], name=each)
        (tmp_path / "group.yaml").write_text(json.dumps({"group": "pears", "task": ["apples", "plums"]}))
        manager = own_tasks(tmp_path)
        monkeypatch.setattr(lm_eval_tasks, "_manager", lambda: manager)
    data = {}
    if name == "mt_bench":
        (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": ["Write."], "category": "writing"}))
        data = {"train": str(tmp_path / "questions.jsonl")}
    with pytest.raises(ValueError, match=message):
        LmEval(name, data=data)
