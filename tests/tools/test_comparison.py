"""A comparison of rules: one file a rule, resumable, with the figures that the records give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from parse_infer.backends.local.load import load_judge
from parse_infer.calibration import settings as calibration_settings
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.calibration.joint_decoder import JointDecoder
from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.cli.model_options import ModelOptions
from parse_infer.engine import ParseEngine
from parse_infer.judge.registry import find_rule
from parse_infer.models.train_problems import write_train_problems
from tests.parse_infer.conftest import make_engine
from tools import comparison
from tools.comparison_results import _loss_intervals, draw, markdown, markdown_of_points, summarise

__all__ = ["make_engine"]  # a fixture of the engine's tests

PAIR = {
    "task": "jsonl",
    "task_option": ["check_with=none"],
    "limit": 4,
    "loss": "disagreement",
    "risks": [0.5, 0.9],
    "blocks": [4],
    "max_new_tokens": 8,
    "timed": 2,
}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two rules, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"p{i}", "prompt": f"Tom has {i} apples."} for i in range(6)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = Path("comparison/tiny")
    folder.mkdir(parents=True)
    options = PAIR | {"task_option": [*PAIR["task_option"], "path=problems.jsonl"]}
    (folder / "pair.yaml").write_text(yaml.safe_dump(options))
    (folder / "min_p.yaml").write_text("judge: min_p\n")
    (folder / "fly.yaml").write_text("judge: fly:window=2\nblocks: [6]\nlabel: FLy, window 2\n")
    return folder


@pytest.fixture
def loads(
    make_engine: Callable[..., ParseEngine], random_adapter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> list[str | None]:
    """The judges of the engines that were loaded: tiny random models, with many end tokens."""
    loaded: list[str | None] = []
    given = make_engine(noise=0.3)
    for model in (given.target, given.draft):
        model.eos_ids = {*model.eos_ids, *range(5, model.n_embeddings, 12)}
        model.decoder.eos_ids = frozenset(model.eos_ids)

    def load(options: ModelOptions) -> ParseEngine:
        loaded.append(options.judge)
        judge = load_judge(given.target, options.adapter, options.judge)
        return ParseEngine.from_models(given.target, given.draft, judge)

    random_adapter(given.target.model).save_pretrained("adapter")
    monkeypatch.setattr(ModelOptions, "load", load)
    monkeypatch.setattr(calibration_settings, "THRESHOLDS", (*calibration_settings.THRESHOLDS[::17], 0.0))
    return loaded


def run(*arguments: str) -> int:
    return comparison.run_app(comparison.app, comparison.COMMAND, list(arguments))


@pytest.mark.slow
def test_each_rule_is_calibrated_once(pair: Path, loads: list[str | None], capsys):
    assert run(str(pair), "--render-only") == 2
    assert "no rule of comparison/tiny has been measured" in capsys.readouterr().err
    assert run(str(pair)) == 0 and loads == ["fly:window=2", "min_p"]
    results = json.loads((pair / "results.json").read_text())
    assert list(results["rules"]) == ["fly", "min_p"] and (pair / "figure.png").read_bytes().startswith(b"\x89PNG")
    table = (pair / "results.md").read_text()
    assert "| fly | 50 |" not in table and "| FLy, window 2 | 50 |" in table and "4 problems, 2 timed" in table
    (pair / "accept_threshold.yaml").write_text("judge: accept_threshold\n")
    capsys.readouterr()
    assert run(str(pair), "--render-only") == 0 and loads == ["fly:window=2", "min_p"]
    assert "accept_threshold has not been measured with these options; it is left out" in capsys.readouterr().err
    assert json.loads((pair / "results.json").read_text())["rules"] == results["rules"]
    shutil.move("runs", "other_machine")
    assert run(str(pair)) == 0 and loads[2:] == ["accept_threshold"], "another rule is one file, measured anywhere"
    shutil.copytree("other_machine", "runs", dirs_exist_ok=True)
    (pair / "fly.yaml").write_text("judge: fly:window=3\nblocks: [6]\n")
    capsys.readouterr()
    assert run(str(pair), "--render-only") == 2, "nothing that was measured is lost"
    assert "has fly with other options, and would lose it" in capsys.readouterr().err
    (pair / "fly.yaml").write_text("judge: fly:window=2\nblocks: [6]\nlabel: Another label\n")
    assert run(str(pair), "--render-only") == 0 and "| Another label |" in (pair / "results.md").read_text()
    (pair / "results.json").write_text("{}")
    assert run(str(pair), "--render-only") == 2
    assert "results.json holds no results: delete it to measure again" in capsys.readouterr().err
    (pair / "results.json").unlink()
    assert run(str(pair), "--render-only") == 0
    for name, rule in json.loads((pair / "results.json").read_text())["rules"].items():
        text = Path(f"runs/comparison/tiny/{name}/records.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        assert (rule["problems"], rule["timed"]) == (4, 2)
        assert rule["models"]["adapter"].startswith(name.replace("_", "-"))
        for place, point in enumerate(rule["points"]):
            assert point["lost"] == pytest.approx(np.mean([row["losses"][0][place] for row in records]))
            assert point["lost_ci"][0] <= point["lost"] <= point["lost_ci"][1]
            took = [row["seconds"][0] for row in records if row["target_seconds"] is not None]
            ratio = sum(each[0] for each in took) / sum(each[place] for each in took)
            assert point["speed"] == pytest.approx(ratio)
        assert rule["points"][rule["lossless"]]["threshold"] > 1 and rule["points"][0]["speed"] == 1.0
    older = json.loads((pair / "results.json").read_text())
    older["environment"]["date"] = "2026-01-01"
    for rule in older["rules"].values():
        del rule["date"]
    (pair / "results.json").write_text(json.dumps(older))
    assert run(str(pair), "--render-only") == 0
    assert json.loads((pair / "results.json").read_text())["environment"]["date"] == "2026-01-01"


def jointly(pair: Path, **options: object) -> None:
    """Let one measurement serve all rules: answers are right if they have a letter of the first half."""
    rows = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
    Path("problems.jsonl").write_text("".join(json.dumps(row | {"reference": "[a-mA-M]"}) + "\n" for row in rows))
    made = PAIR | {"task_option": ["check_with=regex", "path=problems.jsonl"], "loss": "accuracy", "batch_size": 3}
    (pair / "pair.yaml").write_text(yaml.safe_dump(made | {"limit": 6, "max_new_tokens": 20} | options))
    (pair / "fly.yaml").unlink()
    (pair / "min_p.yaml").write_text("judge: min_p\nthresholds: [0.5, 0.05, 0]\n")
    (pair / "accept_threshold.yaml").write_text("judge: accept_threshold\nthresholds: [0.02]\n")


@pytest.mark.parametrize("sampling", [{}, {"sampling": {"temperature": 1.0}, "samples": 2}], ids=["greedy", "sampled"])
@pytest.mark.slow
def test_rules_measured_in_one_lose_what_they_lose_alone(pair: Path, loads: list[str | None], sampling: dict, capsys):
    jointly(pair, **sampling)
    assert run(str(pair)) == 0 and loads == ["accept_threshold"], "one engine"
    together = json.loads((pair / "results.json").read_text())["rules"]
    assert together["min_p"]["models"]["adapter"] == "min-p" and together["min_p"]["timed"] == 2
    assert [p["threshold"] for p in together["min_p"]["points"]][1:] == [0.5, 0.05, 0]
    assert any(point["lost"] for rule in together.values() for point in rule["points"])
    first = together["min_p"]["points"][0]
    assert (first["speed"], first["lost"]) == (1.0, 0) and all(p["pace"] > 0 for p in together["min_p"]["points"])
    sizes = [(p["tokens"], p["written"]) for p in together["min_p"]["points"]]
    assert sizes[0][0] == sizes[0][1] and sizes[-1][1] == 0 and all(written <= tokens for tokens, written in sizes)
    record_file = Path("runs/comparison/tiny/accept_threshold+min_p/texts/records.jsonl")
    texts = record_file.read_text().splitlines()
    assert len(texts) == 6 and run(str(pair)) == 0 and loads == ["accept_threshold"], "and nothing is measured twice"
    record_file.write_text("".join(line + "\n" for line in texts[:4]))
    for name in ("min_p", "accept_threshold"):
        Path(f"runs/comparison/tiny/{name}/options.json").unlink()
    (pair / "results.json").unlink()
    assert run(str(pair)) == 0, "the rest of an interrupted measurement"
    again = json.loads((pair / "results.json").read_text())["rules"]["min_p"]
    assert again | {"date": ""} == together["min_p"] | {"date": ""}
    if not sampling:
        jointly_alone = yaml.safe_load((pair / "pair.yaml").read_text()) | {"batch_size": 1}
        (pair / "pair.yaml").write_text(yaml.safe_dump(jointly_alone))
        shutil.rmtree("runs")
        (pair / "results.json").unlink()
        assert run(str(pair)) == 0, capsys.readouterr().err
        alone = json.loads((pair / "results.json").read_text())["rules"]
        for name in together:
            mine, theirs = ([point["lost"] for point in rules[name]["points"]] for rules in (together, alone))
            assert mine == theirs, name
    capsys.readouterr()


@pytest.mark.slow
def test_a_trained_judge_is_measured_beside_the_rules(pair: Path, loads: list[str | None]):
    jointly(pair)
    (pair / "trained.yaml").write_text("adapter: adapter\nthresholds: [0.5]\n")
    (pair / "shorter.yaml").write_text("judge: min_p\nthresholds: [0.5]\nmax_new_tokens: 6\n")
    assert run(str(pair)) == 0 and loads == ["accept_threshold", "min_p"], "one engine for equal settings"
    rules = json.loads((pair / "results.json").read_text())["rules"]
    assert list(rules) == ["accept_threshold", "min_p", "shorter", "trained"] and len(rules["trained"]["points"]) == 2
    assert rules["trained"]["models"]["adapter"] != rules["min_p"]["models"]["adapter"]
    together = [point["lost"] for point in rules["trained"]["points"]]
    (pair / "trained.yaml").write_text("adapter: adapter\nthresholds: [0.5]\nbatch_size: 1\n")
    (pair / "results.json").unlink()
    shutil.rmtree("runs/comparison/tiny/trained")
    assert run(str(pair)) == 0
    alone = json.loads((pair / "results.json").read_text())["rules"]["trained"]
    assert [point["lost"] for point in alone["points"]] == together


@pytest.mark.slow
def test_a_joint_measurement_counts_as_one_that_is_not(
    pair: Path, loads: list[str | None], monkeypatch: pytest.MonkeyPatch, capsys
):
    """The target's own batches outside float32, answers that are left to the engine, training problems, times of each
    judge, and no word about texts that nobody compared."""
    jointly(pair)
    (pair / "trained.yaml").write_text("adapter: adapter\nthresholds: [0.5]\n")
    write_train_problems(Path("adapter"), [prompt_hash("Tom has 3 apples.")])
    timed: list[str] = []
    generate = ParseEngine.generate

    def counted(engine: ParseEngine, *args: Any, **options: Any) -> Any:
        timed.append(engine.backend.judge.fingerprint)
        return generate(engine, *args, **options)

    monkeypatch.setattr(ParseEngine, "generate", counted)
    assert run(str(pair)) == 0, capsys.readouterr().err
    assert "1 of the 6 problems are among those that the adapter" in capsys.readouterr().err
    rules = json.loads((pair / "results.json").read_text())["rules"]
    assert {rule["problems"] for rule in rules.values()} == {5} and len(set(timed)) == 3
    found = json.loads(Path("runs/comparison/tiny/min_p/calibration.json").read_text())
    assert {point["disagreement"] for point in found["calibrations"][0]["tried"]} == {1.0}

    shutil.rmtree("runs")
    (pair / "results.json").unlink()
    answers = JointDecoder.answers

    def all_but_the_first(decoder: JointDecoder, rows: Any) -> Any:
        return (each if i else None for i, each in enumerate(answers(decoder, rows)))

    monkeypatch.setattr(JointDecoder, "answers", all_but_the_first)
    monkeypatch.setattr(ParseEngine, "deterministic", property(lambda engine: False))
    assert run(str(pair)) == 0, capsys.readouterr().err
    again = json.loads((pair / "results.json").read_text())["rules"]
    for name, rule in rules.items():
        for key in ("lost", "tokens", "written"):
            one, other = ([point[key] for point in each["points"]] for each in (rule, again[name]))
            assert one == other, (name, key)
    texts = Path("runs/comparison/tiny/accept_threshold+min_p+trained/texts/records.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["alone"]) for line in texts] == [0, 1, 1, 1, 1]

    (pair / "pair.yaml").write_text((pair / "pair.yaml").read_text().replace("- 4", "- whole"))
    (pair / "results.json").unlink()
    assert run(str(pair)) == 2 and "a draft is judged whole, and not by token" in capsys.readouterr().err


@pytest.mark.slow
def test_options_replace_those_of_the_files_apart_from_their_results(pair: Path, loads: list[str | None], capsys):
    assert run(str(pair), "--option", "limit=5") == 2 and "--option needs --out FOLDER" in capsys.readouterr().err
    assert run(str(pair), "--out", "gpu", "--option", "limit=5", "--option", "timed=1") == 0, capsys.readouterr().err
    assert not (pair / "results.json").exists() and not Path("runs").exists()
    rules = json.loads(Path("gpu/results.json").read_text())["rules"]
    assert {(rule["problems"], rule["timed"]) for rule in rules.values()} == {(5, 1)} and list(rules) == [
        "fly",
        "min_p",
    ]
    n = len(loads)
    assert run(str(pair), "--out", "gpu", "--option", "limit=5", "--option", "timed=1") == 0 and len(loads) == n
    capsys.readouterr()
    assert run(str(pair), "--out", "gpu", "--option", "limits=5") == 2
    assert "'limits' is no option of the comparison fly; did you mean 'limit'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("min_p.yaml", "adapter: null\n", "min_p has a batch_size above 1 and no judge"),
        ("pair.yaml", {"loss": "disagreement"}, "batch_size above 1 needs loss accuracy or lost"),
        ("pair.yaml", {"blocks": [4, 8]}, "and one length of blocks"),
    ],
)
def test_rules_that_cannot_be_measured_in_one(pair: Path, loads: list[str | None], capsys, file, text, message):
    jointly(pair, **(text if isinstance(text, dict) else {}))
    if isinstance(text, str):
        (pair / file).write_text(text)
    assert run(str(pair)) == 2 and message in capsys.readouterr().err
    assert not loads and not Path("runs").exists()


def outcome(number: int, losses: list[float], seconds: list[float]) -> Outcome:
    lists = {"losses": [losses], "disagreed": [[False] * 3], "seconds": [seconds]}
    return Outcome(problem_id=f"p{number}", target_right=True, target_seconds=4.0, **lists)


def calibration() -> Calibration:
    figures = {"losses": 0.0, "bound": 0.0, "speedup": 1.0, "disagreement": 0.0}
    points = [TestedPoint(setting=OperatingPoint(threshold), **figures) for threshold in (1.1, 0.5, 0.0)]
    facts = {
        "task": "t",
        "n_problems": 40,
        "problems": "x",
        "loss": "accuracy",
        "confidence": 0.9,
        "max_new_tokens": 30,
    }
    return Calibration(**facts, models={"dtype": "float32"}, tried=points, promises={0.05: 1, 0.01: None})


def test_answers_won_make_up_for_answers_lost(tmp_path: Path):
    """Losses are differences: 8 of 40 lost, 4 won. Means over samples are no whole numbers."""
    losses = [[0.0, float(i < 8) - float(i >= 36), 0.25 * (i % 5 - 1)] for i in range(40)]
    found = summarise([outcome(i, own, [2.0, 1.0, 0.5]) for i, own in enumerate(losses)], calibration())
    points = found["points"]
    assert [point["lost"] for point in points] == pytest.approx([0, 0.1, 0.25])
    assert points[1]["lost_ci"][0] < 0.1 < points[1]["lost_ci"][1] and points[2]["lost_ci"][0] > 0.1
    low, high = points[0]["lost_ci"]
    assert low < 0 < high == -low, "no loss in 40 problems is no proof of none"
    assert [point["speed"] for point in points] == [1, 2, 4] and points[1]["speedup"] == 4
    results = {"rules": {"rule": found | {"options": {"label": "a rule"}, "machine": {}}}, "environment": {}}
    assert "| a rule | 5 | 0.5 | auto | 10.0 [" in markdown(results)
    assert "| a rule | 1 | not proven | - | - | - | - |" in markdown(results)
    assert "Right answers of the target alone, at 1.00× by definition: 100.0 % [91.2, 100.0]." in markdown(results)
    assert "decoded jointly" not in markdown(results)
    draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(("loss", "low"), [("lost", 0.0), ("disagreement", 0.0), ("accuracy", -0.012643)])
def test_a_share_of_lost_answers_is_not_below_zero(loss: str, low: float):
    (interval,) = _loss_intervals(np.zeros((300, 1)), loss)
    assert interval == [pytest.approx(low, abs=1e-6), pytest.approx(0.012643, abs=1e-6)]


def test_the_tables_name_the_targets_accuracy_and_tokens_per_forward():
    """Samples: 30 of 40 problems are right in one of two. One rule is of an older file, one was decoded jointly."""
    outcomes = [
        replace(
            outcome(i, [0.0, 0.5, 0.5], [2.0, 1.0, 0.5]), target_right=0.5 * (i < 30), tokens_per_forward=[[4, 9, 16]]
        )
        for i in range(40)
    ]
    found = summarise(outcomes, calibration()) | {"options": {}, "machine": {"cpu": "C", "threads": 1}}
    assert found["target_right"] == 0.375 and found["target_right_ci"][0] < 0.375 < found["target_right_ci"][1]
    old = {name: value for name, value in found.items() if not name.startswith("target_right")}
    joint = found | {"points": [point | {"tokens": 9, "written": 2} for point in found["points"]]}
    text = markdown({"rules": {"new": found, "old": old, "joint": joint}, "environment": {}})
    assert (
        "| lost here, points | tokens per forward | over lossless |" in text
        and "| 50.0 [50.0, 50.0] | 9.0 | 2.00× [" in text
    )
    assert "by definition: 37.5 % [" in text and "] (new, joint); not recorded (old)." in text
    assert "Answers of joint were decoded jointly. There 'accepts nothing' is the target compared with itself" in text
    joint["models"] = joint["models"] | {"dtype": "bfloat16"}  # also where the mean difference is 0
    assert "rounding in 16 bits makes it differ" in markdown({"rules": {"joint": joint}, "environment": {}})
    assert "| 16.0 |" in markdown_of_points({"rules": {"new": found}, "environment": {}})
    shares = {"rules": {"new": found | {"loss": "lost"}}, "environment": {}}
    assert "| lost here, % | tokens |" in markdown_of_points(shares)
    undecided = summarise([replace(each, target_right=None) for each in outcomes], calibration())
    assert undecided["target_right"] is None


def test_without_timed_problems_there_is_no_speed(tmp_path: Path):
    outcomes = [replace(outcome(i, [0.0, 1.0, 1.0], []), target_seconds=None, seconds=[]) for i in range(4)]
    found = summarise(outcomes, calibration())
    assert found["timed"] == 0 and found["lossless"] is None
    assert not any("speed" in point for point in found["points"])
    results = {"rules": {"rule": found | {"options": {}, "machine": None}}, "environment": {}}
    assert "| rule | 5 | 0.5 | auto | 100.0 [" in markdown(results)
    draw(results, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("fly.yaml", "judgee: fly", "'judgee' is no option of the comparison fly; did you mean 'judge'?"),
        ("fly.yaml", "- fly", "comparison/tiny/fly.yaml holds no options"),
        ("fly.yaml", "judge: fly\n  blocks: [auto", "comparison/tiny/fly.yaml is no YAML file (mapping values are"),
        ("fly.yaml", "risks: [2]", "risk is 2; it must be a number between 0 and 1"),
        ("fly.yaml", "risks: 2", "risk is 2; it must be a number between 0 and 1"),
        ("fly.yaml", "sampling: {temp: 0.6}", "'temp' is no option of sampling; "),
        ("fly.yaml", "sampling: 0.6", "sampling of the comparison fly is 0.6; give it as {temperature: 1}"),
        ("fly.yaml", "samples: '2'", "samples of the comparison fly is '2'; it must be a whole number"),
        ("fly.yaml", "limit: many", "limit of the comparison fly is 'many'; it must be a whole number"),
        ("fly.yaml", "blocks: [{}]", "the comparison fly has an option of another type"),
        ("pair.yaml", None, "there is no comparison/tiny/pair.yaml"),
    ],
)
def test_wrong_files_are_refused(pair: Path, capsys, file: str, text: str | None, sentence: str):
    (pair / file).unlink()
    if text is not None:
        (pair / file).write_text(text)
    assert run(str(pair)) == 2
    assert sentence in capsys.readouterr().err


def test_the_pairs_of_the_repository_are_read():
    folders = sorted(path.parent for path in Path(__file__).parents[2].glob("comparison/*/pair.yaml"))
    assert folders
    for folder in folders:
        for each in comparison.read_runs(folder):
            assert find_rule(each.models.judge, each.models.adapter) or each.models.adapter
