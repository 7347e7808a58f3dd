"""A first build that fails leaves nothing behind, and a cut-off rollout and a known prompt leave their counts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.backends import LocalDecoder
from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.build_plan import make_plan
from data_tools.labels.inspect import inspect_folder
from data_tools.labels.rollout_counts import RolloutCounts
from data_tools.labels.rows import read_rows
from data_tools.labels.shards import GroupFolder
from data_tools.tasks.registry import load_task
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.models.train_problems import TRAIN_PROBLEMS, write_train_problems

Make = Callable[..., BuildConfig]


def options(config: BuildConfig, **more: Any) -> dict[str, Any]:
    return {**config.task_options, **more}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": "zoo:tagret"}, "did you mean 'zoo:target'"),
        ({"target": "./nowhere"}, "There is no folder './nowhere'"),
        ({"split": "test", "task_options": {"split": "train"}}, "has no problem in its split test"),
        ({"task_options": {"unreferenced": True}}, "cannot check the answer"),
        ({"task_options": {"long": True}}, "problem 0-long: The prompt has"),
        ({"task_options": {"exclude": "all"}}, "all 2 problems of task mixture in its split train are excluded"),
    ],
)
def test_a_failed_first_build_leaves_nothing_and_binds_nothing(
    make_config: Make, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Whatever the error advises to change can be changed in the same folder."""
    kinds = change.get("task_options", {})
    rows = [{"prompt": f"{letter}bc", "reference": "[a-z]", "id": letter} for letter in "xy"]
    if "split" in kinds:
        rows = [row | kinds for row in rows]
    if "long" in kinds:
        rows = [{"prompt": "ab " * 3000, "reference": "7", "id": "long"}]
    part = {"task": "jsonl", "path": str(tmp_path / "p.jsonl"), "check_with": "regex"}
    if "unreferenced" in kinds:
        rows, part["check_with"] = [{"prompt": "xbc"}], "none"
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {"task": "mixture", "task_options": {"parts": [part]}}
    if "exclude" in kinds:
        task["task_options"]["exclude"] = [prompt_hash(row["prompt"]) for row in rows]
    others = {key: value for key, value in change.items() if key != "task_options"}
    config = make_config(**(task | others))
    with pytest.raises((ValueError, OSError), match=message):
        build(config)
    assert not Path(config.output_dir).exists()
    assert build(make_config(seed=5, limit=1)).problems == 1


def test_a_build_that_fails_in_its_first_group_can_be_changed(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def out_of_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    config = make_config(limit=2)
    with monkeypatch.context() as patched:
        patched.setattr(LocalDecoder, "write", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            build(config)
    assert not Path(config.output_dir).exists()
    build(make_config(limit=2, batch_size=3))
    settings = json.loads(Path(config.output_dir, "build.json").read_text())
    assert settings["config"]["batch_size"] == 3 and set(settings["models"]) == {"target", "draft"}
    with pytest.raises(ValueError, match="was begun with batch_size 3, not 8"):
        build(config)


def test_settings_that_a_kill_left_without_rows_bind_nothing(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path / "data", "train")
    with folder.held({"seed": 0}):
        folder.write_settings()
        settings = (tmp_path / "data" / "build.json").read_text()
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "build.json").write_text(settings)
    with folder.held({"seed": 1}):
        folder.write(range(1), [])
    with pytest.raises(ValueError, match="seed 1, not 0"), folder.held({"seed": 0}):
        pass


def test_prompts_that_the_draft_model_learnt_are_left_out(
    make_config: Make, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    problems = list(load_task("jsonl", **config.task_options).problems("train"))
    learnt = {prompt_hash(problem.prompt) for problem in problems[:40]}
    extra = prompt_hash(problems[50].prompt)
    known = {"draft": learnt, "target": {prompt_hash(problems[45].prompt)}}
    try:
        for role, hashes in known.items():
            write_train_problems(pair / role, hashes)
        summary = build(make_config(limit=10, task_options=options(config, exclude=extra)))
    finally:
        for role in known:
            (pair / role / TRAIN_PROBLEMS).unlink(missing_ok=True)
    labelled = {row.prompt for row in read_rows(config.output_dir)}
    assert len(labelled) == 10 and not {prompt_hash(prompt) for prompt in labelled} & (learnt | {extra})
    assert problems[45].prompt not in labelled and summary.left_out == 42
    line = ("excluded problems, left out", "42")
    assert line in summary.lines() and f"| {line[0]} | 42 |" in Path(config.output_dir, "README.md").read_text()


@pytest.mark.parametrize(("cut", "warns"), [(0, False), (20, False), (21, True)])
def test_a_build_warns_above_two_percent_of_cut_rollouts(cut: int, warns: bool) -> None:
    assert (RolloutCounts(rollouts=1000, cut=cut).warning(256) is not None) == warns


@pytest.mark.slow
def test_rollouts_that_were_cut_off_are_counted_and_no_wrong_answers(
    make_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a budget that cuts off nothing more, known values stay as they are, and unknown ones appear."""
    short, long = (make_config(name, exhaustive=True, max_rollout_tokens=n) for name, n in (("a", 8), ("b", 100)))
    cut, whole = build(short), build(long)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 2 and re.search(r"warning: \d+ of \d+ rollouts \(\d+\.\d%\) were cut off", said)
    assert "were cut off at max_rollout_tokens, 8, and decide nothing: raise max_rollout_tokens" in said
    assert 0 < cut.rollouts.unanswered < 12 and cut.rollouts.cut > whole.rollouts.cut
    assert None in cut.target_values.values()
    for problem, value in cut.target_values.items():
        assert value in (None, whole.target_values[problem])
    for some, full in zip(read_rows(short.output_dir), read_rows(long.output_dir), strict=True):
        known = dict(zip(full.cuts or (), full.values, strict=True))
        for at, value in zip(some.cuts or (), some.values, strict=True):
            assert value in (None, known.get(at))
    assert "cut-off rollouts, left out" in dict(cut.lines())
    assert inspect_folder(short.output_dir, 0).rollouts == cut.rollouts
    build(short)  # a finished build warns again
    assert "were cut off at max_rollout_tokens" in capsys.readouterr().err


def test_counts_include_problems_without_rows_and_interrupted_builds(make_config: Make) -> None:
    config = make_config(max_rollout_tokens=8, drop_unsolved=True, problems_per_group=4)
    whole = build(make_config("whole", max_rollout_tokens=8, drop_unsolved=True, problems_per_group=4)).rollouts
    config.limit = 4
    build(config)
    config.limit = 12
    assert build(config).rollouts == whole
    assert whole.unanswered and whole.rollouts > 12


def test_a_plan_does_not_count_cut_rollouts_as_wrong_answers(make_config: Make) -> None:
    config = make_config(drop_unsolved=True, max_rollout_tokens=8)
    summary = build(config)
    rows = {row.problem: row for row in read_rows(config.output_dir)}
    matches = dict.fromkeys((row.where for row in rows.values()), 1)
    plan = make_plan(config, summary, 12, list(rows.values()), matches, None, None)
    assert plan.target_right.value == pytest.approx(len(rows) / (12 - summary.rollouts.unanswered))


def test_a_sampled_draft_does_not_replace_the_equal_greedy_one(make_config: Make) -> None:
    """In whichever order the temperatures are named."""
    config = make_config(temperatures=[1e-6, 0.0], prefix_labels=False, limit=6)
    build(config)
    rows = list(read_rows(config.output_dir))
    assert rows and {row.temperature for row in rows} == {0.0}
