"""How servers are started on this machine."""

from __future__ import annotations

import torch

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
