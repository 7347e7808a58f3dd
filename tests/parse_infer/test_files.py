"""Files are whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from parse_infer.files import atomic_write, lies_below, read_jsonl, replacing_folder, write_text, writing


def fill(folder: Path, text: str) -> None:
    (folder / "a.txt").write_text(text)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "one")
    with pytest.raises(RuntimeError), atomic_write(path) as beside:
        beside.write_text("tw")
        raise RuntimeError
    assert path.read_text() == "one"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    """safetensors keeps its files to their owner, so that a server under another user could not load them."""
    (plain := tmp_path / "plain").touch()
    with atomic_write(tmp_path / "weights.safetensors") as beside:
        save_file({"a": torch.zeros(2)}, beside)
    with replacing_folder(tmp_path / "folder") as beside:
        save_file({"a": torch.zeros(2)}, beside / "weights.safetensors")
    for path in (tmp_path / "weights.safetensors", tmp_path / "folder" / "weights.safetensors"):
        assert path.stat().st_mode == plain.stat().st_mode


LIMITED = """
import resource, sys
from parse_infer.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # as a full disk, for files beyond 50 kB
sys.exit(main(["transfer", "zoo:adapter", "--target", "zoo:target", "--out", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "new")], capture_output=True, text=True)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, run.stderr
    assert run.stderr.startswith(f"error: {tmp_path}/new cannot be written: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
        RuntimeError(
            "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0: file"
        ),
        RuntimeError("basic_ios::clear: iostream error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_libraries_that_cannot_write_are_os_errors(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written: "), writing(tmp_path):
        raise error
    for other in (RuntimeError("no room"), OSError(28, "No space left on device")):
        with pytest.raises(type(other)) as found, writing(tmp_path):
            raise other
        assert found.value is other


def test_a_file_in_a_folder_below_is_found(tmp_path: Path) -> None:
    assert lies_below(tmp_path, "config.json") == ""
    for name in ("checkpoint-5", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert lies_below(tmp_path, "config.json") == f"; it lies in {tmp_path / 'final'}"


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    with replacing_folder(folder) as beside:
        fill(beside, "one")
    with pytest.raises(RuntimeError), replacing_folder(folder) as beside:
        fill(beside, "two")
        raise RuntimeError
    assert (folder / "a.txt").read_text() == "one"

    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)  # between the two renames
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder) as beside:
        fill(beside, "two")
    monkeypatch.undo()
    assert (folder / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_put_aside_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / ".folder.1.before").mkdir()
    fill(tmp_path / ".folder.1.before", "one")
    with pytest.raises(RuntimeError), replacing_folder(folder):
        raise RuntimeError
    assert (folder / "a.txt").read_text() == "one"


def test_rows_are_named_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_jsonl(path, ("a",))) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": 2})]
    for text, message in (
        ('{"a": 1}\n{"a": ', "line 2: not complete JSON"),
        ("[1]\n", "line 1: a row must be a JSON object"),
        ('{"b": 1}\n', "line 1: no key 'a'; every row needs a"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(read_jsonl(path, ("a",)))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a text file in UTF-8"):
        list(read_jsonl(path))
