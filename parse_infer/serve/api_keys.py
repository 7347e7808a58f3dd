"""API keys of the server's clients: one key, and a file of keys with weights that is read again when it changes."""

from __future__ import annotations

import hashlib
import logging
import math
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from parse_infer.errors import ParseError

log = logging.getLogger("parse_infer.serve")


@dataclass(frozen=True)
class Caller:
    """A client, as known by its key: its share of the seats, and its name in logs and metrics."""

    name: str = ""
    weight: float = 1.0


ANYONE = Caller()
caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
"""The client of the current request."""


class ApiKeys:
    """The valid keys, as digests.

    Args:
        key: a key without a name.
        file: lines `KEY [WEIGHT] [NAME]`. Empty lines and lines that begin with # are skipped. Keys with the same name
            and weight are one client's, such as an old key and its successor.

    Raises ParseError for a file that cannot be used. If that happens later, the known keys stay.
    """

    def __init__(self, key: str | None = None, file: Path | None = None) -> None:
        self._own = {} if key is None else {_digest(key): ANYONE}
        self._file = file
        self._stamp = None if file is None else _stamp(file)
        self._listed = {} if file is None else read_keys(file)

    @property
    def required(self) -> bool:
        return bool(self._own) or self._file is not None

    def caller_of(self, key: str) -> Caller | None:
        """The client with this key; None: nobody has it."""
        if self._file is not None:
            self._refresh(self._file)
        digest = _digest(key)  # how long a look-up takes reveals nothing about a key
        return self._own.get(digest) or self._listed.get(digest)

    def _refresh(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._listed = read_keys(file)
            log.info("API keys read", extra={"fields": {"keys": len(self._listed)}})
        except ParseError as error:
            log.error("the API keys stay as they are: %s", error)


def read_keys(file: Path) -> dict[bytes, Caller]:
    """Read a file of keys. Raises ParseError with one sentence, which quotes no line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ParseError(f"the API keys in {file} cannot be read: {reason}") from error
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, *rest = line.split()
        weight = _number(rest[0]) if rest else None
        name = " ".join(rest if weight is None else rest[1:])
        if not key.isascii() or _digest(key) in callers:
            raise ParseError(f"line {number} of {file} has a key that is not ASCII, or is in another line too")
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            raise ParseError(f"line {number} of {file} has the weight {weight:g}: give a number above 0")
        callers[_digest(key)] = Caller(name or f"line {number}", 1.0 if weight is None else weight)
    if not callers:
        raise ParseError(f"{file} has no API key: write one per line, as KEY [WEIGHT] [NAME]")
    return callers


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes with the file; None without a file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
