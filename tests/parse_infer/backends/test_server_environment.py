"""How servers are started on this machine."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from parse_infer.backends.launch import vllm_process
from parse_infer.backends.launch.vllm_process import CACHED_READS, command, environment, plain_options, stock_options
from parse_infer.backends.servers import connect as factory
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.engine import ParseEngine
from parse_infer.judge.logprob_head import KNOWN_TEXT
from parse_infer.models.loading import load_language_model
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.cuts import CutPolicy


def test_a_draft_server_leaves_the_cores_of_a_cpu_to_the_target(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment("draft", {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment("target", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in environment("draft", {}), "what is set already stays"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "OMP_NUM_THREADS" not in environment("draft", {})


def test_a_server_gets_the_variables_that_it_needs_and_no_others(monkeypatch):
    for name in ("NUMBA_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment("target", stock_options("zoo:target")) == {}
    assert "NUMBA_NUM_THREADS" in environment("target", {"speculative_config": {"method": "ngram"}})
    assert set(stock_options("zoo:target")) == {"model", "dtype"}
    assert stock_options("zoo:target")["dtype"] == plain_options("zoo:target")["dtype"] == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(environment("target", {})) == {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"}


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu", "no command"])
def test_servers_run_vllm_serve_where_that_command_starts(installed, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {int(installed != 'vllm')}\n")  # whether it knows a distribution `vllm`
    if installed != "no command":
        (tmp_path / "vllm").touch()
    python.chmod(0o755)
    monkeypatch.setenv(vllm_process.PYTHON, str(python))
    words = list(command("target", {"model": "some/model", "dtype": "float32"}))
    if installed == "vllm":
        expected = [str(tmp_path / "vllm"), "serve", "some/model"]
    else:
        expected = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"]
    assert words[: len(expected)] == expected
    assert words.count("some/model") == 1 and "--dtype float32" in " ".join(words)


@pytest.mark.skipif(shutil.which("nice") is None, reason="there is no `nice` here")
def test_a_draft_server_on_a_cpu_has_a_lower_priority(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(command("draft", {}))[:3] == ["nice", "-n", "5"]
    assert "nice" not in command("target", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "nice" not in command("draft", {})


def test_started_servers_require_the_given_key(monkeypatch):
    given = {}

    class FakeSupervisor:
        def __init__(self, started, on_progress):
            given.update({role: environment for role, _, environment in started})

        def start(self) -> None:
            pass

    monkeypatch.setattr(vllm_process, "Supervisor", FakeSupervisor)
    monkeypatch.setenv(vllm_process.PYTHON, sys.executable)
    vllm_process.launch({"target": {"model": "x"}}, keys={"target": "secret"})
    assert given["target"]["VLLM_API_KEY"] == "secret"
    vllm_process.launch({"target": {"model": "x"}})
    assert "VLLM_API_KEY" not in given["target"]


class Started:
    """Servers of `launch` that nobody starts."""

    def __init__(self, wanted, *_, **__):
        self.members = [SimpleNamespace(role=role, options=options) for role, options in wanted.items()]

    def urls(self, role: str) -> list[str]:
        return ["http://127.0.0.1:9"]

    def failure(self) -> None:
        return None

    def stop(self) -> None:
        pass


@pytest.fixture
def coordinator(monkeypatch):
    """`coordinator(...)`: from `from_pretrained` with the embedded models, over servers that are not there."""

    async def handshake(self) -> None:
        pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(factory, "launch", Started)
    monkeypatch.setattr(ServerBackend, "handshake", handshake)

    def make(adapter: str | None = "zoo:adapter", **options) -> ParseEngine:
        with ParseEngine.from_pretrained("zoo:target", "zoo:draft", adapter, backend="vllm", **options) as made:
            return made

    return make


URL = "http://127.0.0.1:9"


def test_a_small_draft_model_needs_no_server_on_a_cpu(coordinator, monkeypatch):
    def is_local(**options) -> bool:
        made = coordinator(**options)
        roles = {member.role for member in made.backend.processes.members} if made.backend.processes else set()
        assert ("draft" in roles) == (
            not isinstance(made.backend._drafts[0], InProcessDraft) and "draft_url" not in options
        )
        return isinstance(made.backend._drafts[0], InProcessDraft)

    assert is_local() and is_local(target_url=URL)
    assert not is_local(local_draft=False)
    assert not is_local(draft_url=URL) and not is_local(draft_options={"max_model_len": 512})
    for role in ("target", "draft"):
        given = {f"{role}_url": URL, f"{role}_options": {"max_model_len": 256}}
        with pytest.raises(ValueError, match=f"{role}_options are for a server that PARSE starts, but {role}_url"):
            coordinator(**given)
    with pytest.raises(ValueError, match="local_draft and draft_url were both given"):
        coordinator(local_draft=True, draft_url=URL)
    with pytest.raises(ValueError, match="without a draft model: give draft"):
        ParseEngine.from_pretrained("zoo:target", None, "zoo:adapter", backend="vllm", local_draft=True)
    with monkeypatch.context() as patch:
        patch.setattr(factory, "_SMALL", 1000)
        assert not is_local() and is_local(local_draft=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not is_local()


def test_a_judge_on_log_probabilities_reads_the_cache_of_its_server(coordinator):
    def target(**options) -> dict:
        (server,) = (one for one in coordinator(**options).backend.processes.members if one.role == "target")
        return server.options

    assert CACHED_READS.items() <= target().items()
    assert target(target_options={"enable_scale_out": None})["enable_scale_out"] is None
    assert not CACHED_READS.items() <= target(adapter=None, judge="zero_shot").items()


def test_the_longest_read_is_an_option(coordinator):
    assert coordinator().backend._target.reads.max_tokens == 2048
    assert coordinator(max_read_tokens=4096).backend._target.reads.max_tokens == 4096
    with pytest.raises(ValueError, match="max_read_tokens is 0; it must be at least 1"):
        coordinator(max_read_tokens=0)


def test_an_adapter_with_a_second_stream_is_refused_before_a_server_starts(coordinator, random_adapter, tmp_path):
    model = load_language_model("zoo:target", role="target").model
    random_adapter(model, stream=True).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="reads hidden states of the target, which servers do not return: use the"):
        coordinator(tmp_path / "adapter")


def test_the_target_alone_runs_on_a_stock_server(coordinator):
    """That is what PARSE is compared with."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    for options in ({}, {"speculative_config": ngram}):
        made = ParseEngine.from_pretrained("zoo:target", backend="vllm", judge="zero_shot", target_options=options)
        (server,) = made.backend.processes.members
        made.close()
        assert server.options == stock_options("zoo:target") | options


