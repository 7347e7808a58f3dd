"""The command line on tiny models: every command, and every mistake as one sentence with exit code 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import parse_infer
from data_tools.cli import main as data_main
from parse_infer.calibration.calibration_file import load_calibrations
from parse_infer.cli.app import main
from parse_infer.cli.model_options import ModelOptions
from parse_infer.cli.options import read_pairs
from parse_infer.engine import ParseEngine
from parse_infer.evaluation.mode_names import DEFAULT_MODES
from parse_infer.models.names import resolve
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_train.__main__ import main as train_main
from tests.parse_infer.language_models import reduced_pair, word_tokenizer
from tests.wandb_runs import offline_runs

ROOT = Path(__file__).parents[3]
_folders: dict[str, str] = {}


@pytest.fixture
def models(make_model, tokenizer, random_adapter, tmp_path_factory) -> list[str]:
    """Options that name a tiny target, draft model and adapter on disk."""
    if not _folders:
        root = tmp_path_factory.mktemp("models")
        target, draft = make_model("llama", seed=0), make_model("llama", seed=5)
        for name, model in (("target", target), ("draft", draft)):
            model.save_pretrained(root / name)
            tokenizer.save_pretrained(root / name)
            _folders[name] = str(root / name)
        _folders["adapter"] = str(random_adapter(target).save_pretrained(root / "adapter"))
    return [part for name in ("target", "draft", "adapter") for part in (f"--{name}", _folders[name])]


def judge_only(models: list[str]) -> list[str]:
    return models[:2] + models[4:]


def error_of(capsys, *arguments: str) -> str:
    """The sentence that a mistake ends with."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_help_shows_commands_and_examples(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "generate", "score", "bench", "eval", "Examples:"))
    for command in ("demo", "generate", "score", "bench", "eval"):
        assert main([command, "--help"]) == 0
        assert "Examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "command"),
    [
        (main, ["generate", "x", "--max-new-tokens", "0"]),
        (main, ["generate", "x", "--acceptance", "first_failure", "--block-tokens", "0"]),
        (train_main, ["recipes/train-logprob.yaml", "--num-train-epochs", "many"]),
        (data_main, ["plan", "recipes/data.yaml", "--max-draft-tokens", "many"]),
    ],
)
def test_commands_take_options_as_recipes_and_as_command_lines_spell_them(run, command, capsys):
    """The error of a wrong value, which is not that of an unknown option."""
    other = [f"--{each[2:].replace('-', '_')}" if each.startswith("--") else each for each in command]
    assert other != command
    errors = []
    for arguments in (command, other):
        assert run(arguments) == 2, capsys.readouterr().err
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] and "such option" not in errors[0]


