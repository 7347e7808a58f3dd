"""`parse-infer advise`: predictions against measured runs, recommendations, and commands that the tools accept."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from parse_infer.cli.app import app, main
from parse_infer.evaluation.ladder import CASES, Acceptance, advise, predict_speedup
from parse_infer.evaluation.serving_costs import Costs

ZOO = Path(__file__).parents[3] / "zoo" / "parse_zoo" / "models"
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def measured(name: str) -> dict[str, dict[str, Any]]:
    """The columns of a benchmark's records, by mode."""
    modes: dict[str, dict[str, Any]] = json.loads((RESULTS / name).read_text())["records"]["modes"]
    return modes


def total(mode: dict[str, Any], field: str) -> float:
    return sum(value or 0 for value in mode.get(field, ()))


def acceptance(mode: dict[str, Any]) -> Acceptance:
    tokens = total(mode, "n_tokens")
    return Acceptance(tokens / total(mode, "target_forwards"), total(mode, "draft_forwards") / tokens)


def costs(draft: float = 0.1, read: float = 0.02, **fields: Any) -> Costs:
    """Costs in target forwards."""
    given = {"target_token_s": 1.0, "draft_token_s": draft, "read_token_s": read, "draft_tokens": 256}
    return Costs.of({**given, "kept_tokens": 0, "answer_tokens": 200, **fields})


@pytest.mark.parametrize(
    ("name", "case", "step", "mode"),
    [
        ("qwen-coder-mt-bench.json", "public pair, chat", "lossless", "target+draft"),
        ("qwen-coder-3850.json", "public pair, maths", "lossless", "target+draft"),
        ("qwen-coder-3850.json", "public pair, maths", "judge", "parse"),
        ("thresholds.json", "tuned pair, maths", "lossless", "target+draft"),
        ("thresholds.json", "tuned pair, maths", "rule", "parse-min-p@0.3"),
        ("thresholds.json", "tuned pair, maths", "judge", "parse@0.8"),
    ],
)
def test_an_assumption_is_what_a_run_measured(name, case, step, mode):
    assumed, found = CASES[case][step], acceptance(measured(name)[mode])
    assert found.tokens == pytest.approx(assumed.tokens, rel=0.02)
    assert found.drafted == pytest.approx(assumed.drafted, rel=0.02)


@pytest.mark.parametrize("name", ["embedded.json", "smollm2.json", "smollm2-h200.json", "qwen-coder-3850.json"])
@pytest.mark.parametrize("mode", ["target+draft", "parse"])
def test_measured_runs_are_at_most_a_quarter_slower_than_predicted(name, mode):
    modes = measured(name)
    target, draft = modes["target"], modes["draft"]
    n, tokens = len(target["seconds"]), total(target, "n_tokens")
    first_s = total(target, "first_text_s") / n  # mostly the prompt
    target_s = (total(target, "seconds") / n - first_s) / (tokens / n)
    read = total(draft, "prefill_s") / n - first_s  # of a draft behind the prompt
    drafted = total(draft, "n_tokens") / n
    own = Costs.of(
        {
            "target_token_s": target_s,
            "draft_token_s": total(draft, "seconds") / total(draft, "n_tokens"),
            "read_token_s": max(read, target_s) / drafted,
            "prompt_tokens": first_s / (max(read, target_s) / drafted),
            "answer_tokens": tokens / n,
            "draft_tokens": drafted,
            "kept_tokens": 0,
        }
    )
    speed = total(modes[mode], "n_tokens") / total(modes[mode], "seconds") * total(target, "seconds") / tokens
    predicted = predict_speedup(own, acceptance(modes[mode]))
    assert 0.75 < speed / predicted < 1.05, (speed, predicted)


def test_a_free_draft_model_is_as_fast_as_the_tokens_per_forward():
    assert predict_speedup(costs(draft=1e-9, read=1e-9), Acceptance(4.0, 1.2)) == pytest.approx(4.0, rel=1e-3)
    without_prompt = predict_speedup(costs(), Acceptance(4.0, 1.2))
    assert 1 < predict_speedup(costs(prompt_tokens=2000), Acceptance(4.0, 1.2)) < without_prompt


def test_without_an_adapter_no_bound_is_recommended_unmeasured():
    assert advise(costs(), has_judge=True).step == "judge"
    lossless = advise(costs(), has_judge=False)
    assert lossless.step == "lossless" and "not on the public one" in lossless.reasons[0]


@pytest.mark.parametrize("has_judge", [False, True])
def test_a_server_gains_if_drafts_are_accepted_as_in_the_named_run(has_judge):
    assert "accepted as in public pair, maths" in advise(costs(answer_tokens=40), has_judge, rate=1e-3).reasons[-1]


def test_answers_of_models_that_are_not_embedded_may_be_longer(file, tmp_path, capsys):
    copy = tmp_path / "own"
    shutil.copytree(ZOO / "target", copy)
    held = json.loads(Path(file).read_text()) | {"target": str(copy)}
    Path(file).write_text(json.dumps(held))
    assert main(["advise", "--target", str(copy), "--draft", "zoo:draft", "--costs", file]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("parse-infer ")]
    answering = [line for line in printed if not line.startswith("parse-infer transfer ")]
    assert answering and all("--max-new-tokens 512" in line for line in answering)


