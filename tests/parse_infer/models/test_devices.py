"""Clocks and names belong to the device of the model, not to the current one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from parse_infer.models.devices import device_name, wait_for
from parse_infer.models.environment import describe_machine
from parse_infer.models.timing import Step, measure

SECOND = torch.device("cuda", 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The devices that torch.cuda is asked about, without a GPU."""
    found: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.append(device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: found.append(device) or f"GPU of {device}")
    return found


def test_the_named_device_is_queried(asked):
    wait_for(SECOND)
    assert device_name(SECOND) == "GPU of cuda:1"
    assert describe_machine(SECOND)["gpu"] == "GPU of cuda:1"
    measure([Step("nothing", lambda: None, lambda: None)], 1, SECOND)
    assert len(asked) > 3 and set(asked) == {SECOND}


def test_a_cpu_is_not_waited_for(asked):
    wait_for(torch.device("cpu"))
    assert device_name(torch.device("cpu")) is None and describe_machine(torch.device("cpu"))["gpu"] is None
    assert not asked


def test_nothing_asks_the_current_device():
    """`torch.cuda.synchronize()` and its like without an argument are right on a machine with one GPU only."""
    bare = re.compile(r"torch\.cuda\.\w*(synchronize|name|memory\w*|mem_get_info|stats)\(\)")
    root = Path(__file__).parents[3]
    files = [
        path for package in ("parse_infer", "parse_train", "data_tools") for path in (root / package).rglob("*.py")
    ]
    assert len(files) > 50
    assert [str(path) for path in files if bare.search(path.read_text(encoding="utf-8"))] == []
