"""Prompts from a jsonl file or standard input. All rows are validated before the first one runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parse_infer.errors import ParseError
from parse_infer.files import STDIN, read_jsonl
from parse_infer.text.prompts import Prompt

if TYPE_CHECKING:
    from parse_infer.text.tokenizer_spec import TokenizerSpec


@dataclass(frozen=True)
class PromptRow:
    """One line of a jsonl file: `prompt` (text or chat messages) and the other fields of a command."""

    place: str
    """File and line, for error messages."""
    prompt: Prompt
    id: object = None
    draft: str | None = None
    response: str | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """Fields that identify this row in JSON output."""
        return {} if self.id is None else {"id": self.id}

    @contextmanager
    def located(self) -> Iterator[None]:
        """Prefix the ValueErrors of the block with file and line."""
        try:
            yield
        except ValueError as error:
            raise ParseError(f"{self.place}: {error}" if self.place else str(error)) from error


def read_prompt_rows(source: str, required: Sequence[str] = ("prompt",)) -> list[PromptRow]:
    """Read a jsonl file ("-": standard input) with the key `prompt` and optionally `id`, `draft`, `response`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a malformed line, a missing or mistyped key, or no rows; the message names file and line.
    """
    rows = []
    name = "standard input" if source == STDIN else source
    for place, row in read_jsonl(source, required):
        _check_types(place, row)
        rows.append(PromptRow(place, row["prompt"], row.get("id"), row.get("draft"), row.get("response")))
    if not rows:
        raise ParseError(f"{name} has no rows: write one JSON object per line")
    return rows


def check_prompts(target: TokenizerSpec, rows: Sequence[PromptRow]) -> None:
    """Raise ValueError for a prompt that the target's chat template cannot render."""
    for row in rows:
        with row.located():
            target.render(row.prompt)


def _check_types(place: str, row: dict[str, Any]) -> None:
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not isinstance(prompt, str) and not messages:
        raise ParseError(f"{place}: 'prompt' must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
    try:
        json.dumps(row.get("id"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ParseError(f"{place}: 'id' is {row['id']!r}, which has half of a surrogate pair") from None
    for key in ("draft", "response"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise ParseError(f"{place}: {key!r} must be a text, not {str(row[key])[:40]!r}")
