"""Answers on a terminal: author, acceptance and validity of each stretch of text.

Accepted draft text is green, rejected draft text red, the target's text cyan. The first column says the same in words,
for pipes and colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from parse_infer.events import Accepted, Drafted, Event, Resumed, Verified
from parse_infer.output import Score, Span

Kind = Literal["pending", "accepted", "exact", "rejected", "target"]
STYLES: dict[Kind, str] = {
    "pending": "dim",
    "accepted": "green",
    "exact": "green",
    "rejected": "red",
    "target": "cyan",
}
LABELS: dict[Kind, str] = {
    "pending": "draft …",
    "accepted": "draft ✓",
    "exact": "draft =",
    "rejected": "draft ✗",
    "target": "target",
}


@dataclass
class Row:
    """A stretch of text of one kind; `validity` belongs to the prefix that ends with this text."""

    kind: Kind
    text: str
    validity: float | None = None


class AnswerView:
    """Rich renderable of an answer, updated by the events of `ParseEngine.stream`.

    Args:
        threshold: kept draft text with a lower validity is shown as "=": it equals the target's own choice.
    """

    def __init__(self, threshold: float) -> None:
        self.rows: list[Row] = []
        self._threshold = threshold
        self._pending: list[Row] = []

    def update(self, event: Event) -> None:
        if isinstance(event, Drafted):
            self._pending = [Row("pending", event.text)]
        elif isinstance(event, Verified):
            if event.segments:
                self._pending = [Row("pending", s.text, s.validity) for s in event.segments]
        elif isinstance(event, Accepted):
            self._decide(len(event.text))
        elif isinstance(event, Resumed):
            self._extend(event.text)

    def __rich__(self) -> Table:
        return _grid([*self.rows, *self._pending])

    def _decide(self, kept: int) -> None:
        """Accept the first `kept` characters of the pending rows and reject the rest."""
        for row in self._pending:
            mine, kept = min(kept, len(row.text)), max(0, kept - len(row.text))
            if mine == len(row.text):
                valid = row.validity is not None and row.validity >= self._threshold
                self.rows.append(Row("accepted" if valid else "exact", row.text, row.validity))
            else:
                if mine:
                    self.rows.append(Row("exact", row.text[:mine]))
                self.rows.append(Row("rejected", row.text[mine:], row.validity))
        self._pending = []

    def _extend(self, text: str) -> None:
        """Append the target's text, one row per line."""
        for line in text.splitlines(keepends=True):
            last = self.rows[-1] if self.rows else None
            if last is not None and last.kind == "target" and not last.text.endswith("\n"):
                last.text += line
            else:
                self.rows.append(Row("target", line))


def legend() -> Text:
    """Explain labels and colours."""
    meanings: tuple[tuple[Kind, str], ...] = (
        ("accepted", "accepted: valid"),
        ("exact", "accepted: the target's own choice"),
        ("rejected", "rejected"),
        ("target", "written by the target"),
    )
    parts = [(f"{LABELS[kind]} {meaning}", STYLES[kind]) for kind, meaning in meanings]
    return Text("   ").join(Text(text, style) for text, style in parts)


def coloured_spans(spans: Sequence[Span]) -> Text:
    """Colour an answer by author; the plain text stays the answer itself."""
    text = Text()
    for span in spans:
        text.append(span.text, STYLES["accepted" if span.source == "draft" else "target"])
    return text


def score_table(score: Score) -> Table:
    """Build the table of a scored response's segments; it marks the first segment below the threshold."""
    holds = [s.validity >= score.threshold for s in score.segments]
    rows = [
        Row("accepted" if ok else "rejected", s.text, s.validity) for s, ok in zip(score.segments, holds, strict=True)
    ]
    labels = ["✓" if ok else "✗" for ok in holds]
    if score.first_error is not None:
        labels[score.first_error] += " first error"
    return _grid(rows, labels)


def _grid(rows: Sequence[Row], labels: Sequence[str] | None = None) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, style="dim", min_width=4)
    grid.add_column(overflow="fold")
    for row, label in zip(rows, labels or [LABELS[row.kind] for row in rows], strict=True):
        if row.text.strip():
            style = STYLES[row.kind]
            validity = "" if row.validity is None else f"{row.validity:.2f}"
            grid.add_row(Text(label, style), validity, Text(row.text.strip("\n"), style))
    return grid
