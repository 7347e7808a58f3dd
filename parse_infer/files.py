"""Atomic file writes, and readers that raise one-sentence errors.

Writers write a temporary file beside the destination and rename it when it is complete. Neither a reader nor a rerun
after `kill -9` sees a partial file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from torch import Tensor

STDIN = "-"
_FAILED_WRITE = re.compile(
    r"os error \d+|PytorchStreamWriter failed|iostream error"
)  # safetensors and tokenizers; torch
_UMASK = os.umask(0)  # the only way to read the umask
os.umask(_UMASK)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise OSError, which names the path, where a library fails to write with an exception of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if _FAILED_WRITE.search(str(error)):
            raise OSError(f"{path} cannot be written: {first_sentence(error)}") from error
        raise


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path. Rename it to `path` at the end of the block, or remove it if the block fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            yield beside
        _to_disk(beside)
        beside.replace(path)
        _to_disk(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder. Replace `folder` with it at the end of the block.

    The old folder has another name for the instant between two renames. If the process is killed in that instant, the
    next call restores the old folder.
    """
    folder = Path(folder).expanduser().absolute()
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    before = folder.with_name(f".{folder.name}.{os.getpid()}.before")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for left in folder.parent.glob(f".{folder.name}.*.before"):
        if not folder.exists():
            left.rename(folder)
    try:
        with writing(folder):
            yield beside
        for path in beside.rglob("*"):
            _to_disk(path)
        if folder.exists():
            folder.rename(before)
        beside.rename(folder)
        _to_disk(folder.parent)
    finally:
        if before.exists() and not folder.exists():
            before.rename(folder)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        way_out: advice for a damaged file, for the message.

    Raises:
        ValueError: the file holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise ParseError(f"{path} is damaged, it is no valid JSON ({error}): {way_out}") from error
    if not isinstance(content, dict):
        raise ParseError(f"{path} is damaged, it holds no JSON object: {way_out}")
    return content


def read_tensors(path: Path, way_out: str) -> dict[str, Tensor]:
    """Read a safetensors file. Raise ValueError if it is damaged; `way_out` as in `read_json`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ParseError(f"{path} is damaged ({error}): {way_out}") from error


def read_jsonl(
    source: str | Path, required: Sequence[str] = (), parse_float: Callable[[str], Any] = float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location ("FILE, line N") and content of each row of a jsonl file ("-": standard input).

    Args:
        parse_float: what becomes of numbers with a decimal point; `str` keeps them as they stand in the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is no JSON object or lacks a key of `required`, or the text is not UTF-8.
    """
    name = "standard input" if source == STDIN else str(source)
    if source != STDIN and not Path(source).is_file():
        raise FileNotFoundError(f"no file {source}: give the path of a jsonl file")
    # A file may begin with a byte order mark.
    lines = sys.stdin if source == STDIN else Path(source).open(encoding="utf-8-sig")  # noqa: SIM115  (closed below)
    try:
        yield from json_rows(lines, name, required, parse_float)
    except UnicodeDecodeError as error:
        raise ParseError(f"{name} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    finally:
        if lines is not sys.stdin:
            lines.close()


def json_rows(
    lines: Iterable[str], name: str, required: Sequence[str] = (), parse_float: Callable[[str], Any] = float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `read_jsonl` yields, from the lines of a file called `name`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line.removeprefix("\ufeff"), parse_float=parse_float)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"{place}: not complete JSON ({error})") from error
        if not isinstance(row, dict):
            raise ParseError(f"{place}: a row must be a JSON object, not {line.strip()[:40]!r}")
        missing = [key for key in required if key not in row]
        if missing:
            raise ParseError(f"{place}: no key {missing[0]!r}; every row needs {', '.join(required)}")
        yield place, row


def read_stdin() -> str:
    """Read standard input. Raise ParseError for bytes that are not UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ParseError(f"standard input is not a text in UTF-8: {error.reason} at byte {error.start}") from error


def locate(name: str | Path, files: Sequence[str], what: str) -> Path:
    """Resolve a name to a folder: a local folder, or the cached `files` of a Hugging Face id.

    Args:
        what: kind of folder, for messages ("adapter", "head").

    Raises:
        FileNotFoundError: the name is neither a local folder nor available on the Hub.
        ValueError: the name is a file.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    path, text = Path(name).expanduser(), str(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ParseError(f"{text} is a file: give the folder of the {what}")
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise FileNotFoundError(f"there is no {what} folder {text}")
    try:
        return Path(snapshot_download(text, allow_patterns=list(files)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{text} is neither a local {what} folder nor available on the Hugging Face Hub ({reason})"
        ) from error


def lies_below(folder: str | Path, *files: str) -> str:
    """Name the subfolder that holds one of the files, as the end of a message that `folder` does not; "" if none."""
    found = [path.parent for file in files for path in sorted(Path(folder).expanduser().glob(f"*/{file}"))]
    found.sort(key=lambda place: place.name.startswith("checkpoint-"))  # a finished one first
    return f"; it lies in {found[0]}" if found else ""


def first_sentence(error: Exception) -> str:
    """Return the first line of a library's (possibly long) error, and the next if it ends with a colon, with a full
    stop."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if first.endswith(":") and len(lines) > 1:
        first = f"{first} {lines[1]}"
    if isinstance(error, KeyError):  # whose text is the key
        first = f"{type(error).__name__} {first}"
    return first if first.endswith((".", "?", "!")) else first + "."


def _to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to disk (folders only if the system can open them).
    Set a file's mode by the umask, because safetensors makes its files private to the owner."""
    if path.is_file():
        path.chmod(0o666 & ~_UMASK)
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
