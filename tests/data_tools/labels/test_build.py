"""A build is complete, right, repeatable, and survives being killed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data_tools.cli import main
from data_tools.labels.backends import LocalWriter
from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.card import write_card
from data_tools.labels.labeller import Labeller
from data_tools.labels.progress import BuildProgress
from data_tools.labels.rows import read_rows
from data_tools.labels.sequential_test import SequentialTest, Tally
from data_tools.labels.shards import GroupFolder, parts_of
from data_tools.labels.summary import summarise_labels
from data_tools.recipe_parser import parse_recipe
from data_tools.tasks.registry import load_task
from parse_infer.decoding.loop import run_sync
from parse_infer.errors import ParseError
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.cuts import Segmenter
from tests.parse_infer.language_models import word_tokenizer

Make = Callable[..., BuildConfig]


def files(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder, "data").iterdir())}


def content(folder: str | Path) -> bytes:
    return b"".join(files(folder).values())


def fractions(share: float, most: int) -> list[Tally]:
    """The tallies of at most `most` finished rollouts with this share of right ones."""
    return [Tally(round(share * n), n) for n in range(1, most + 1) if round(share * n) / n == share]


def values_of(row: dict[str, Any]) -> dict[int, float | None]:
    return dict(zip(row["cuts"], row["values"], strict=True))


def rows_of(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content(folder).splitlines()]


@pytest.fixture(scope="module")
def target(pair: Path) -> LanguageModel:
    return load_language_model(pair / "target", role="target")


@pytest.mark.slow
def test_rows_are_complete_and_their_values_right(make_config: Make, target: LanguageModel) -> None:
    config = make_config()
    summary = build(config)
    rows = rows_of(config.output_dir)
    task = load_task(config.task, **config.task_options)
    problems = {problem.id: problem for problem in task.problems("train", 0, config.limit)}
    assert summary.rows == len(rows) > len(problems)
    assert {row["problem_id"] for row in rows} == set(problems)
    assert 0 < summary.valid < summary.prefixes
    assert summary.measured > summary.rows - summary.unfinished  # not only last prefixes, which need no rollout

    def value(problem_id: str, prefix: list[int]) -> float | None:
        """One greedy rollout, decoded alone; None if it was cut off."""
        problem = problems[problem_id]
        target.decoder.seek(target.render(problem.prompt) + prefix)
        answer = prefix + list(target.decoder.decode(config.max_rollout_tokens))
        text = target.tokenizer.decode(answer, skip_special_tokens=True)
        return float(task.check(problem, text)) if answer[-1] in target.eos_ids else None

    checked = 0
    for row in rows:
        ids, cuts = row["draft_ids"], row["cuts"]
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(row["completions"]) == text
        assert len(row["completions"]) == len(row["labels"]) == len(row["values"]) == len(cuts)
        assert cuts[-1] == len(ids) <= config.max_draft_tokens
        assert row["finished"] == (ids[-1] == target.end_token)
        right = row["finished"] and task.check(problems[row["problem_id"]], text)
        assert row["draft_correct"] == right
        assert not row["finished"] or (row["labels"][-1], row["values"][-1]) == (right, float(right))
        assert row["target_value"] == value(row["problem_id"], [])
        last_open = len(cuts) - row["finished"]
        for k in range(last_open):
            if row["values"][k] is not None:
                assert row["values"][k] == value(row["problem_id"], ids[: cuts[k]])
                assert row["labels"][k] == (row["values"][k] >= row["target_value"])
                checked += 1
    assert checked > 3


def test_a_draft_has_no_more_labels_than_its_policy_says(make_config: Make) -> None:
    """Each may cost a rollout; how many cuts are judged at inference is another matter."""
    config = make_config(limit=4, cut_policy={"kind": "tokens", "every": 1, "max_cuts": 3})
    build(config)
    rows = rows_of(config.output_dir)
    for row in rows:
        n = len(row["draft_ids"])
        if row["undecided"]:  # a rollout was cut off
            continue
        assert row["cuts"] == list(range(1, n + 1)) if n <= 3 else [n // 3, 2 * n // 3, n]
    assert any(len(row["draft_ids"]) > 3 for row in rows)


@pytest.mark.slow
def test_a_rollout_says_nothing_about_shorter_prefixes(make_config: Make) -> None:
    """A greedy rollout serves longer prefixes on its path; the draft before it is not the target's path."""
    cuts = {"kind": "tokens", "every": 1, "max_cuts": 4096}
    searched, exhaustive = (make_config(n, limit=40, cut_policy=cuts, exhaustive=n == "b") for n in ("a", "b"))
    build(searched)
    build(exhaustive)
    measured = [
        (value, values_of(full)[cut])
        for some, full in zip(rows_of(searched.output_dir), rows_of(exhaustive.output_dir), strict=True)
        for cut, value in values_of(some).items()
        if value is not None
    ]
    assert len(measured) > 50 and {value for value, _ in measured} == {0.0, 1.0}
    assert all(value == truth for value, truth in measured)


