"""How servers are started on this machine."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from parse_infer.backends import factory, launch
from parse_infer.backends.launch import command, environment, plain_options, stock_options
from parse_infer.backends.local_draft import LocalDraft
from parse_infer.backends.vllm import VLLMBackend
from parse_infer.engine import Coordinator, ParseEngine
from parse_infer.judge.cuts import CutPolicy
from parse_infer.vllm_plugin.options import REJECTED_DRAFTS, SETTINGS, VARIABLES


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


def test_only_a_server_with_the_plugin_gets_what_the_plugin_needs(monkeypatch):
    for name in (*VARIABLES, "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    plugin = {"hf_overrides": {SETTINGS: {}}}
    ngram = {"speculative_config": {"method": "ngram"}}
    assert VARIABLES.items() <= environment("target", plugin).items()
    for role, options in (("target", {}), ("draft", {}), ("target", ngram)):
        assert not set(VARIABLES) & set(environment(role, options)), "vLLM would be slower than it is"
    assert "NUMBA_NUM_THREADS" in environment("target", ngram)
    assert "NUMBA_NUM_THREADS" not in environment("target", plugin)


@pytest.mark.parametrize(("set_by_user", "left"), [(None, ""), ("parse", ""), ("ascend,parse", "ascend")])
def test_a_stock_server_has_no_plugin_and_none_of_our_variables(monkeypatch, set_by_user, left):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if set_by_user is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", set_by_user)
    assert environment("target", stock_options("zoo:target"), stock=True) == {"VLLM_PLUGINS": left}
    assert set(stock_options("zoo:target")) == {"model", "dtype"}
    assert stock_options("zoo:target")["dtype"] == plain_options("zoo:target")["dtype"] == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cores_and_memory = {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"}
    assert set(environment("target", {}, stock=True)) <= {"VLLM_PLUGINS", *cores_and_memory}


@pytest.mark.skipif(shutil.which("nice") is None, reason="there is no `nice` here")
def test_a_draft_server_stands_back_for_the_target_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(command("draft", {}))[:3] == ["nice", "-n", "5"]
    assert "nice" not in command("target", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "nice" not in command("draft", {})


def test_servers_that_are_started_want_the_key_that_they_are_sent(monkeypatch):
    given = {}

    class FakeSupervisor:
        def __init__(self, started, on_progress):
            given.update({role: environment for role, _, environment in started})

        def start(self) -> None:
            pass

    monkeypatch.setattr(launch, "Supervisor", FakeSupervisor)
    monkeypatch.setenv(launch.PYTHON, sys.executable)
    launch.launch({"target": {"model": "x"}}, api_key="secret")
    assert given["target"]["VLLM_API_KEY"] == "secret"
    launch.launch({"target": {"model": "x"}})
    assert "VLLM_API_KEY" not in given["target"]


class Started:
    """Servers of `launch` that nobody starts."""

    def __init__(self, wanted, *_, stock=False, **__):
        self.members = [SimpleNamespace(role=role, options=options, stock=stock) for role, options in wanted.items()]

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
    monkeypatch.setattr(factory, "engine_options", lambda *_: {"speculative_config": dict(REJECTED_DRAFTS)})
    monkeypatch.setattr(VLLMBackend, "handshake", handshake)

    def make(adapter: str | None = "zoo:adapter", **options) -> ParseEngine:
        with ParseEngine.from_pretrained("zoo:target", "zoo:draft", adapter, backend="vllm", **options) as made:
            return made

    return make


URL = "http://127.0.0.1:9"


def test_overlap_is_off_where_both_models_share_the_cores_of_a_cpu(coordinator, monkeypatch):
    for local in (True, False):
        assert not coordinator(local_draft=local).backend.overlap
        assert coordinator(local_draft=local, overlap=True).backend.overlap
        assert coordinator(local_draft=local, target_url=URL).backend.overlap
    assert coordinator(draft_url=URL).backend.overlap
    assert not coordinator(draft_url=URL, overlap=False).backend.overlap
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert coordinator(local_draft=False).backend.overlap


def test_a_small_draft_model_needs_no_server_on_a_cpu(coordinator, monkeypatch):
    def is_local(**options) -> bool:
        made = coordinator(**options)
        roles = {member.role for member in made.backend.processes.members} if made.backend.processes else set()
        assert ("draft" in roles) == (
            not isinstance(made.backend._drafts[0], LocalDraft) and "draft_url" not in options
        )
        return isinstance(made.backend._drafts[0], LocalDraft)

    assert is_local() and is_local(target_url=URL)
    assert not is_local(local_draft=False)
    assert not is_local(draft_url=URL) and not is_local(draft_options={"max_model_len": 512})
    with pytest.raises(ValueError, match="local_draft and draft_url were both given"):
        coordinator(local_draft=True, draft_url=URL)
    with pytest.raises(ValueError, match="without a draft model: give draft"):
        ParseEngine.from_pretrained("zoo:target", None, "zoo:adapter", backend="vllm", local_draft=True)
    with monkeypatch.context() as patch:
        patch.setattr(factory, "_SMALL", 1000)
        assert not is_local() and is_local(local_draft=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not is_local()


def test_a_target_guesses_unless_it_is_known_not_to(coordinator):
    def guesses(*arguments, **options) -> bool:
        return coordinator(*arguments, **options).backend._target.speculates

    assert guesses()
    assert guesses(target_url=URL), "such servers are taken for what `parse_infer.vllm_plugin.options` prints"
    for speculation in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        assert not guesses(target_options={"speculative_config": speculation})
    assert not guesses(None, zero_shot=True)
    assert not guesses(None, zero_shot=True, target_url=URL)


def test_the_target_alone_runs_on_a_stock_server(coordinator):
    """That is what PARSE is compared with."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    for options in ({}, {"speculative_config": ngram}):
        made = ParseEngine.from_pretrained("zoo:target", backend="vllm", zero_shot=True, target_options=options)
        (server,) = made.backend.processes.members
        made.close()
        assert server.stock and server.options == stock_options("zoo:target") | options
    assert not any(server.stock for server in coordinator().backend.processes.members)
    assert not any(server.stock for server in coordinator(None, zero_shot=True).backend.processes.members)


def test_a_cut_policy_replaces_the_adapters_over_servers_too(coordinator):
    made = coordinator(cut_policy="tokens:4")
    assert made.backend._target.segmenter.policy == CutPolicy("tokens", 4)
    assert made.describe()["cut_policy"] == CutPolicy("tokens", 4).to_dict()  # what a calibration must equal


def test_the_former_name_still_connects_to_servers(coordinator):
    with pytest.warns(FutureWarning, match="Coordinator is deprecated"):
        made = Coordinator.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", target_url=URL, draft_url=URL)
    assert type(made) is ParseEngine and made.describe()["backend"] == "vllm"
    made.close()
