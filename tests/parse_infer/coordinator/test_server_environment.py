"""How servers are started on this machine."""

from __future__ import annotations

import sys

import torch

from parse_infer.coordinator import launch
from parse_infer.coordinator.launch import environment


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


def test_servers_that_are_started_want_the_key_that_they_are_sent(monkeypatch):
    given = {}

    class NoProcesses:
        def __init__(self, started, tell, logs):
            given.update({role: environment for role, _, environment in started})

        def start(self) -> None:
            pass

    monkeypatch.setattr(launch, "Processes", NoProcesses)
    monkeypatch.setenv(launch.PYTHON, sys.executable)
    launch.launch({"target": {"model": "x"}}, api_key="secret")
    assert given["target"]["VLLM_API_KEY"] == "secret"
    launch.launch({"target": {"model": "x"}})
    assert "VLLM_API_KEY" not in given["target"]
