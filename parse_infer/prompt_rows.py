"""Prompts from a jsonl file or from standard input, checked as a whole before any of them is run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parse_infer.prompts import Prompt

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine

STDIN = "-"


@dataclass(frozen=True)
class PromptRow:
    """One line of a jsonl file: `prompt` (text or chat messages), and what else a command asks for."""

    place: str
    """File and line, for messages."""
    prompt: Prompt
    id: Any = None
    draft: str | None = None
    response: str | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """What marks this row in JSON output."""
        return {} if self.id is None else {"id": self.id}

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put file and line in front of the ValueErrors of the block."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}" if self.place else str(error)) from error


def read_prompt_rows(source: str, required: Sequence[str] = ("prompt",)) -> list[PromptRow]:
    """All rows of a jsonl file ("-": standard input) with the keys `prompt`, and optionally `id`, `draft`, `response`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a malformed line, a key that is missing or of another type, or no rows; names file and line.
    """
    rows = []
    name = "standard input" if source == STDIN else source
    for number, line in enumerate(_read(source).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a row is an object with the keys {', '.join(required)}, not {line[:40]!r}")
        for key in required:
            if key not in row:
                raise ValueError(f"{place}: no key {key!r}; every row needs {', '.join(required)}")
        _check_types(place, row)
        rows.append(PromptRow(place, row["prompt"], row.get("id"), row.get("draft"), row.get("response")))
    if not rows:
        raise ValueError(f"{name} has no rows: write one JSON object a line")
    return rows


def check_prompts(engine: ParseEngine, rows: Sequence[PromptRow]) -> None:
    """Raise ValueError for a prompt that cannot be run, before the first one is."""
    for row in rows:
        with row.located():
            engine.target.render(row.prompt)


def _check_types(place: str, row: dict[str, Any]) -> None:
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not isinstance(prompt, str) and not messages:
        raise ValueError(f"{place}: 'prompt' must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
    for key in ("draft", "response"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise ValueError(f"{place}: {key!r} must be a text, not {str(row[key])[:40]!r}")


def _read(source: str) -> str:
    if source == STDIN:
        return sys.stdin.read()
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no file {source}: give the path of a jsonl file, or - for standard input")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
