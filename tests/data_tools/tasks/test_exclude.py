"""Every task leaves out the prompts that its option `exclude` names."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_tools.tasks import exclude, reading
from data_tools.tasks.exclude import WithoutPrompts
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.models.train_problems import read_train_problems, train_problems_of, write_train_problems


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A jsonl file that three tasks read."""
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i} and 1?", "question": f"{i}?", "answer": "#### 1", "reference": "1"} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


TASKS: dict[str, dict[str, Any]] = {
    "jsonl": {"path": "rows"},
    "gsm8k": {"path": "rows"},
    "dataset": {"path": "json", "data_files": {"train": "rows"}},
    "reasoning_gym": {"names": ["chain_sum", "leg_counting"]},
    "gsm_symbolic": {},
    "mixture": {"parts": [{"task": "jsonl", "path": "rows", "weight": 2}, {"task": "gsm_symbolic"}]},
}


def with_file(options: Any, path: Path) -> Any:
    text = json.dumps(options).replace('"rows"', json.dumps(str(path)))
    return json.loads(text)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_leaves_out_excluded_prompts(name: str, rows: Path) -> None:
    options = with_file(TASKS[name], rows)
    problems = list(islice(load_task(name, **options).problems("train", 3), 8))
    known = [prompt_hash(problem.prompt) for problem in problems[:3]]
    task = load_task(name, **options, exclude=known)
    found = list(task.problems("train", 3, 4))
    assert [p.prompt for p in found] == [p.prompt for p in problems if prompt_hash(p.prompt) not in known][:4]
    assert isinstance(task, WithoutPrompts) and task.left_out >= 3
    assert task.name == name and task.check(found[0], found[0].reference) in (True, False)


def test_a_part_of_a_mixture_has_its_own(rows: Path) -> None:
    part = {"task": "jsonl", "path": str(rows)}
    first = next(iter(load_task(**part_options(part)).problems("train")))
    whole, less = (load_task("mixture", parts=[part | more]) for more in ({}, {"exclude": prompt_hash(first.prompt)}))
    assert first.prompt in {p.prompt for p in whole.problems("train")}
    assert first.prompt not in {p.prompt for p in less.problems("train")}


def part_options(part: dict[str, Any]) -> dict[str, Any]:
    return {"name": part["task"], "path": part["path"]}


@pytest.mark.parametrize("kind", ["text", "list", "hashes", "problems", "folder", "several"])
def test_excluded_prompts_are_named_in_files_folders_and_lists(kind: str, rows: Path, tmp_path: Path) -> None:
    problems = list(load_task("jsonl", path=str(rows)).problems("train"))
    hashes = [prompt_hash(problem.prompt) for problem in problems[:5]]
    (tmp_path / "hashes.txt").write_text("\n".join(hashes) + "\n")
    (tmp_path / "model").mkdir()
    write_train_problems(tmp_path / "model", hashes)
    (tmp_path / "other.jsonl").write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": p.prompt}]}) + "\n" for p in problems[:5])
    )
    named: dict[str, str | list[str]] = {
        "text": hashes[0],
        "list": hashes,
        "hashes": str(tmp_path / "hashes.txt"),
        "problems": str(tmp_path / "other.jsonl"),
        "folder": str(tmp_path / "model"),
        "several": [str(tmp_path / "model"), prompt_hash(problems[5].prompt)],
    }
    n = {"text": 1, "several": 6}.get(kind, 5)
    assert list(load_task("jsonl", path=str(rows), exclude=named[kind]).problems("train")) == problems[n:]


def test_an_embedded_adapter_can_be_excluded() -> None:
    seeds = {"seed": 3}
    known = load_task("gsm_symbolic", exclude="zoo:adapter")
    assert isinstance(known, WithoutPrompts) and len(known.excluded) > 2000
    assert not known.excluded & {prompt_hash(p.prompt) for p in known.problems("train", limit=20, **seeds)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "option exclude of task jsonl is 3; it must be a text or a list, each entry a text"),
        ("nowhere.jsonl", "no file nowhere.jsonl"),
        ("./nowhere", "There is no folder './nowhere'"),
        ("nowhere", "option exclude has 'nowhere', which is neither a hash"),
        (["empty"], "option exclude has 'empty', which is neither a hash"),
        ("prompts.txt", "prompts.txt has 'What', which is no hash of a prompt"),
    ],
)
def test_what_names_no_prompts_is_refused(
    value: Any, message: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("prompts.txt").write_text("What is 1?\n")
    with pytest.raises((ValueError, OSError)) as caught:
        load_task("jsonl", path=str(rows), exclude=value)
    assert message in str(caught.value)


class Repeating:
    """A generator without end that knows one prompt."""

    name = "repeating"

    def problems(self, split: str, seed: int = 0, limit: int | None = None) -> Any:
        while True:
            yield Problem("p", "What is 1 and 1?", "2")

    def check(self, problem: Problem, completion: str) -> bool:
        return completion == problem.reference


def test_a_generator_that_repeats_excluded_problems_only_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclude, "_SPARE", 100)
    task = WithoutPrompts(Repeating(), {prompt_hash("What is 1 and 1?")})
    with pytest.raises(ValueError, match="problems of task repeating are all excluded"):
        next(task.problems("train"))


def test_a_model_and_its_lora_list_their_prompts(tmp_path: Path) -> None:
    base, lora = tmp_path / "base", tmp_path / "lora"
    for folder in (base, lora):
        folder.mkdir()
    write_train_problems(base, ["a" * 16, "b" * 16, "a" * 16])
    assert read_train_problems(base) == train_problems_of(base) == {"a" * 16, "b" * 16}
    assert train_problems_of(lora) == read_train_problems(lora) == frozenset()
    write_train_problems(lora, ["c" * 16])
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base)}))
    (lora / "adapter_model.safetensors").touch()
    assert train_problems_of(lora) == {"a" * 16, "b" * 16, "c" * 16}
    assert train_problems_of("zoo:draft") == frozenset()


def test_only_a_long_reading_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(terminal: bool) -> str:
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=100)
        assert list(reading.reading(range(5), "reading prompts", 5, console)) == list(range(5))
        return stream.getvalue()

    assert not shown(False) and not shown(True)
    monkeypatch.setattr(reading, "SILENT_S", 0.0)
    assert shown(False) == "reading prompts: 1 of 5\n"
    assert "reading prompts" in shown(True) and "5/5" in shown(True)
    monkeypatch.setattr(reading, "LINE_EVERY_S", 0.0)
    assert shown(False).splitlines()[-1] == "reading prompts: 5 of 5"
