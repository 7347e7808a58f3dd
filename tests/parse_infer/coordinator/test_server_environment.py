"""How servers are started on this machine."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from parse_infer.coordinator import launch, parts
from parse_infer.coordinator.engine import Coordinator
from parse_infer.coordinator.launch import command, environment
from parse_infer.coordinator.local_draft import LocalDraft
from parse_infer.vllm.options import REJECTED_DRAFTS


def test_a_draft_server_leaves_the_cores_of_a_cpu_to_the_target(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment("draft")["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment("target")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in environment("draft"), "what is set already stays"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "OMP_NUM_THREADS" not in environment("draft")


@pytest.mark.skipif(shutil.which("nice") is None, reason="there is no `nice` here")
def test_a_draft_server_stands_back_for_the_target_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(command("draft", {}))[:3] == ["nice", "-n", "5"]
    assert "nice" not in command("target", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "nice" not in command("draft", {})


def test_servers_that_are_started_want_the_key_that_they_are_sent(monkeypatch):
    given = {}

    class NoProcesses:
        def __init__(self, started, tell):
            given.update({role: environment for role, _, environment in started})

        def start(self) -> None:
            pass

    monkeypatch.setattr(launch, "Processes", NoProcesses)
    monkeypatch.setenv(launch.PYTHON, sys.executable)
    launch.launch({"target": {"model": "x"}}, api_key="secret")
    assert given["target"]["VLLM_API_KEY"] == "secret"
    launch.launch({"target": {"model": "x"}})
    assert "VLLM_API_KEY" not in given["target"]


class Started:
    """Servers of `launch` that nobody starts."""

    def __init__(self, wanted, *_, **__):
        self.members = [SimpleNamespace(role=role) for role in wanted]

    def urls(self, role: str) -> list[str]:
        return ["http://127.0.0.1:9"]

    def failure(self) -> None:
        return None

    def stop(self) -> None:
        pass


@pytest.fixture
def coordinator(monkeypatch):
    """`coordinator(...)`: from `from_pretrained` with the embedded models, over servers that are not there."""

    async def meet(self) -> None:
        pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(parts, "launch", Started)
    monkeypatch.setattr(parts, "engine_options", lambda *_: {"speculative_config": dict(REJECTED_DRAFTS)})
    monkeypatch.setattr(Coordinator, "meet", meet)

    def make(adapter: str | None = "zoo:adapter", **options) -> Coordinator:
        with Coordinator.from_pretrained("zoo:target", "zoo:draft", adapter, **options) as made:
            return made

    return make


URL = "http://127.0.0.1:9"


def test_overlap_is_off_where_both_models_share_the_cores_of_a_cpu(coordinator, monkeypatch):
    for local in (True, False):
        assert not coordinator(local_draft=local)._overlap
        assert coordinator(local_draft=local, overlap=True)._overlap
        assert coordinator(local_draft=local, target_url=URL)._overlap
    assert coordinator(draft_url=URL)._overlap
    assert not coordinator(draft_url=URL, overlap=False)._overlap
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert coordinator(local_draft=False)._overlap


def test_a_small_draft_model_needs_no_server_on_a_cpu(coordinator, monkeypatch):
    def is_local(**options) -> bool:
        made = coordinator(**options)
        roles = {member.role for member in made.processes.members} if made.processes else set()
        assert ("draft" in roles) == (not isinstance(made._drafts[0], LocalDraft) and "draft_url" not in options)
        return isinstance(made._drafts[0], LocalDraft)

    assert is_local() and is_local(target_url=URL)
    assert not is_local(local_draft=False)
    assert not is_local(draft_url=URL) and not is_local(draft_options={"max_model_len": 512})
    with pytest.raises(ValueError, match="local_draft and draft_url were both given"):
        coordinator(local_draft=True, draft_url=URL)
    with pytest.raises(ValueError, match="no draft model: name one"):
        Coordinator.from_pretrained("zoo:target", None, "zoo:adapter", local_draft=True)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_SMALL", 1000)
        assert not is_local() and is_local(local_draft=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not is_local()


def test_a_target_guesses_unless_it_is_known_not_to(coordinator):
    def guesses(*arguments, **options) -> bool:
        return coordinator(*arguments, **options)._target.guesses

    assert guesses()
    assert guesses(target_url=URL), "such servers are taken for what `parse_infer.vllm.options` prints"
    for speculation in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        assert not guesses(target_options={"speculative_config": speculation})
    assert not guesses(None, zero_shot=True)
    assert not guesses(None, zero_shot=True, target_url=URL)