def test_a_slow_draft_model_and_a_saturated_server_are_advised_against():
    slow = advise(costs(draft=0.9), has_judge=True)
    assert slow.step is None and "0.90 of a target forward" in slow.reasons[0]
    some = advise(costs(draft=0.3, read=0.05), has_judge=False)
    assert some.step == "lossless" and not any("slower" in reason for reason in some.reasons)
    assert any("public pair, chat" in reason for reason in advise(costs(draft=0.7), has_judge=False).reasons)
    assert advise(costs(answer_tokens=40), has_judge=False, rate=1e-3).step == "lossless"
    batched: dict[str, Any] = {
        "target_token_s": {"1": 1.0, "32": 1.1},
        "draft_token_s": {"1": 0.1, "32": 3.2},
        "read_token_s": 0.3,
    }
    full = advise(costs(**batched, answer_tokens=40), has_judge=False, rate=1.0, gpus=2)
    assert full.step is None and "1 arrivals/s on 2 GPUs" in full.reasons[0]


@pytest.fixture
def file(tmp_path) -> str:
    held: dict[str, Any] = {
        "target": "zoo:target",
        "draft": "zoo:draft",
        "target_token_s": {"1": 0.01},
        "draft_token_s": {"1": 0.001},
    }
    held |= {"read_token_s": {"1": 0.0002}, "prompt_tokens": 200, "draft_tokens": 100, "answer_tokens": 100}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(held))
    return str(path)


@pytest.mark.parametrize(
    ("options", "step", "commands"),
    [
        ([], 1, ["bench", "calibrate", "transfer", "calibrate"]),
        (["--prompts"], 1, ["bench", "calibrate", "transfer", "calibrate"]),
        (
            ["--template-option", "enable_thinking=false", "--max-new-tokens", "64"],
            1,
            ["bench", "calibrate", "transfer", "calibrate"],
        ),
        (["--prompts", "--no-references"], 1, ["bench", "calibrate", "transfer", "calibrate"]),
        (["--adapter", "zoo:adapter", "--temperature", "0.7", "--top-k", "20"], 3, ["bench", "calibrate"]),
        (["--prompts", "--no-references", "--temperature", "1"], 1, ["bench"]),
        (
            ["--device", "cpu", "--dtype", "float32", "--rate", "0.01"],
            1,
            ["bench", "calibrate", "transfer", "calibrate"],
        ),
    ],
)
def test_the_printed_commands_are_accepted(file, tmp_path, capsys, options, step, commands):
    prompts = tmp_path / "my prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1?", "reference": "2"}')
    more = [part for option in options for part in ([option, str(prompts)] if option == "--prompts" else [option])]
    assert main(["advise", "--target", "zoo:target", "--costs", file, *more]) == 0
    out = capsys.readouterr().out
    assert f"Recommended: step {step}, " in out
    printed = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("parse-infer ")]
    assert [words[0] for words in printed] == commands
    for option in ("--template-option", "--max-new-tokens"):
        assert sum(option in words for words in printed) == (len(printed) - commands.count("transfer")) * (
            option in options
        )
    group = typer.main.get_command(app)
    for words in printed:
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        given = command.make_context(words[0], words[1:]).params
        assert given["target"] == "zoo:target"
        if words[0] != "transfer":
            assert given["draft"] == "zoo:draft"
            own = [f"path={prompts}"] * ("--prompts" in options) + ["check_with=none"] * ("--no-references" in options)
            assert [*given["task_option"]] == own and given["task"] == ("jsonl" if own else "gsm_symbolic")
            assert given["temperature"] == (0.7 if "0.7" in options else 1 if "1" in options else 0)
        if words[0] == "calibrate":
            assert given["risk"] == "0.05,0.1", "what the heading announces, and fewer problems suffice"
            assert given["loss"] == (
                "disagreement" if "--no-references" in options else "accuracy" if "0.7" in options else "lost"
            )


@pytest.mark.slow
def test_a_pair_is_timed_from_its_configuration(capsys):
    arguments = ["--target", "zoo:target", "--prompt-tokens", "20", "--answer-tokens", "16", "--rounds", "1"]
    assert main(["advise", *arguments]) == 0
    out = capsys.readouterr().out
    assert "zoo:target and zoo:draft, random weights, float32, cpu" in out and "a target forward takes" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--target zoo:targe", "did you mean 'zoo:target'"),
        ("--target zoo:target --draft zoo:drft --costs FILE", "did you mean 'zoo:draft'"),
        ("--target zoo:smollm2 --costs FILE", "costs of zoo:target and zoo:draft, not of zoo:smollm2 and"),
        ("--target zoo:target --costs none.json", "No such file or directory: none.json"),
        ("--target zoo:target --costs FILE --prompts none.jsonl", "--prompts none.jsonl is no file"),
        ("--target zoo:target --costs FILE --adapter ./none", "./none"),
        ("--target zoo:target --costs FILE --rate 0", "--rate 0 is no arrival rate"),
        ("--target zoo:target --costs FILE --top-p 2", "top_p must be a number above 0 and at most 1"),
        ("--target zoo:target --costs FILE --template-option think", "--template-option 'think' is not KEY=VALUE"),
        ("--target Qwen/Qwen3-8B --costs FILE", "needs a draft model of its own: give one with --draft"),
        ("--draft zoo:draft", "--target"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message, file, capsys):
    assert main(["advise", *arguments.replace("FILE", file).split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
