"""Answers on a terminal: who wrote what, what was dropped, and how valid it was found.

Three colours: accepted draft text is green, rejected draft text red, the target's text cyan. The first column says the
same in words, for pipes and for eyes that do not tell the colours apart.
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
    """A stretch of text of one kind; `validity` is that of the prefix that ends with it."""

    kind: Kind
    text: str
    validity: float | None = None


class AnswerView:
    """What the events of `ParseEngine.stream` add up to; a rich renderable at any moment.

    Args:
        threshold: draft text below it that was kept all the same is shown as "=": the target would have written it.
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
        """Split what was pending after its first `kept` characters."""
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
        """The target's text, a row per line."""
        for line in text.splitlines(keepends=True):
            last = self.rows[-1] if self.rows else None
            if last is not None and last.kind == "target" and not last.text.endswith("\n"):
                last.text += line
            else:
                self.rows.append(Row("target", line))


def legend() -> Text:
    """What labels and colours mean."""
    meanings: tuple[tuple[Kind, str], ...] = (
        ("accepted", "kept: found valid"),
        ("exact", "kept: the target's own choice"),
        ("rejected", "dropped"),
        ("target", "written by the target"),
    )
    parts = [(f"{LABELS[kind]} {meaning}", STYLES[kind]) for kind, meaning in meanings]
    return Text("   ").join(Text(text, style) for text, style in parts)


def coloured_spans(spans: Sequence[Span]) -> Text:
    """An answer as running text in the colours of its authors; without colours it is the answer itself."""
    text = Text()
    for span in spans:
        text.append(span.text, STYLES["accepted" if span.source == "draft" else "target"])
    return text


def score_table(score: Score) -> Table:
    """The segments of a scored response, with the first one below the threshold marked."""
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
