"""`--backend vllm` on the command line and in the server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from parse_infer.calibration.calibration_file import load_calibrations, save_calibrations
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.cli.app import main
from parse_infer.cli.model_options import ModelOptions
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.serve.conftest import running

PROMPTS = [f"Tom has {n} apples. How many are left?" for n in range(6)]


@pytest.fixture
def coordinated(engine, connect, monkeypatch):
    coordinator, targets, _draft = connect(engine)
    monkeypatch.setattr(coordinator, "close", lambda: None)  # for one command after the other
    monkeypatch.setattr(ModelOptions, "load", lambda self, **_: coordinator)
    return engine, targets[0]


def local(engine, prompt: str) -> str:
    return engine.generate(prompt, max_new_tokens=24).text


@pytest.mark.slow
def test_a_file_of_prompts_is_answered_in_order_and_resumed(coordinated, tmp_path, capsys):
    engine, target = coordinated
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers"
    file.write_text("".join(json.dumps({"prompt": p, "id": f"q{i}"}) + "\n" for i, p in enumerate(PROMPTS)))
    command = ["generate", "--file", str(file), "--backend", "vllm", "--max-new-tokens", "24"]
    assert main([*command, "--out", str(out)]) == 0
    records = out / "records.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(row["row"], row["id"]) for row in rows] == [(i, f"q{i}") for i in range(6)]
    assert [row["answer"]["text"] for row in rows] == [local(engine, p) for p in PROMPTS]
    whole = records.read_text()
    records.write_text("".join(whole.splitlines(keepends=True)[:4])[:-20])  # killed in the middle of a line
    target.bodies.clear()
    assert main([*command, "--out", str(out)]) == 0
    again = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["answer"]["text"] for row in again] == [row["answer"]["text"] for row in rows]
    prompts = {
        tuple(body["prompt"][0] if isinstance(body["prompt"][0], list) else body["prompt"]) for body in target.bodies
    }
    first = tuple(engine.target.render(PROMPTS[0]))
    assert not any(prompt[: len(first)] == first for prompt in prompts), "an existing answer was requested again"
    capsys.readouterr()
    assert main([*command, "--out", str(out), "--stop", "x"]) == 2
    assert "holds a run of answers with settings" in capsys.readouterr().err


def test_answers_and_events_are_written_as_those_of_the_local_engine_are(coordinated, capsys):
    engine, _ = coordinated
    command = ["generate", PROMPTS[0], "--backend", "vllm", "--max-new-tokens", "24", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["text"] == local(engine, PROMPTS[0])
    assert main([*command, "--stream"]) == 0
    *events, done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert done["event"] == "done" and done["text"] == local(engine, PROMPTS[0])
    assert "".join(e["text"] for e in events if e["event"] in ("accepted", "resumed")) == done["text"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "sglang"], "--backend is 'sglang'; choose local or vllm"),
        (["--target-url", "http://127.0.0.1:9"], "--target-url and --draft-url need --backend vllm"),
        (["--parallel", "4"], "--parallel needs --backend vllm: the local backend answers one request at a time"),
        (["--backend", "vllm", "--target-drafter", "lookup"], "--target-drafter needs --backend local"),
        (["--backend", "vllm", "--torch-compile"], "--torch-compile needs --backend local"),
        (["--backend", "vllm", "--dtype", "float32"], "--device, --dtype and --draft-dtype need --backend local"),
        (["--backend", "vllm", "--judge", "zero_shot", "--adapter", "zoo:adapter"], "both given: choose one"),
        (["--judge", "min_q"], "'min_q' is not a judge; did you mean 'min_p'?"),
        (["--judge", "min_p:ratio=2"], "the ratio of min_p is 2.0; it must be above 0 and at most 1"),
        (["--judge", "min_p:share=0.2"], "'share' is no option of the judge min_p"),
        (["--judge", "min_p:ratio=high"], "ratio of the judge min_p is 'high'; it must be a number"),
        (["--judge", "zero_shot:ratio=1"], "'ratio' is no option of the judge zero_shot; it has no options"),
        (
            ["--backend", "vllm", "--target-url", "http://127.0.0.1:9", "--draft-url", "http://127.0.0.1:9"],
            "the target server http://127.0.0.1:9/v1/models does not answer",
        ),
        (["--backend", "vllm", "--target-url", "gpu-1:8000"], "'gpu-1:8000' is not a server address"),
        (
            ["--backend", "vllm", "--judge", "zero_shot", "--mode", "exact"],
            "mode 'exact' over servers reads",
        ),
        (["--backend", "vllm", "--risk", "0.01"], "risk is 0.01, but no calibration for --backend vllm was given"),
        (
            ["--backend", "vllm", "--target", "zoo:draft", "--adapter", "zoo:adapter", "--draft", "zoo:draft"],
            "was trained for the target",
        ),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, capsys):
    assert main(["generate", "Hi", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--clients", "1,4"], "--clients needs --backend vllm"),
        (["serve", "--backend", "vllm", "--risk", "0.01"], "no calibration for --backend vllm was given"),
        (
            ["serve", "--backend", "vllm", "--judge", "zero_shot", "--risk", "0.01"],
            "no calibration for --backend vllm",
        ),
        (["serve", "--backend", "vllm"], "no address of target was given: start the target's server with `vllm serve"),
        (
            ["serve", "--backend", "vllm", "--target-url", "http://127.0.0.1:1", "--draft-server"],
            "--enable-prefix-caching --block-size 32 --stream-interval 16 --port 8002` and give --draft-url http://127",
        ),
        (["calibrate", "--backend", "vllm", "--limit", "20"], "takes at least 299 problems"),
        (["generate", "Hi", "--backend", "vllm"], "PARSE_VLLM_PYTHON is '/nowhere/python', which is not a program"),
    ],
)
def test_impossible_options_are_refused_before_a_model_loads(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setenv("PARSE_VLLM_PYTHON", "/nowhere/python")
    monkeypatch.setattr(
        "parse_infer.backends.local.load.load_backend", lambda *_, **__: pytest.fail("models were loaded")
    )
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("by", ["option", "variable"])
def test_requests_carry_the_key_of_the_servers(by, engine, connect, monkeypatch, capsys):
    _coordinator, (target,), draft = connect(engine, keys=("secret", "secret"))
    addresses = ["--target-url", target.url, "--draft-url", draft.url, "--backend", "vllm"]
    if by == "variable":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
    command = ["generate", "Hi", "--adapter", "zoo:adapter", *addresses, "--max-new-tokens", "8"]
    assert main([*command, *(["--server-key", "secret"] if by == "option" else [])]) == 2
    # The server lets it in, and turns out to be another one.
    assert "(401)" not in (said := capsys.readouterr().err) and "has other tokens than" in said
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert main(command) == 2 and "(401): Unauthorized: give its API key" in capsys.readouterr().err


@pytest.mark.slow
def test_a_calibration_over_servers_keeps_the_local_one(coordinated, monkeypatch, tmp_path, capsys):
    local = Calibration("t", 300, "x", "lost", 0.9, 24, {}, [], {0.1: None})
    found = replace(local, models={"backend": "vllm"})
    monkeypatch.setattr("parse_infer.calibration.measure.calibrate", lambda *_, **__: found)
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    out.mkdir()
    save_calibrations(adapter / "calibration.json", [local])
    assert main(["calibrate", "--backend", "vllm", "--adapter", str(adapter), "--out", str(out)]) == 0
    assert load_calibrations(out / "calibration.json") == (found,)
    assert load_calibrations(adapter / "calibration.json") == (local, found)
    said = capsys.readouterr().out
    assert "not proven" in said and "with promises for greedy answers (local) and greedy answers (vllm)" in said


@pytest.mark.slow
def test_many_clients_of_the_server_get_the_engines_text(engine, connect):
    coordinator, _, _ = connect(engine, parallel=4)
    own = {prompt: local(engine, prompt) for prompt in PROMPTS}
    with running(LoopRunner(coordinator), engine) as served, ThreadPoolExecutor(8) as pool:
        bodies = [{"max_tokens": 24, "parse": {"adaptive": n % 3 == 0, "threshold": 0.5}} for n in range(12)]
        answers = list(pool.map(lambda pair: served.chat(pair[0], **pair[1]), zip(PROMPTS * 2, bodies, strict=True)))
        for n, (prompt, answer) in enumerate(zip(PROMPTS * 2, answers, strict=True)):
            assert answer.status_code == 200, answer.text
            if n % 3:
                assert answer.json()["choices"][0]["message"]["content"] == own[prompt]
        assert served.becomes_idle(5)
        refused = served.chat("Hi", parse={"risk": 0.01})
        assert refused.status_code == 400 and "no calibration for --backend vllm" in refused.text


@pytest.mark.parametrize(
    ("options", "adaptive"),
    [
        (["--backend", "vllm"], True),
        (["--backend", "vllm", "--no-adaptive"], False),
        ([], False),
        (["--adaptive"], True),
    ],
)
def test_over_servers_adaptive_is_the_default(coordinated, monkeypatch, options, adaptive):
    calls = []
    for place in ("thread_runner.ThreadRunner", "loop_runner.LoopRunner"):
        backend = SimpleNamespace(name="target", pools={}, close=lambda: None)
        monkeypatch.setattr(f"parse_infer.serve.{place}", lambda models, backend=backend: backend)
    monkeypatch.setattr(
        "parse_infer.serve.app.create_app", lambda runner, settings, *_: calls.append(settings.adaptive)
    )
    monkeypatch.setattr("parse_infer.serve.server.ApiServer", lambda *_: SimpleNamespace(run=lambda sockets: None))
    assert main(["serve", "--port", "0", *options]) == 0
    assert calls == [adaptive]


@pytest.mark.parametrize(("options", "parallel"), [([], None), (["--parallel", "7"], 7)])
def test_the_number_of_concurrent_answers_is_an_option(monkeypatch, options, parallel):
    calls = []

    def from_pretrained(*_, **given):
        calls.append(given.get("parallel"))
        raise OSError("no server here")

    monkeypatch.setattr("parse_infer.engine.ParseEngine.from_pretrained", from_pretrained)
    for command in (["generate", "Hi"], ["serve", "--port", "0"]):
        assert main([*command, "--backend", "vllm", *options]) == 2
    assert calls == [parallel, parallel]


@pytest.mark.parametrize("given", [[], ["--draft", "zoo:draft", "--adapter", "zoo:adapter", "--local-draft"]])
@pytest.mark.parametrize(
    ("modes", "judged"), [("target+ngram", False), ("target,parse", False), ("parse,target", True)]
)
def test_the_target_alone_is_measured_without_draft_model_and_judge(monkeypatch, tmp_path, modes, judged, given):
    """On a server of its own, then: a stock one."""
    calls = []

    def from_pretrained(target, draft, adapter, **options):
        calls.append((target, draft, adapter, options["judge"]))
        raise OSError("no server here")

    monkeypatch.setattr("parse_infer.engine.ParseEngine.from_pretrained", from_pretrained)
    command = ["bench", "--backend", "vllm", "--limit", "1", "--modes", modes, "--clients", "1"]
    assert main([*command, *given, "--out", str(tmp_path / "own")]) == 2
    assert calls == [("zoo:target", "zoo:draft", "zoo:adapter", None) if judged else ("zoo:target", None, None, None)]


def test_a_promise_over_servers_is_measured_beside_the_target_alone(monkeypatch, tmp_path, capsys):
    tried = [TestedPoint(OperatingPoint(0.8, "whole"), 0, 0.04, 2.0, 0.1)]
    file = tmp_path / "calibration.json"
    save_calibrations(file, [Calibration("t", 300, "x", "lost", 0.9, 24, {"backend": "vllm"}, tried, {0.05: 0})])
    calls = []

    def from_pretrained(target, draft, adapter, **options):
        calls.append(options["calibration"])
        raise OSError("no server here")

    monkeypatch.setattr("parse_infer.engine.ParseEngine.from_pretrained", from_pretrained)
    command = ["bench", "--backend", "vllm", "--limit", "1", "--clients", "1", "--risk", "0.05"]
    for modes in ("target,parse", "parse,target"):
        out = ["--modes", modes, "--out", str(tmp_path / modes)]
        assert main([*command, *out, "--calibration", str(file)]) == 2
    assert calls == [None, str(file)]
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "shipped")]) == 2  # the adapter's own is for local models
    assert "this engine has no calibration: run `parse-infer calibrate`" in capsys.readouterr().err and len(calls) == 2


@pytest.mark.parametrize(
    ("gpu", "options", "together"), [(False, [], True), (True, [], False), (True, ["--target-url", "http://x"], True)]
)
def test_servers_run_together_if_memory_allows(monkeypatch, tmp_path, gpu, options, together):
    measured = []

    def run_clients(connect, load, *_):
        measured.append((load.turns, load.together))
        raise OSError("enough")

    monkeypatch.setattr("parse_infer.evaluation.load_test.run_clients", run_clients)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    command = ["bench", "--backend", "vllm", "--limit", "1", "--modes", "target", "--repeats", "3", *options]
    assert main([*command, "--out", str(tmp_path)]) == 2 and measured == [(3, together)]