def test_exhaustive_builds_measure_every_prefix(make_config: Make) -> None:
    searched, exhaustive = make_config("a", limit=6), make_config("b", limit=6, exhaustive=True)
    build(searched)
    build(exhaustive)
    for some, full in zip(rows_of(searched.output_dir), rows_of(exhaustive.output_dir), strict=True):
        assert None not in full["values"]
        assert full["undecided"] or set(some["cuts"]) <= set(full["cuts"])
        for cut, value in values_of(some).items():
            assert value in (None, values_of(full).get(cut))


@pytest.mark.parametrize("options", [{}, {"drop_unsolved": True}, {"check_with": "own_answer"}])
@pytest.mark.slow
def test_labels_of_whole_drafts_are_the_last_ones_of_a_search(
    make_config: Make, pair: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """They need no rollout from a draft, and none at all where references decide about all problems."""
    if "check_with" in options:  # another model hardly ever gives the same answer
        options = options | {"draft": str(pair / "target")}
    searched = make_config("a", limit=24, max_draft_tokens=40, **options)
    whole = make_config("b", limit=24, max_draft_tokens=40, prefix_labels=False, **options)
    summary, lone = build(searched), build(whole)
    n_finished, cut_off = 0, []
    for row, one in zip(rows_of(searched.output_dir), rows_of(whole.output_dir), strict=True):
        assert one["target_value"] == (row["target_value"] if options else None)
        assert one["prompt"] == row["prompt"]
        assert one["finished"] == row["finished"]
        if not row["finished"] or not row["reference"]:
            cut_off.append(one)
            continue
        n_finished += 1
        assert one["draft_ids"] == row["draft_ids"] and one["cuts"] == [len(row["draft_ids"])]
        assert one["labels"] == row["labels"][-1:] == [one["draft_correct"]]
        assert one["completions"] == ["".join(row["completions"])]
    n_unfinished = summary.rows + summary.without_label - n_finished
    wrong = sum(one["labels"] == [False] and not one["draft_correct"] for one in cut_off)
    open_ones = sum(one["labels"] == [] and one["undecided"] == 1 for one in cut_off)
    assert n_unfinished == len(cut_off) == wrong + open_ones
    assert lone.rows == lone.prefixes == n_finished + wrong and lone.without_label == open_ones
    assert n_unfinished > 0 or "check_with" in options
    assert 0 < lone.valid < lone.prefixes
    for config, knows in ((searched, True), (whole, False)):
        capsys.readouterr()
        assert main(["inspect", config.output_dir]) == 0
        assert ("first error, position" in capsys.readouterr().out) == knows
    card = Path(whole.output_dir, "README.md").read_text()
    assert "# Whole drafts of" in card and "perfect judge" not in card and "Position" not in card


def test_a_whole_draft_that_its_budget_cuts_off_is_wrong_unless_it_has_answered(
    make_config: Make, target: LanguageModel
) -> None:
    config = make_config(limit=12, max_draft_tokens=6, prefix_labels=False)
    summary = build(config)
    problems = load_task(config.task, **config.task_options)
    known = {problem.id: problem for problem in problems.problems("train", 0, config.limit)}
    kinds = set()
    for row in rows_of(config.output_dir):
        if row["finished"]:
            continue
        text = target.tokenizer.decode(row["draft_ids"])
        answered = not row["labels"]
        assert answered or (row["labels"] == [False] and not problems.check(known[row["problem_id"]], text))
        assert row["draft_correct"] is False
        kinds.add(answered)
    assert kinds == {False, True} and summary.unfinished > 0
    build(prefixes := make_config("b", limit=2, max_draft_tokens=6, max_rollout_tokens=1))
    assert all(not row["labels"] for row in rows_of(prefixes.output_dir) if not row["finished"]), "rollouts decide"


def test_the_targets_chance_is_measured_without_dropping_unsolved_problems(make_config: Make) -> None:
    options = {"prefix_labels": False, "rollout_temperature": 1.0, "limit": 10}
    build(plain := make_config("a", **options))
    build(config := make_config("b", **options, target_chance=True, max_rollouts=4))
    assert plain.asks_target is False and "target_chance" not in plain.identity()
    rows = rows_of(config.output_dir)
    assert [row | {"target_value": None, "n_rollouts": 0} for row in rows] == [
        row | {"n_rollouts": 0} for row in rows_of(plain.output_dir)
    ]
    chances = {row["problem_id"]: row["target_value"] for row in rows if row["target_value"] is not None}
    assert 0.0 in chances.values() and any(0 < chance < 1 for chance in chances.values())


def test_code_drafts_weigh_by_the_targets_chance() -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "qwen-coder" / "data-code.yaml"
    (config,) = parse_recipe(recipe, [], [BuildConfig], "parse-data build")
    assert config.asks_target and not config.drop_unsolved and not config.prefix_labels
    assert config.max_rollouts == 8 and not config.rollout_sampling.greedy


def test_labels_of_whole_drafts_exclude_finer_ones(make_config: Make) -> None:
    with pytest.raises(ParseError, match="exhaustive is true, but prefix_labels is false"):
        make_config(prefix_labels=False, exhaustive=True)
    make_config(prefix_labels=False, check_with="own_answer", rollout_temperature=0.7)  # no margin


@pytest.mark.parametrize("prefix_labels", [False, True])
def test_without_an_own_answer_a_draft_has_no_labels(make_config: Make, prefix_labels: bool) -> None:
    config = make_config(prefix_labels=prefix_labels, check_with="own_answer", max_rollout_tokens=1)
    assert build(config).rows == 0 and not rows_of(config.output_dir)


def test_folders_of_earlier_versions_continue(make_config: Make) -> None:
    config = make_config(limit=4)
    build(config)
    settings = json.loads(Path(config.output_dir, "build.json").read_text())["config"]
    assert not {"draft_dtype", "prefix_labels", "logprobs"} & set(settings)
    with pytest.raises(ValueError, match="draft_dtype"):
        build(make_config(limit=6, draft_dtype="float32"))


SAMPLED = {"rollouts": 4, "max_rollouts": 16, "rollout_temperature": 1.0, "margin": 0.4}


@pytest.mark.slow
def test_sampled_rollouts_are_shares_and_do_not_depend_on_batches(make_config: Make) -> None:
    options = SAMPLED | {"limit": 6}
    one, other = make_config("a", **options), make_config("b", **options, batch_size=3, problems_per_group=2)
    build(one)
    build(other)
    assert content(one.output_dir) == content(other.output_dir)
    rows = rows_of(one.output_dir)
    assert all(fractions(row["target_value"], 16) for row in rows if row["target_value"] is not None)
    assert any(0 < value < 1 for row in rows for value in row["values"] if value is not None)
    build_again = make_config("c", **options, seed=1)
    build(build_again)
    assert content(one.output_dir) != content(build_again.output_dir)


@pytest.mark.slow
def test_sampled_labels_are_certain_enough_and_undecided_prefixes_have_none(
    make_config: Make, target: LanguageModel
) -> None:
    config = make_config(**SAMPLED, max_label_error=0.2, exhaustive=True)
    summary = build(config)
    rows, segmenter = rows_of(config.output_dir), Segmenter(target.tokenizer, config.policy)
    found = set()
    for row in rows:
        n = len(row["cuts"])
        assert len(row["labels"]) == len(row["values"]) == len(row["confidence"]) == len(row["completions"]) == n
        assert row["draft_ids"] == [] if not n else row["cuts"][-1] == len(row["draft_ids"])
        assert target.tokenizer.decode(row["draft_ids"], skip_special_tokens=True) == "".join(row["completions"])
        of_rule = set(segmenter.cuts(row["draft_ids"])) if n else set()
        assert set(row["cuts"]) <= of_rule and n + row["undecided"] >= len(of_rule)
        for k in range(n - row["finished"]):
            assert row["confidence"][k] >= 0.8
            possible = [
                SequentialTest(prompt, 0.4, 0.2, 4, 16).decide(prefix)
                for prompt in fractions(row["target_value"], 16)
                for prefix in fractions(row["values"][k], 16)
            ]
            stated = (row["labels"][k], row["confidence"][k])
            assert stated in {(one.valid, round(one.confidence, 4)) for one in possible}
            found.add(row["labels"][k])
        if row["finished"]:
            assert (row["confidence"][-1], row["values"][-1]) == (1.0, float(row["draft_correct"]))
    assert True in found  # this target finds its way back from any draft
    assert summary.undecided == sum(row["undecided"] for row in rows) > 0
    assert summary.prefixes == sum(len(row["labels"]) for row in rows)
    assert summary.without_label == sum(not row["labels"] for row in rows) > 0
    card = Path(config.output_dir, "README.md").read_text()
    assert "keeps at least 60% of its chance" in card and "| undecided prefixes, left out |" in card


def test_greedy_labels_are_those_of_one_rollout(make_config: Make) -> None:
    """Everything is certain, and undecided only where a rollout was cut off."""
    config = make_config(exhaustive=True)
    build(config)
    rows = rows_of(config.output_dir)
    assert 0 < sum(row["undecided"] == 0 for row in rows) < len(rows)
    for row in rows:
        assert row["confidence"] == [1.0] * len(row["labels"]) and row["n_rollouts"] == 1
        if row["target_value"] is None:
            assert row["labels"] == [row["draft_correct"]] * row["finished"]
            continue
        open_prefixes = len(row["labels"]) - row["finished"]
        expected = [value >= row["target_value"] for value in row["values"][:open_prefixes]]
        assert row["labels"] == expected + [row["draft_correct"]] * row["finished"]


def test_unsolved_problems_can_be_left_out(make_config: Make) -> None:
    config = make_config(drop_unsolved=True)
    summary = build(config)
    assert summary.unsolved == 0 < summary.problems < config.limit
    assert "| problems | 12 |" in Path(config.output_dir, "README.md").read_text()


def test_a_prompt_beyond_a_window_is_left_out(
    make_config: Make, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = pair.joinpath("problems.jsonl").read_text().splitlines()[:5]
    long = {"id": "long", "prompt": "ab " * 3000, "reference": "7"}
    (tmp_path / "long.jsonl").write_text("\n".join([*problems, json.dumps(long)]))
    options = {"path": str(tmp_path / "long.jsonl"), "check_with": "regex"}
    config = make_config(task_options=options, limit=6)
    build(config)
    assert {row["problem_id"] for row in rows_of(config.output_dir)} == {f"p{i}" for i in range(5)}
    assert "left out: problem long: The prompt has" in capsys.readouterr().err
    options["path"] = str(tmp_path / "long.jsonl")
    alone = make_config("alone", task_options=options, limit=6, problems_per_group=1)
    build(alone)  # its group has no other problem
    assert rows_of(alone.output_dir) == rows_of(config.output_dir)
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    with pytest.raises(ValueError, match="problem long: The prompt has"):
        build(make_config("none", task_options=options, limit=1))


def test_labels_need_references_in_every_part_of_a_task(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "ab?"}\n')
    part = {"task": "jsonl", "path": str(tmp_path / "own.jsonl"), "check_with": "none"}
    with pytest.raises(ValueError, match="cannot check the answer to problem 0-prompt-"):
        build(make_config(task="mixture", task_options={"parts": [part]}, limit=1))


def test_messages_and_a_draft_with_another_tokenizer(
    make_config: Make, target: LanguageModel, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    tokenizer: PreTrainedTokenizerFast = word_tokenizer()
    model = make_model("llama", seed=4, vocab_size=300)
    draft = LanguageModel("other", model, tokenizer)
    draft.eos_ids = set(range(0, 300, 5))
    problems = [{"prompt": [{"role": "user", "content": f"question {i}"}], "reference": "[a-z]"} for i in range(4)]
    path = tmp_path / "messages.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    config = make_config(task_options={"path": str(path), "check_with": "regex"}, temperatures=[1.0])
    task = load_task(config.task, **config.task_options)
    labeller = Labeller(config, task, LocalWriter(target, 8), LocalWriter(draft, 8))
    rows, _ = run_sync(labeller.label(list(task.problems("train"))))
    assert any(row["finished"] for row in rows)
    for row in rows:
        text = "".join(row["completions"])
        assert row["finished"] == (row["draft_ids"][-1] == target.end_token)
        assert target.tokenizer.decode(row["draft_ids"], skip_special_tokens=True) == text
        assert row["prompt"][0]["role"] == "user"


_RUN = "import json, sys; from data_tools.labels.build import *; build(BuildConfig(**json.loads(sys.argv[1])))"


@pytest.mark.parametrize("options", [{}, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_a_killed_build_resumes_with_the_same_rows(make_config: Make, options: dict[str, Any]) -> None:
    whole, killed = (make_config(name, limit=14, problems_per_group=2, **options) for name in ("whole", "killed"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, "-c", _RUN, json.dumps(asdict(killed))], env=environment)
    data = Path(killed.output_dir, "data")
    try:
        while process.poll() is None and len(list(data.glob("*.jsonl"))) < 3:
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 3 <= len(list(data.glob("*.jsonl"))) < 7
    # The worst moment: part of a row has reached the disk.
    (data / ".train-000012-000014.jsonl.4711.partial").write_bytes(b'{"prompt": "ab')
    build(killed)
    build(whole)
    assert files(killed.output_dir) == files(whole.output_dir)
    assert Path(killed.output_dir, "README.md").read_text() == Path(whole.output_dir, "README.md").read_text()


@pytest.mark.slow
def test_a_finished_build_can_be_extended_but_not_changed(make_config: Make, pair: Path) -> None:
    short, full = make_config("a", limit=6, problems_per_group=4), make_config("b", limit=10, problems_per_group=4)
    build(short)
    before = files(short.output_dir)
    assert list(before) == ["train-000000-000004.jsonl", "train-000004-000006.jsonl"]
    build(short)
    assert files(short.output_dir) == before
    short.limit = 10
    build(short)
    build(full)
    assert files(short.output_dir) == files(full.output_dir)
    assert list(files(full.output_dir)) == [f"train-{name}.jsonl" for name in _NAMES]

    for change, message in (
        ({"margin": 0.25}, "margin 0.0, not 0.25"),
        ({"max_label_error": 0.1}, "max_label_error 0.05, not 0.1"),
        ({"temperatures": [0.0]}, "temperatures"),
        ({"cut_policy": {"kind": "tokens", "every": 4}}, "cut_policy"),
        ({"limit": 9}, "more than the limit of 9"),
    ):
        with pytest.raises(ValueError, match=message):
            build(make_config("b", **{"limit": 10, "problems_per_group": 4} | change))
    assert files(short.output_dir) == files(full.output_dir)


_NAMES = ("000000-000004", "000004-000008", "000008-000010")


def test_changed_weights_or_problems_of_the_same_name_are_detected(make_config: Make, pair: Path) -> None:
    copy = Path(make_config().output_dir).parent / "copy"
    shutil.copytree(pair, copy)
    options = {"target": str(copy / "target"), "task_options": {"path": str(copy / "p.jsonl"), "check_with": "regex"}}
    lines = (pair / "problems.jsonl").read_text().splitlines(keepends=True)[:4]
    (copy / "p.jsonl").write_text("".join(lines))
    build(make_config(**options, limit=2))
    shutil.copytree(pair / "draft", copy / "target", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="other weights of the target model"):
        build(make_config(**options, limit=4))
    for old, new in (('"id": "p', '"id": "q'), ('"reference": "', '"reference": "x')):
        (copy / "p.jsonl").write_text("".join(lines).replace(old, new))
        with pytest.raises(ValueError, match="begun with other problems"):
            build(make_config(**options, limit=4))


def test_a_kill_loses_only_unfinished_groups(tmp_path: Path) -> None:
    def write(folder: Path, n_problems: int = 7) -> list[range]:
        """Build groups of 3; returns those that were worked out."""
        groups, worked_out = GroupFolder(folder, "train"), []
        with groups.held({"seed": 0}):
            for group in (range(0, 3), range(3, min(6, n_problems)), range(6, n_problems)):
                if len(group) and not groups.has(group):
                    # Nothing is left of the first group: all its problems were skipped.
                    groups.write(group, [{"text": f"é{i}", "problem": i} for i in group if i > 2])
                    worked_out.append(group)
        return worked_out

    write(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert list(whole) == [f"train-{name}.jsonl" for name in ("000000-000003", "000003-000006", "000006-000007")]
    assert whole["train-000000-000003.jsonl"] == b""
    assert GroupFolder(tmp_path / "whole", "train").n_problems == 7

    for missing in whole:
        shutil.copytree(tmp_path / "whole", folder := tmp_path / missing)
        (folder / "data" / missing).rename(folder / "data" / f".{missing}.4711.partial")
        assert len(write(folder)) == 1
        assert files(folder) == whole

    # A limit of 4 was raised; the kill came before the shorter file was removed.
    write(folder := tmp_path / "longer", n_problems=4)
    left = folder / "data" / "train-000003-000004.jsonl"
    kept = left.read_bytes()
    assert write(folder) == [range(3, 6), range(6, 7)]
    left.write_bytes(kept)
    assert [path.name for path in GroupFolder(folder, "train").files] == list(whole)
    assert write(folder) == []
    assert files(folder) == whole

    (folder / "data" / "train-000003-000006.jsonl").write_bytes(whole["train-000003-000006.jsonl"][:-9])
    with pytest.raises(ValueError, match=r"000006.jsonl, line 3: not complete JSON .*; delete the file"):
        GroupFolder(folder, "train").rows(3)


def test_folders_in_use_or_of_others_are_left_alone(make_config: Make) -> None:
    config = make_config()
    folder = Path(config.output_dir)
    (folder / ".build").mkdir(parents=True)
    with FileLock(folder / ".build" / "lock"), pytest.raises(ValueError, match="another build is writing"):
        build(config)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        build(config)
    with pytest.raises(ValueError, match="labels need references"):
        build(make_config(task_options={**config.task_options, "check_with": "none"}))
    with pytest.raises(ValueError, match="is a file"):
        build(make_config("data/notes.txt"))
    (folder / "build.json").write_text(json.dumps({"format": 1, "config": config.identity()}))
    with pytest.raises(ValueError, match=r"build.json has format 1, not 2: choose another folder"):
        build(config)


def test_load_dataset_knows_the_columns(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    config = make_config("labelled", split="validation")
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "completions": ["a", "b"], "labels": [True, False], "values": [None, None]}
        | {"confidence": [1.0, 0.75], "undecided": 1},
        {"prompt": "p", "completions": ["a"], "labels": [True], "values": [0.5], "target_value": 1.0},
    ]
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        folder = tmp_path / type(prompt).__name__
        groups = GroupFolder(folder, "validation")
        with groups.held(config.identity()):
            groups.write(range(1), [])  # skipped problems
            for i, row in enumerate(rows, start=1):
                cuts = list(range(1, len(row["labels"]) + 1))
                known = {"prompt": prompt, "problem_id": str(i), "draft_ids": cuts, "cuts": cuts}
                groups.write(range(i, i + 1), [row | known])
            groups.write(range(3, 4), [])
            write_card(folder, config, summarise_labels(read_rows(folder)), groups.n_problems)
        loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        assert list(loaded) == ["validation"]
        data = loaded["validation"]
        assert data["prompt"] == [prompt, prompt]
        assert data["completions"] == [["a", "b"], ["a"]]
        assert data["labels"] == [[True, False], [True]]
        assert data["values"] == [[None, None], [0.5]]
        assert data.features["values"].feature.dtype == "float64"
        assert data["confidence"] == [[1.0, 0.75], None]
        assert data["undecided"] == [1, None]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_rate_and_time_left_in_80_columns(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.labels.progress.LINE_EVERY", 0.0)
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=terminal, color_system=None)
    with BuildProgress("data", total=2000, done=1500, console=console) as progress:
        for done in range(1501, 1504):
            time.sleep(0.01)
            progress.advance(done, rows=2, rollouts=7)
    text = stream.getvalue()
    assert "1500 of 2000 problems are done" in text
    last = [line for line in re.split("[\r\n]", text) if "1503/2000" in line][-1]
    assert "rows/s" in last and "rollouts/s" in last and "left" in last and "…" not in last


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("data.yaml", "zoo:target"),
        ("real/data.yaml", "Qwen/Qwen3-8B"),
        ("smollm2/data.yaml", "zoo:smollm2"),
    ],
)
def test_the_recipes_of_the_project_are_read(name: str, target: str) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / name
    overrides = ["--limit", "7", "--temperatures", "0.5", "1", "--prefix_labels", "true", "--exhaustive"]
    (config,) = parse_recipe(recipe, overrides, [BuildConfig], "parse-data build")
    assert (config.target, config.limit, config.temperatures, config.exhaustive) == (target, 7, [0.5, 1.0], True)
    assert config.policy.kind == "step"


@pytest.mark.parametrize("name", ["real/data.yaml", "qwen-coder/data.yaml"])
def test_recipes_for_judges_on_log_probabilities_ask_the_target_for_nothing(name: str) -> None:
    (config,) = parse_recipe(Path(__file__).parents[3] / "recipes" / name, [], [BuildConfig], "parse-data build")
    assert config.logprobs == 5 and not config.asks_target


_NEEDED = ["--output_dir", "x", "--target", "t", "--draft", "d", "--task", "gsm8k"]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("tmperatures: 3", [], "unknown key tmperatures; did you mean 'temperatures'?"),
        ("seed: 3", ["--drop_unsolvd"], "command line: unknown key drop_unsolvd; did you mean 'drop_unsolved'?"),
        ("seed: three", [], "invalid int value: 'three'"),
        ("seed: 3", ["--task_options", "path: p.jsonl, check_with: exact"], "invalid mapping value: 'path: p.jsonl"),
        ("seed: [1, 2]", [], "it takes one value"),
        ("temperatures: [0.5, hot]", [], "invalid float value: 'hot'"),
        ("split: tain", [], "choose one of train, validation, test"),
        ("seed: 3", [], "the recipe needs the key output_dir"),
        ("- seed", [], "must be a YAML mapping"),
        ("seed: [", [], "is not valid YAML in line"),
        ("limit: 0", _NEEDED, "limit is 0"),
        ("rollouts: 3", _NEEDED, "temperature 0"),
        ("rollout_temperature: 0.7", [*_NEEDED, "--rollouts", "4"], "margin is 0, but no number"),
        ("rollout_temperature: 0.7", [*_NEEDED, "--margin", "0.25"], "need at least 13 rollouts for a label"),
        ("{margin: 0.25, max_rollouts: 3}", [*_NEEDED, "--rollouts", "4"], "it must be at least rollouts, 4"),
        ("margin: .nan", _NEEDED, "margin is nan"),
        (
            "recipe: validity",
            _NEEDED,
            "recipe.yaml is a recipe for training (validity): accelerate launch recipe.yaml",
        ),
        ("learning_rate: 1", _NEEDED, "unknown key learning_rate; none of "),
        ("{}", ["--output_dir", "x", "--target", "t", "--draft", "d", "--task", "gsm9k"], "did you mean 'gsm8k'"),
        ("{}", ["--output_dir", "x", "--target", "zoo:tagret", "--draft", "d", "--task", "gsm8k", "--limit", "1"], ""),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    Path("recipe.yaml").write_text(text + "\n")
    if "zoo:tagret" in overrides:
        overrides, message = [*overrides, "--task_options", "path: gsm.jsonl"], "did you mean 'zoo:target'?"
    assert main(["build", "recipe.yaml", *overrides]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert main(["build"]) == main(["build", "nowhere.yaml"]) == main(["build", "--seed", "1"]) == 2
    assert main(["build", "--help"]) == main([]) == 0


def test_a_group_that_is_written_again_loses_its_log_probabilities(tmp_path: Path) -> None:
    folder = GroupFolder(tmp_path, "train")
    reads = tmp_path / "logprobs" / "train-000000-000002.parquet"
    parts = parts_of(tmp_path / "data" / "train-000000-000002.jsonl")
    parts.mkdir(parents=True)
    for file in (reads, parts / "000000.parquet"):
        file.touch()
    folder.write(range(2), [])
    assert not reads.exists() and not parts.exists() and folder.has(range(2))


def test_a_note_may_have_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with BuildProgress(tmp_path, total=1, done=0) as progress:
        progress.note("left out: [b]Hi[/i]")
    assert "left out: [b]Hi[/i]" in capsys.readouterr().err
