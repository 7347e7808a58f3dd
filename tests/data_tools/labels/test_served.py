"""A build behind servers is the local build, whatever happens to the servers or to it."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_tools.cli import main
from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.logprobs import read_drafts
from data_tools.labels.served.writer import ServedWriter
from parse_infer.models.loading import LanguageModel, load_language_model
from tests.data_tools.labels.completion_server import CompletionServer, Fault
from tests.data_tools.labels.test_build import _RUN, content, files, rows_of

Make = Callable[..., BuildConfig]
Serve = Callable[..., CompletionServer]
SAMPLED = {"rollouts": 2, "max_rollouts": 8, "rollout_temperature": 1.0, "margin": 0.45, "limit": 7}


@pytest.fixture(scope="module")
def models(pair: Path) -> dict[str, LanguageModel]:
    return {role: load_language_model(pair / role, role="draft") for role in ("target", "draft")}


@pytest.fixture
def serve(models: dict[str, LanguageModel]) -> Iterator[Serve]:
    """`serve(**options)`: a running server of both models."""
    started = []

    def start(**options: Any) -> CompletionServer:
        started.append(CompletionServer(models, **options).start())
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.labels.served.servers._BACK_OFF_S", 0.01)
    monkeypatch.setattr("parse_infer.backends.pool.retries._LONGEST_BACK_OFF_S", 0.1)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("PARSE_DRAFT_API_KEY", raising=False)


@pytest.fixture
def make(make_config: Make) -> Make:
    """A configuration of a build behind servers."""

    def served(output_dir: str, *servers: CompletionServer, **options: Any) -> BuildConfig:
        behind = {
            "backend": "openai",
            "target_url": [server.url for server in servers],
            "served_target": "target",
            "served_draft": "draft",
            "concurrency": 6,
        }
        return make_config(output_dir, **behind | options)

    return served


def labelled(folder: str | Path) -> list[dict[str, Any]]:
    rows = rows_of(folder)
    assert len({(row["problem_id"], row["temperature"], row["seed"]) for row in rows}) == len(rows)
    return rows


@pytest.mark.parametrize("options", [{}, SAMPLED, {"exhaustive": True, "limit": 4}], ids=["greedy", "sampled", "all"])
@pytest.mark.slow
def test_the_rows_are_those_of_the_local_build(
    make: Make, make_config: Make, serve: Serve, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = serve(), serve()
    local = make_config("local", **options)
    build(local)
    build(ids := make("ids", one, draft_url=[other.url], **options))
    assert files(ids.output_dir) == files(local.output_dir)
    assert {body["model"] for body in one.asked} == {"target"}
    assert {body["model"] for body in other.asked} == {"draft"}
    gc.collect()
    assert "Unclosed" not in caplog.text

    before = len(one.asked)
    build(ids)  # nothing is left to do
    assert len(one.asked) == before


@pytest.mark.slow
def test_prompts_are_text_for_a_server_without_token_ids(make: Make, make_config: Make, serve: Serve) -> None:
    options = {"temperatures": [0.0]}  # at higher ones these models write bytes that are no text
    build(text := make("text", server := serve(ids=False, lists=False), wire="text", **options))
    build(local := make_config("local", **options))
    assert files(text.output_dir) == files(local.output_dir)
    assert {key for body in server.asked for key in body} == {"model", "prompt", "max_tokens", "temperature", "top_p"}


@pytest.mark.slow
def test_requests_with_a_common_prefix_go_to_one_server_next_to_each_other(make: Make, serve: Serve) -> None:
    servers = [serve(), serve()]
    build(make("data", *servers, concurrency=1, problems_per_group=12, exhaustive=True, limit=6, **_SHARES))
    seen: list[set[str]] = []
    for server in servers:
        texts = ["".join(map(chr, body["prompt"])) for body in server.asked if body["model"] == "target"][1:]
        problems = [text[: text.index(chr(257)) + 1] for text in texts]  # to the end of the question
        seen.append(set(problems))
        at_once = problems[problems.index(problems[0], 4) :]  # behind the questions alone
        assert len(at_once) > 2 * len(set(at_once))
        assert sum(a != b for a, b in itertools.pairwise(at_once)) == len(set(at_once)) - 1
        for one, after in zip(texts[-len(at_once) :], texts[-len(at_once) + 1 :], strict=False):
            assert not (one.startswith(after) and one != after)  # the shorter first
    assert not seen[0] & seen[1] and all(seen)


_SHARES = {"rollouts": 4, "max_rollouts": 4, "rollout_temperature": 1.0, "margin": 0.45, "temperatures": [1.0]}
_SHARES |= {"max_label_error": 0.2}


@pytest.mark.slow
def test_no_more_requests_are_in_flight_than_allowed(make: Make, serve: Serve) -> None:
    server = serve(pause=0.05)
    build(make("data", server, concurrency=3))
    assert server.most == 3


FAULTS = ["status 500", "status 503", "status 429", "status 408", "drop", "cut", "garbage", "slow", "abort", "short"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_failed_requests_are_retried(make: Make, make_config: Make, serve: Serve, fault: str) -> None:
    # A request that timed out has one more attempt: alone it has the next number, and waits for no other's.
    options = {"limit": 3, "concurrency": 1} if fault == "slow" else {"limit": 6}

    def every_third(number: int) -> Fault:
        return fault if number > 2 and number % (9 if fault == "slow" else 3) == 0 else None

    server = serve(fault=every_third)
    config = make("served", server, request_timeout=1.0 if fault == "slow" else 60.0, retries=12, **options)
    build(config)
    build(local := make_config("local", **options))
    assert labelled(config.output_dir) == labelled(local.output_dir)
    assert content(config.output_dir) == content(local.output_dir)


@pytest.mark.slow
def test_a_restarted_server_loses_and_repeats_no_answer(
    make: Make, make_config: Make, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(pause=0.002)

    def strike() -> None:
        for number in (15, 40):
            while server.answered < number:
                time.sleep(0.001)
            server.kill()
            time.sleep(0.3)
            server.start()

    striking = threading.Thread(target=strike, daemon=True)
    striking.start()
    config = make("served", server, **SAMPLED)
    build(config)
    striking.join(10)
    assert server.answered > 40
    build(local := make_config("local", **SAMPLED))
    assert labelled(config.output_dir) == labelled(local.output_dir)
    said = " ".join(capsys.readouterr().err.split())
    url = server.url.removesuffix("/v1")
    # Target and draft model are there, and each notices a strike if it waits for an answer.
    assert 2 <= said.count(f"{url} is healthy again") <= said.count(f"{url} is unhealthy") <= 4


@pytest.mark.slow
def test_another_replica_replaces_a_failed_one(make: Make, make_config: Make, serve: Serve) -> None:
    one, other = serve(), serve()
    one.fault = lambda number: one.kill() if number == 8 else None  # type: ignore[func-returns-value]
    config = make("served", one, other, limit=8)
    build(config)
    build(local := make_config("local", limit=8))
    assert content(config.output_dir) == content(local.output_dir)
    assert 0 < one.answered <= 8 < other.answered


@pytest.mark.slow
def test_replicas_share_the_reads_and_one_that_is_away_hinders_none(make: Make, serve: Serve) -> None:
    away, one, other = serve(), serve(version="0.32"), serve(version="0.32")
    config = make("served", one, other, limit=6, problems_per_group=6)
    build(config)
    gone = away.url
    away.kill()
    config.target_url, config.logprobs, config.concurrency = [gone, f"{one.url}/", other.url], 3, 2
    for server in (one, other):
        server.most, server.pause = 0, 0.05
    build(config)
    assert one.most == other.most == 2
    info = json.loads(Path(config.output_dir, "logprobs", "info.json").read_text())
    assert info["version"] == "0.32"
    asked = [[str(body["prompt"]) for body in each.asked if "prompt_logprobs" in body] for each in (one, other)]
    checked, reads = {each[0] for each in asked}, [set(each[1:]) for each in asked]
    assert len(checked) == 1 and all(reads) and not reads[0] & reads[1]
    assert len(list(read_drafts(config.output_dir))) == len(rows_of(config.output_dir)) > 0


def test_a_read_of_the_whole_window_has_room_for_its_token(
    make: Make, serve: Serve, models: dict[str, LanguageModel]
) -> None:
    assert ServedWriter(make("data", serve()), "target").model.window == models["target"].window - 1


@pytest.mark.slow
def test_a_build_without_its_server_ends_in_one_sentence_and_is_continued(
    make: Make, make_config: Make, serve: Serve
) -> None:
    server = serve()
    groups: dict[str, Any] = {"limit": 12, "problems_per_group": 2, "concurrency": 1}  # three overlap
    config = make("served", server, max_outage=0.2, **groups)

    def after_a_group(number: int) -> Fault:
        if list(Path(config.output_dir, "data").glob("*.jsonl")):
            server.kill()
        return None

    server.fault = after_a_group
    gone = r"no (target|draft) server answers: http\S* does not answer: .* waited max_outage, 0.2 s: restart the"
    with pytest.raises(ConnectionError, match=gone):
        build(config)
    assert 0 < len(files(config.output_dir)) < 6
    checked = len(server.asked) + 2
    server.start().fault = lambda number: "status 500" if number >= checked else None
    config.retries = 0
    with pytest.raises(ValueError, match=r"failed 1 times: http\S* failed \(500\): repair the server, or"):
        build(config)
    server.fault = lambda number: "status 400"
    with pytest.raises(ValueError, match=r"refuses to continue a prompt: .* \(400\): on purpose"):
        build(config)
    server.fault = lambda number: None
    build(config)
    build(local := make_config("local", **groups))
    assert files(config.output_dir) == files(local.output_dir)


@pytest.mark.slow
def test_a_killed_build_over_servers_resumes_with_the_same_rows(make: Make, make_config: Make, serve: Serve) -> None:
    server = serve()
    groups: dict[str, Any] = {"limit": 12, "problems_per_group": 2, "concurrency": 1}  # three overlap
    config = make("killed", server, **groups)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, "-c", _RUN, json.dumps(asdict(config))], env=environment)
    data = Path(config.output_dir, "data")
    try:
        while process.poll() is None and len(list(data.glob("*.jsonl"))) < 2:
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 2 <= len(list(data.glob("*.jsonl"))) < 6
    build(config)
    build(local := make_config("local", **groups))
    assert files(config.output_dir) == files(local.output_dir)


@pytest.mark.slow
def test_folders_know_how_they_were_begun(make: Make, make_config: Make, serve: Serve) -> None:
    build(local := make_config("local", limit=3))
    local.limit = 5
    build(local)
    server = serve()
    with pytest.raises(ValueError, match="begun with backend 'local', not 'openai'"):
        build(make("local", server, limit=5))
    build(make("served", server, limit=3))
    models = json.loads(Path(make("served", server).output_dir, "build.json").read_text())["models"]
    assert models["target"]["name"] == "target" and models["target"]["fingerprint"].endswith(":-:-:-")
    assert server.url not in Path(make("served", server).output_dir, "README.md").read_text()
    build(make("served", serve(), limit=5, concurrency=2, retries=1))  # elsewhere, in other words
    with pytest.raises(ValueError, match="begun with wire 'ids', not 'text'"):
        build(make("served", server, wire="text"))


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({}, {"target_url": "http://127.0.0.1:9/v1"}, r"http://127.0.0.1:9/v1\S* does not answer: .*: start it"),
        ({}, {"draft_url": "http://127.0.0.1:9"}, r"http://127.0.0.1:9/v1.* or correct draft_url"),
        (
            {},
            {"target_url": "URL/v2"},
            r"not OpenAI-compatible \(.*/v2/v1/models .*\(404\): Not Found\): correct target_url",
        ),
        (
            {},
            {"served_target": "tagret"},
            r"not 'tagret': set served_target to one of target, draft, or target_url to",
        ),
        ({}, {"served_draft": None}, r"not '.*/draft': set served_draft to .* or draft_url to another"),
        (
            {"completions": False},
            {},
            r"has no /v1/completions \(404 Not Found\), and chat completions cannot continue",
        ),
        ({"ids": False}, {}, r"refuses .* prompt: .* \(422\): prompt must be a string; .* set wire to text"),
        (
            {"fault": lambda number: "garbage" if number else None},
            {"logprobs": 5},
            "cannot supply log-probabilities: its response has no prompt_logprobs",
        ),
        ({"fault": lambda number: "garbage"}, {}, r"does not continue a prompt: http\S* sent no completion"),
        ({"key": "secret"}, {}, r"http\S* rejects a request \(401\): Invalid API key.: set .* OPENAI_API_KEY"),
        ({"max_model_len": 40}, {}, r"a window of 40 tokens, too few for a prompt and 48 more: start the server with"),
        ({}, {"target_url": None}, "backend openai needs target_url"),
        ({}, {"backend": "local"}, "target_url requires backend openai, but backend is local: add --backend openai"),
        (
            {},
            {"target_url": "localhost:8000"},
            "target_url is 'localhost:8000'; it must be an address such as http://",
        ),
        ({}, {"backend": "opnai"}, "backend is 'opnai'; choose one of local, openai"),
        ({}, {"request_timeout": 0}, "request_timeout is 0.0; it must be a number of seconds above 0"),
        ({}, {"concurrency": 0}, "concurrency is 0; it must be at least 1"),
    ],
)
def test_unusable_settings_are_reported_before_any_work(
    make: Make,
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    overrides: dict[str, Any],
    message: str,
) -> None:
    server = serve(**options)
    values = asdict(make("data", server)) | {"target_url": server.url}
    values |= {k: v.replace("URL", server.url[:-3]) if isinstance(v, str) else v for k, v in overrides.items()}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    assert main(["build", str(recipe)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and re.search(message, lines[0]), lines
    assert len(server.asked) <= 2
    assert not list(tmp_path.glob("data/data/*"))


@pytest.mark.slow
def test_a_key_and_several_servers_from_the_command_line(
    make: Make, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [serve(key="secret", max_model_len=2048 - i) for i in range(2)]
    config = make("data", servers[0], limit=2)
    left_out = ("backend", "target_url", "draft_url")
    values = {key: value for key, value in asdict(config).items() if value is not None and key not in left_out}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    urls = ",".join(server.url.removesuffix("/v1") for server in servers)
    assert main(["build", str(tmp_path / "recipe.yaml"), "--backend", "openai", "--target-url", urls]) == 0
    assert all(server.answered > 2 for server in servers)
    assert len({row["problem_id"] for row in labelled(config.output_dir)}) == 2
