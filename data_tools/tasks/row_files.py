"""Rows of json and csv files, with values as they stand in the file: no types are guessed."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from typing import IO, Any

from parse_infer.errors import ParseError
from parse_infer.files import json_rows

csv.field_size_limit(1 << 30)  # characters


def rows_of_files(files: Sequence[str], delimiter: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of json files, or of csv files if there is a delimiter.

    A json file has one object a line, or is a list of objects. Numbers with a decimal point stay text.

    Args:
        files: paths or addresses that fsspec opens; compressed ones are unpacked.

    Raises:
        ValueError: a file cannot be read, or has no such rows.
    """
    import fsspec

    for name in files:
        try:
            # A byte order mark is no part of the first column's name.
            with fsspec.open(name, "rt", encoding="utf-8-sig", newline="", compression="infer") as file:
                if delimiter is None:
                    yield from _json_rows(file, name)
                else:
                    yield from (_named(row) for row in csv.DictReader(file, delimiter=delimiter))
        except UnicodeDecodeError as error:
            raise ParseError(f"{name} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
        except (OSError, csv.Error) as error:
            raise ParseError(f"{name} cannot be read: {error}") from error


def _json_rows(file: IO[str], name: str) -> Iterator[dict[str, Any]]:
    start = file.read(1)
    while start.isspace():
        start = file.read(1)
    if start != "[":
        first = start + file.readline()
        lines = (line for part in ([first], file) for line in part)
        yield from (row for _, row in json_rows(lines, name, parse_float=str))
        return
    try:
        rows = json.loads(start + file.read(), parse_float=str)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{name}: not complete JSON ({error})") from error
    for row in rows:
        if not isinstance(row, dict):
            raise ParseError(f"{name}: a row must be a JSON object, not {str(row)[:40]!r}")
        yield row


def _named(row: dict[Any, Any]) -> dict[str, Any]:
    """Return a csv row with a text in each column, without values that have no column."""
    return {column: value or "" for column, value in row.items() if column is not None}