def test_the_judge_without_training_reads_as_adapters_do(coordinator):
    made, adapted = coordinator(None, judge="min_p:ratio=0.3"), coordinator()
    assert made.threshold == 0.3 and made.describe() == adapted.describe() | {"adapter": "min-p"}
    options = [engine.backend.processes.members[0].options for engine in (made, adapted)]
    assert options[0] == options[1], "the server uses its prefix cache for reads"
    known = made.backend._target.reads.reference
    assert made.target.tokenizer.decode(known).strip() == KNOWN_TEXT
    made.backend.check(GenerationSettings(mode="exact"), None)
    assert not made.train_problems and adapted.train_problems


def test_a_rule_beside_the_adapter_is_its_floor(coordinator):
    made, adapted = coordinator(judge="relaxed_acceptance"), coordinator()
    name = f"{adapted.describe()['adapter']}, relaxed-acceptance:relaxed_topk=10 at 0.4"
    assert made.describe() == adapted.describe() | {"adapter": name} and made.threshold == adapted.threshold
    assert made.backend.judge.k == 10 > adapted.backend.judge.k and made.train_problems == adapted.train_problems


def test_a_cut_policy_replaces_the_adapters_over_servers_too(coordinator):
    made = coordinator(cut_policy="tokens:4")
    assert made.backend._target.segmenter.policy == CutPolicy("tokens", 4)
    assert made.describe()["cut_policy"] == CutPolicy("tokens", 4).to_dict()  # what a calibration must equal