def test_help_loads_no_torch():
    code = (
        "import sys; from parse_infer.cli.app import main\n"
        "for command in ([], ['generate'], ['serve'], ['bench'], ['calibrate']): main([*command, '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[3])


def test_generate_writes_the_answer_and_nothing_else_to_standard_output(models, capsys):
    assert main(["generate", "Hi", "--max-new-tokens", "12", "--json", *models]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "".join(span["text"] for span in answer["spans"]) == answer["text"]
    assert 0 <= answer["stats"]["acceptance_rate"] <= 1 and answer["timings"]["total_s"] > 0
    for extra in ([], ["--stream"]):
        assert main(["generate", "Hi", "--max-new-tokens", "12", *extra, *models]) == 0
        captured = capsys.readouterr()
        assert captured.out == answer["text"] + "\n"
        assert "target forwards" in captured.err


def test_exact_mode_needs_no_adapter_and_is_lossless(models, capsys):
    arguments = ["generate", "Hi", "--max-new-tokens", "12", "--json"]
    assert main([*arguments, "--mode", "exact", *models[:4]]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--threshold", "1.5", *models[:4]]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == exact["token_ids"]


def test_generate_reads_jsonl_and_keeps_order_and_ids(models, tmp_path, monkeypatch, capsys):
    rows = [
        {"id": "b", "prompt": "Hi"},
        {"id": "a", "prompt": [{"role": "user", "content": "Ho"}], "draft": "My draft."},
    ]
    text = "\n\n".join(json.dumps(row) for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for source in (str(tmp_path / "rows.jsonl"), "-"):
        assert (
            main(["generate", "--file", source, "--max-new-tokens", "10", "--threshold", "0", "--json", *models]) == 0
        )
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [answer["id"] for answer in answers] == ["b", "a"]
        assert answers[1]["stats"]["draft_forwards"] == 0


def test_answers_of_other_settings_or_models_do_not_mix(models, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    command = ["generate", "--file", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), *models]
    command += ["--max-new-tokens", "6", "--threshold", "0.9"]
    assert main(command) == main(command) == 0, capsys.readouterr().err
    drafter = {"drafters": ["--target-drafter", "lookup"]}
    for key, change in ({"threshold": ["--threshold", "0"], "dtype": ["--dtype", "bfloat16"]} | drafter).items():
        assert main([*command, *change]) == 2
        assert f"holds a run of answers with {key} " in capsys.readouterr().err


def test_generate_reads_a_prompt_from_standard_input_and_streams_events(models, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(["generate", "--stream", "--json", "--max-new-tokens", "6", *models]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["event"] for e in events[:3]] == ["drafted", "verified", "accepted"]
    assert events[-1]["event"] == "done" and events[-1]["text"]
    assert main(["generate", "Hi", "--json", "--max-new-tokens", "6", *models]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == events[-1]["text"], "the end of a line is not the prompt's"


@pytest.mark.slow
def test_the_draft_model_proposes_tokens_for_the_target_beside_text_drafts(models, capsys):
    question = ["generate", "What is 3 + 4?", "--draft-text", "It is 8.", "--max-new-tokens", "12", "--json"]
    question += ["--threshold", "0.99"]  # at which the draft is wrong
    answers = {}
    for drafter in ("draft", "draft:tokens=4", "auto", "none"):
        assert main([*question, "--target-drafter", drafter]) == 0, capsys.readouterr().err
        answers[drafter] = json.loads(capsys.readouterr().out)
    guesses = {drafter: answer["stats"]["drafter_forwards"] for drafter, answer in answers.items()}
    assert guesses["draft"] > 0 and guesses["draft:tokens=4"] > 0
    assert guesses["auto"] == guesses["none"] == 0  # nothing else asks for a draft model, so none is loaded
    assert len({answer["text"] for answer in answers.values()}) == 1
    assert main([*question, *judge_only(models)]) == 0
    capsys.readouterr()
    sentence = error_of(capsys, *question, "--target-drafter", "draft", *judge_only(models))
    assert "needs a draft model of its own" in sentence


def test_a_draft_model_proposes_tokens_by_default(models, capsys):
    guesses = []
    question = ["generate", "Hi", "--threshold", "1.5", "--max-new-tokens", "12", "--json", *models]
    for options in ([], ["--target-drafter", "auto"], ["--target-drafter", "none"]):
        assert main([*question, *options]) == 0
        guesses.append(json.loads(capsys.readouterr().out)["stats"]["drafter_forwards"])
    assert guesses[0] == guesses[1] > guesses[2] == 0


def test_score_gives_the_validity_of_every_segment(models, tmp_path, capsys):
    assert main(["score", "Hi", "one\ntwo\n", "--cut-policy", "step", "--json", *judge_only(models)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [s["text"] for s in result["segments"]] == ["one\n", "two\n"]
    assert result["validity"] == result["segments"][-1]["validity"]
    assert main(["score", "Hi", "one\ntwo\n", "--cut-policy", "step", *judge_only(models)]) == 0
    shown = capsys.readouterr().out
    assert "one" in shown and f"{result['validity']:.2f}" in shown
    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": "Hi", "response": "one\ntwo\n", "id": 7}))
    command = ["score", "--file", str(tmp_path / "r.jsonl"), "--cut-policy", "step", "--json"]
    assert main([*command, *judge_only(models)]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": 7, **result}


@pytest.mark.slow
def test_a_cut_policy_replaces_the_adapters_and_has_its_own_calibration(models, tmp_path, capsys):
    assert main(["score", "Hi", "abcdefgh", "--cut-policy", "tokens:3", "--json", *judge_only(models)]) == 0
    assert [s["text"] for s in json.loads(capsys.readouterr().out)["segments"]] == ["abc", "def", "gh"]
    sizes = ["--limit", "5", "--risk", "0.5", "--confidence", "0.5", "--max-new-tokens", "4"]
    command = ["calibrate", "--cut-policy", "tokens:3", "--loss", "disagreement", *sizes, "--out", str(tmp_path)]
    assert main([*command, *models]) == 0
    assert (tmp_path / "calibration.json").exists() and not (Path(_folders["adapter"]) / "calibration.json").exists()
    calibration = ["--calibration", str(tmp_path / "calibration.json")]
    capsys.readouterr()
    assert "made with another cut_policy" in error_of(capsys, "generate", "Hi", *calibration, *models)
    options = ["--cut-policy", "tokens:3", "--max-new-tokens", "4", "--risk", "0.5"]
    assert main(["generate", "Hi", *calibration, *options, *models]) == 0


@pytest.fixture
def problems(tmp_path) -> list[str]:
    rows = [{"id": f"p{i}", "prompt": f"{i} + {i}?", "reference": str(2 * i)} for i in range(5)]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return ["--task", "jsonl", "--task-option", f"path={path}"]


@pytest.mark.slow
def test_a_promises_settings_are_measured(models, problems, tmp_path, capsys):
    sizes = ["--limit", "5", "--risk", "0.5", "--confidence", "0.5", "--max-new-tokens", "4", "--block-tokens", "3"]
    command = ["calibrate", *problems, "--cut-policy", "tokens:3", "--loss", "disagreement", *sizes]
    assert main([*command, "--out", str(tmp_path), *models]) == 0
    file = tmp_path / "calibration.json"
    promised = load_calibrations(file)[0].setting(0.5).setting
    assert promised.block_tokens == 3
    bench = ["bench", *problems, "--limit", "1", "--max-new-tokens", "4", "--thresholds", "none", *models]
    bench += ["--modes", "target,parse", "--out", str(tmp_path / "bench"), "--calibration", str(file)]
    cuts = ["--cut-policy", "tokens:3"]
    assert main([*bench, *cuts, "--risk", "0.5"]) == 0
    environment = json.loads((tmp_path / "bench" / "results.json").read_text())["environment"]
    assert (environment["chosen_threshold"], environment["block_tokens"]) == (promised.threshold, 3)
    capsys.readouterr()
    assert "made with another cut_policy" in error_of(capsys, *bench, "--risk", "0.5")
    assert "the nearest promise is 0.5" in error_of(capsys, *bench, *cuts, "--risk", "0.1")
    for option in ("--threshold", "--block-tokens", "--acceptance", "--max-new-tokens", "--strict-tokens"):
        values = {"--threshold": "0.5", "--acceptance": "longest", "--max-new-tokens": "3"}
        found = error_of(capsys, *bench, *cuts, "--risk", "0.5", option, values.get(option, "2"))
        assert option[2:].replace("-", "_") in found
    other = json.loads(file.read_text())
    other["calibrations"][0]["models"]["backend"] = "vllm"
    file.write_text(json.dumps(other))
    assert "made with another backend (vllm)" in error_of(capsys, *bench, *cuts, "--risk", "0.5")
    assert "this engine has no calibration: run" in error_of(capsys, "bench", *problems, "--risk", "0.5", *models)


@pytest.mark.slow
def test_a_benchmark_is_one_run_with_a_row_for_each_mode(models, problems, tmp_path, capsys, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "bench"
    bench = ["bench", *problems, "--limit", "1", "--max-new-tokens", "4", "--thresholds", "none", *models]
    bench += ["--modes", "target,parse", "--out", str(out)]
    assert "--report-to is 'tensorboard'; choose one of none, wandb" in error_of(
        capsys, *bench, "--report-to", "tensorboard"
    )
    assert main([*bench, "--report-to", "wandb"]) == 0
    [(_, records)] = offline_runs(out)
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.job_type == "bench" and run.run_group and "bench" in run.tags
    [table] = out.glob("wandb/offline-run-*/files/media/table/modes*.json")
    content = json.loads(table.read_text())
    assert [row[0] for row in content["data"]] == ["target", "parse"] and "speedup" in content["columns"]


@pytest.mark.parametrize("command", [["bench", "--limit", "1"], ["eval", "--tasks", "gsm8k", "--data", "gsm8k=DATA"]])
@pytest.mark.slow
def test_a_promise_in_the_adapters_folder_is_not_measured_with_other_models(command, tmp_path, capsys):
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    words = [word.replace("DATA", str(tmp_path / "gsm8k.jsonl")) for word in command]
    words += ["--num-fewshot", "0"] if command[0] == "eval" else []
    found = error_of(capsys, *words, "--risk", "0.05", "--dtype", "bfloat16", "--out", str(tmp_path / "out"))
    assert "the calibration was made with another dtype" in found


def test_a_warning_is_one_line():
    code = (
        "import typer, warnings\n"
        "from parse_infer.cli.entry_point import APP_OPTIONS, run_app\n"
        "app = typer.Typer(**APP_OPTIONS)\n"
        "@app.command()\ndef warn():\n    warnings.warn('this is slow')\n"
        "@app.command()\ndef other():\n    pass\n"
        "run_app(app, 'x', ['warn'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "warning: this is slow\n"


def test_demo_shows_problems_and_one_table(models, capsys):
    assert main(["demo", "--limit", "1", "--max-new-tokens", "8", *models]) == 0
    text = capsys.readouterr().out
    assert "1/1" in text and "draft" in text
    table = text.rsplit("tokens/s", 1)[1]
    names = ("target alone", "draft model alone", "lossless speculation", "PARSE")
    assert sorted(names, key=table.index) == list(names)


@pytest.mark.slow
def test_bench_runs_every_mode_and_resumes_in_its_folder(models, problems, tmp_path, capsys):
    out = tmp_path / "bench"
    command = ["bench", *problems, "--limit", "3", "--max-new-tokens", "6", "--out", str(out)]
    command += ["--thresholds", "0.5", "--sweep-limit", "1", *models]
    assert main(command) == 0
    assert "sequential" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert list(results["modes"]) == [*DEFAULT_MODES]
    assert results["environment"]["problems"] == 3 and results["environment"]["chosen_threshold"] == 0.5
    assert {"cpu", "cores", "threads", "torch", "transformers", "dtype", "date", "command"} <= set(
        results["environment"]
    )
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "figure.png",
        "records.jsonl",
        "results.json",
        "results.md",
    ]
    records = (out / "records.jsonl").read_text()
    assert main(command) == 0
    assert (out / "records.jsonl").read_text() == records
    capsys.readouterr()
    assert "holds a benchmark with seed 0 and this one has 1" in error_of(capsys, *command, "--seed", "1")


def test_bench_takes_other_splits_and_says_so(models, tmp_path):
    found = {}
    for split in ("test", "validation"):
        out = tmp_path / split
        command = ["bench", "--split", split, "--limit", "2", "--modes", "draft", "--max-new-tokens", "3"]
        assert main([*command, "--thresholds", "none", "--out", str(out), *models[:4]]) == 0
        found[split] = json.loads((out / "results.json").read_text())["environment"]
        assert found[split]["task"] == f"gsm_symbolic, {split} split, seed 0"
    assert found["test"]["digest"] != found["validation"]["digest"]


@pytest.mark.slow
def test_bench_leaves_out_what_two_tokenizers_do_not_allow(models, problems, make_model, tmp_path, capsys):
    make_model("llama", seed=15, vocab_size=300, eos_token_id=0).save_pretrained(tmp_path / "foreign")
    word_tokenizer().save_pretrained(tmp_path / "foreign")
    command = ["bench", *problems, "--limit", "2", "--max-new-tokens", "4", "--thresholds", "none", *models]
    command += ["--draft", str(tmp_path / "foreign")]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "note: skipping target+draft: the two models have different tokens" in capsys.readouterr().err
    modes = json.loads((tmp_path / "out" / "results.json").read_text())["modes"]
    assert list(modes) == [name for name in DEFAULT_MODES if name != "target+draft"]
    sentence = error_of(capsys, *command, "--modes", "target+draft", "--out", str(tmp_path / "asked"))
    assert "their tokenizers differ" in sentence


@pytest.mark.slow
def test_bench_leaves_out_nothing_where_the_draft_models_tokens_are_the_targets(
    make_model, random_adapter, problems, tmp_path, capsys
):
    pair = reduced_pair(make_model)
    for lm in pair:
        lm.model.save_pretrained(tmp_path / lm.name)
        lm.tokenizer.save_pretrained(tmp_path / lm.name)
    adapter = random_adapter(pair[0].model).save_pretrained(tmp_path / "adapter")
    models = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--adapter", str(adapter)]
    command = ["bench", *problems, "--limit", "1", "--max-new-tokens", "4", "--thresholds", "none", *models]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "left out" not in capsys.readouterr().err
    assert list(json.loads((tmp_path / "out" / "results.json").read_text())["modes"]) == list(DEFAULT_MODES)
    engine = ParseEngine.from_pretrained(tmp_path / "target", tmp_path / "draft")
    assert isinstance(engine.backend.target_drafter, DraftModelProposer)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["benhc"], "Did you mean 'bench'?"),
        (["demo", "--limit", "0"], "--limit"),
        (["demo", "--pair", "smolm2"], "unknown pair 'smolm2'; did you mean 'smollm2'?"),
        (["demo", "--pair", "tiny", "--target", "x"], "--pair tiny and --target x were both given"),
        (["generate", "Hi", "--temprature", "1"], "--temprature"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "Hi", "--threshold", "-0.5"], "the threshold must be a finite number of at least 0"),
        (["generate", "Hi", "--threshold", "nan"], "the threshold must be a finite number of at least 0"),
        (["generate", "Hi", "--risk", "0.05", "--threshold", "0.5"], "--risk and --threshold were both given"),
        (["generate", "Hi", "--risk", "2"], "risk is 2.0; it must be a number between 0 and 1"),
        (["generate", "Hi", "--calibration", "/no/such.json"], "there is no calibration /no/such.json"),
        (["calibrate", "--limit", "20"], "risk 0.01 at confidence 0.9 takes at least 299 problems (the lengths of"),
        (["calibrate", "--risk", "small"], "--risk is 'small'; give numbers"),
        (["calibrate", "--risk", "1.2"], "risk is 1.2; it must be a number between 0 and 1"),
        (["calibrate", "--confidence", "1"], "confidence is 1.0; it must be a number between 0 and 1"),
        (["calibrate", "--loss", "regret"], "loss is 'regret'; choose one of accuracy, lost, disagreement"),
        (["calibrate", "--block-tokens", "later"], "block_tokens is 'later'; it must be a whole number of at least 1"),
        (["generate", "Hi", "--mode", "exakt"], "mode is 'exakt'; it must be one of: validity, exact"),
        (["generate", "Hi", "--target", "./nowhere", "--mode", "exact"], "There is no folder './nowhere'"),
        (["generate", "Hi", "--target", "org/model", "--mode", "exact"], "needs a draft model of its own"),
        (["generate", "Hi", "--device", "warp"], "unknown device 'warp'"),
        (["generate", "Hi", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["generate", "Hi", "--template-option", "thinking"], "--template-option 'thinking' is not KEY=VALUE"),
        (["generate", "--file", "/no/such.jsonl"], "no file /no/such.jsonl"),
        (["score", "Hi"], "score needs a prompt and a response"),
        (["score", "Hi", "Ho", "--cut-policy", "word"], "unknown cut policy 'word'"),
        (["bench", "--modes", "target,parze"], "unknown mode 'parze'; did you mean 'parse'?"),
        (
            ["generate", "1 + 1?", "--target", "zoo:targte"],
            "'zoo:targte' is not an embedded model; did you mean 'zoo:target'?",
        ),
        (["bench", "--modes", "target+lokup"], "mode 'target+lokup' is 'lokup'; did you mean 'lookup'?"),
        (
            ["generate", "1 + 1?", "--target-drafter", "eagle3:top_k=2"],
            "target_drafter is 'eagle3': give the folder of a trained head, as recipes/eagle3.yaml trains one",
        ),
        (["bench", "--task", "gsm_symbolik"], "unknown task 'gsm_symbolik'; did you mean 'gsm_symbolic'?"),
        (["bench", "--task-option", "max_numbr=3"], "did you mean 'max_number'?"),
        (
            ["bench", "--task-option", "max_number=many"],
            "max_number of task gsm_symbolic is 'many'; it must be a number or null",
        ),
        (["bench", "--task-option", "max_question_chars=null"], "max_question_chars of task gsm_symbolic is None"),
        (["bench", "--task", "jsonl", "--task-option", "path=5"], "option path of task jsonl is 5; it must be a text"),
        (
            ["bench", "--task", "reasoning_gym", "--task-option", "names=chain_sum"],
            "is 'chain_sum'; it must be a list, each entry a text",
        ),
        (
            ["bench", "--task", "mixture", "--task-option", 'parts=[{"task": "gsm_symbolic", "in_parts": 1}]'],
            "option in_parts of task gsm_symbolic is 1; it must be true or false",
        ),
        (["bench", "--backend", "vllm", "--clients", "inf"], "--clients is 'inf'; give whole numbers of at least 1"),
        (["bench", "--backend", "vllm", "--clients", "1.7"], "--clients is '1.7'; give whole numbers of at least 1"),
        (["bench", "--zero-shot-threshold", "0.5", "--modes", "parse"], "is for the mode parse-zero-shot"),
        (["bench", "--threshold", "0.9", "--modes", "target,parse-min-p"], "--threshold is for the modes parse and"),
        (["bench", "--risk", "0.05", "--modes", "target,parse-min-p"], "--risk is for the modes parse and sequential"),
        (["bench", "--top-p", "0.5"], "--top-p changes nothing at temperature 0: give --temperature too"),
        (["calibrate", "--top-k", "20"], "--top-k changes nothing at temperature 0"),
        (["generate", "Hi", "--device", "meta"], "device 'meta' holds no weights"),
        (["score", "Hi", "Ho", "--cut-policy", "step:3"], "the cut policy 'step:3' has no whole number of tokens"),
        (["bench", "--split", "tset"], "unknown split 'tset'; choose one of train, validation, test"),
        (["bench", "--modes", "assisted:tokens=few"], "'tokens=few' in mode 'assisted:tokens=few' is none of"),
        (
            ["bench", "--limit", "1", "--block-tokens", "0"],
            "block_tokens is 0; it must be a whole number of at least 1",
        ),
        (["bench", "--limit", "1", "--thresholds", "0.5,x"], "--thresholds is '0.5,x'"),
        (["bench", "--limit", "1", "--threshold", "-1"], "the threshold must be a finite number"),
        (["bench", "--risk", "0.05", "--draft-temperature", "1"], "promises and benchmarks of servers have greedy"),
        (["bench", "--samples", "0"], "--samples"),
        (["bench", "--modes", "target+draft:greedy=0.5"], "greedy of the token drafter 'draft:greedy=0.5' must be a"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, sentence):
    assert sentence in error_of(capsys, *arguments)


def test_without_a_judge_the_answer_is_the_targets(models, capsys):
    assert main(["generate", "Hi", *models[:4], "--max-new-tokens", "12", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["lossless"] is True
    assert main(["generate", "Hi", *models[:4], "--mode", "exact", "--max-new-tokens", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == answer["text"]


def test_missing_and_foreign_adapters_are_named(models, tmp_path, make_model, tokenizer, capsys):
    assert "nowhere" in error_of(capsys, "generate", "Hi", *models, "--adapter", str(tmp_path / "nowhere"))
    other = make_model("llama", seed=9)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    sentence = error_of(capsys, "generate", "Hi", *models, "--target", str(tmp_path / "other"))
    assert "other" in sentence and "adapter" in sentence


def test_a_half_written_model_is_an_error(models, tmp_path, capsys):
    (tmp_path / "half").mkdir()
    assert "config.json is missing" in error_of(
        capsys, "score", "Hi", "Ho", *models[4:], "--target", str(tmp_path / "half")
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"prompt": "Hi"}\n{"prompt": ', "line 2: not complete JSON"),
        ('{"prompt": "Hi"}\n\n{"question": "Hi"}', "line 3: no key 'prompt'"),
        ('{"prompt": 3}', "line 1: 'prompt' must be a text or a list of chat messages"),
        ('["Hi"]', "line 1: a row must be a JSON object"),
        ("\n", "has no rows"),
        ('{"prompt": "Hi"}\n{"prompt": " "}', "line 2: The prompt is empty"),
    ],
)
def test_a_malformed_line_is_named_before_anything_runs(models, tmp_path, capsys, lines, sentence):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    assert sentence in error_of(capsys, "generate", "--file", str(path), *models)


def test_a_prompt_beyond_the_window_is_an_error(models, capsys):
    assert "context window is 2048" in error_of(capsys, "generate", "a" * 3000, *models)


def test_generate_has_the_settings_of_the_server(monkeypatch):
    seen = []

    def load(self, *, expected, **_):
        seen.append(expected)
        raise ValueError("enough")

    monkeypatch.setattr(ModelOptions, "load", load)
    words = ["--block-tokens", "3", "--temperature", "0.5", "--top-k", "7", "--seed", "1"]
    assert main(["generate", "Hi", *words]) == 2
    sampling = Sampling(0.5, 1.0, 7, 1)
    assert (seen[0].block_tokens, seen[0].resume_sampling) == (3, sampling)
    assert seen[0].draft_sampling == sampling
    assert main(["generate", "Hi", *words, "--draft-temperature", "0"]) == 2
    assert (seen[1].resume_sampling, seen[1].draft_sampling) == (sampling, Sampling(0.0, 1.0, 7, 1))
    assert main(["generate", "Hi", "--block-tokens", "0"]) == 2 and len(seen) == 2


UNUSUAL = "A box holds 12 pens. How many pens are in 7 boxes?"  # for the judge of the embedded pair


@pytest.mark.parametrize("how", [[], ["--stream"], ["--json"], ["--stream", "--json"], ["--out"]], ids=str)
@pytest.mark.slow
def test_generate_reports_every_fallback_and_that_no_promise_holds(tmp_path, capsys, how):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": UNUSUAL}) + "\n")
    how = [*how, str(tmp_path / "answers")] if how == ["--out"] else how
    assert main(["generate", "--file", str(tmp_path / "rows.jsonl"), "--risk", "0.05", *how]) == 0
    captured = capsys.readouterr()
    (note,) = [line for line in captured.err.splitlines() if line.startswith("note: ")]
    assert "unusual_draft" in note and "line 1" in note and "the promise of --risk 0.05 does not hold" in note
    assert "note:" not in captured.out


@pytest.mark.slow
def test_score_reports_a_response_that_the_judge_does_not_know(capsys):
    response = "7 boxes hold 7 x 12 = 84 pens."
    assert main(["score", UNUSUAL, response, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["unusual"] and json.loads(captured.out)["validity"] is None
    assert captured.err.splitlines()[-1].startswith("note: the response is unlike the judge's training drafts")
    assert main(["score", UNUSUAL, response]) == 0
    assert capsys.readouterr().out == f"? {response}\n".replace("? ", "?      ")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape"])
@pytest.mark.slow
def test_bytes_that_are_not_utf_8_are_one_sentence(models, encoding):
    """On standard input, which some locales read with half surrogates."""
    command = [sys.executable, "-m", "parse_infer", "generate", *models]
    for content, arguments in ((b"caf\xe9 5?", []), (b'{"prompt": "caf\xe9"}\n', ["--file", "-"])):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        run = subprocess.run([*command, *arguments], input=content, capture_output=True, env=environment, cwd=ROOT)
        lines = run.stderr.decode().splitlines()
        assert run.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
        assert "UTF-8" in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "\udce9?"],
        ["generate", "Hi", "--draft-text", "\udce9"],
        ["generate", "Hi", "--stop", "\udce9"],
        ["score", "Hi", "\udce9"],
        ["score", "\udce9", "Hi"],
    ],
)
def test_half_of_a_surrogate_pair_is_one_sentence(models, capsys, arguments):
    assert "half of a surrogate pair" in error_of(
        capsys, *arguments, *(judge_only(models) if arguments[0] == "score" else models)
    )


@pytest.mark.parametrize("key", ["prompt", "id", "draft"])
def test_a_row_with_half_of_a_surrogate_pair_is_named(models, tmp_path, capsys, key):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "Hi"}) + "\n" + json.dumps({"prompt": "Hi", key: "\ud800"})
    )
    sentence = error_of(capsys, "generate", "--file", str(tmp_path / "rows.jsonl"), *models)
    assert "line 2" in sentence and "half of a surrogate pair" in sentence


def test_the_folder_above_an_adapter_is_not_the_adapter(models, tmp_path, capsys):
    """Nor is the folder above a model, a head or a calibration."""
    (tmp_path / "run").mkdir()
    Path(tmp_path / "run" / "adapter").symlink_to(_folders["adapter"])
    Path(tmp_path / "run" / "final").symlink_to(_folders["target"])
    for option, lies in (("--adapter", "run/adapter"), ("--target", "run/final"), ("--draft", "run/final")):
        sentence = error_of(capsys, "generate", "Hi", *models, option, str(tmp_path / "run"))
        assert sentence.rstrip(".\n").endswith(f"; it lies in {tmp_path / lies}"), sentence
    sentence = error_of(capsys, "generate", "Hi", *models, "--calibration", str(Path(resolve("zoo:adapter"))))
    assert sentence.rstrip().endswith("give the file in it, " + str(Path(resolve("zoo:adapter")) / "calibration.json"))


def test_a_misspelt_template_option_is_refused(models, capsys):
    sentence = error_of(capsys, "generate", "Hi", *models, "--template-option", "enable_thinkng=false")
    assert "reads no option 'enable_thinkng'" in sentence


def test_every_program_has_the_packages_version(capsys):
    for program in (main, data_main, train_main):
        assert program(["--version"]) == 0
        assert capsys.readouterr().out == f"{parse_infer.__version__}\n"


@pytest.mark.parametrize("program", [main, data_main])
def test_the_list_of_commands_is_not_cut(monkeypatch, capsys, program):
    monkeypatch.setenv("COLUMNS", "80")
    assert program(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands and "..." not in commands and max(map(len, commands.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["generate", "Hi"], ["demo"], ["bench"], ["serve", "--port", "0"]])
def test_an_interruption_prints_one_line(monkeypatch, capsys, arguments):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelOptions, "load", interrupt)
    assert main(arguments) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_an_interrupted_build_prints_one_line(monkeypatch, capsys):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data_tools.labels.build.build", interrupt)
    assert data_main(["build", "recipes/data.yaml"]) == 130
    assert "interrupted" in capsys.readouterr().err.splitlines()[-1]


def test_option_values_are_json_or_pythons_constants_or_text():
    pairs = ["a=false", "b=False", "c=True", "d=None", "e=0.5", "f=falsch", 'g="False"']
    values = {"a": False, "b": False, "c": True, "d": None, "e": 0.5, "f": "falsch", "g": "False"}
    assert read_pairs(pairs, "--template-option") == values
