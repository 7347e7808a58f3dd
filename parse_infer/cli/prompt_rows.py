"""Prompts from a jsonl file or from standard input, checked as a whole before any of them is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parse_infer.files import STDIN, read_jsonl
from parse_infer.models.prompts import Prompt

if TYPE_CHECKING:
    from parse_infer.models.tokenizer_spec import TokenizerSpec


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
    for place, row in read_jsonl(source, required):
        _check_types(place, row)
        rows.append(PromptRow(place, row["prompt"], row.get("id"), row.get("draft"), row.get("response")))
    if not rows:
        raise ValueError(f"{name} has no rows: write one JSON object a line")
    return rows


def check_prompts(target: TokenizerSpec, rows: Sequence[PromptRow]) -> None:
    """Raise ValueError for a prompt that cannot be run, before the first one is."""
    for row in rows:
        with row.located():
            target.render(row.prompt)


def _check_types(place: str, row: dict[str, Any]) -> None:
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not isinstance(prompt, str) and not messages:
        raise ValueError(f"{place}: 'prompt' must be a text or a list of chat messages, not {str(prompt)[:40]!r}")
    for key in ("draft", "response"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise ValueError(f"{place}: {key!r} must be a text, not {str(row[key])[:40]!r}")
