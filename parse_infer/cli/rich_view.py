"""Answers on a terminal: author, acceptance and validity of each stretch of text.

Accepted draft text is green, rejected draft text red, the target's text cyan. A corrected token stands in its line, as
[rejected → the target's]. The first column says the same in words, for pipes and colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.table import Table
from rich.text import Text

from parse_infer.request.events import Accepted, Drafted, Event, Resumed, Verified
from parse_infer.request.output import Score, Span

Kind = Literal["pending", "accepted", "exact", "rejected", "corrected", "target"]
STYLES: dict[Kind, str] = {
    "pending": "dim",
    "accepted": "green",
    "exact": "green",
    "rejected": "red",
    "corrected": "bold cyan",
    "target": "cyan",
}
LABELS: dict[Kind, str] = {
    "pending": "draft …",
    "accepted": "draft ✓",
    "exact": "draft =",
    "rejected": "draft ✗",
    "corrected": "repaired",
    "target": "target",
}


@dataclass
class SegmentRow:
    """A stretch of text of one kind; `validity` belongs to the prefix that ends with this text.

    Attributes:
        n_tokens: tokens of a draft's segment.
        instead: the target's text for a corrected token.
    """

    kind: Kind
    text: str
    validity: float | None = None
    n_tokens: int = 0
    instead: str = ""

    @property
    def styled(self) -> Text:
        if self.kind != "corrected":
            return Text(self.text, STYLES[self.kind])
        inside = ((_visible(self.text), STYLES["rejected"]), " → ", (_visible(self.instead), STYLES["corrected"]))
        space = " " * (self.text.startswith(" ") or self.instead.startswith(" "))
        return Text.assemble(space, "[", *inside, "]", "\n" * self.instead.endswith("\n"))


class AnswerView:
    """Rich renderable of an answer, updated by the events of `ParseEngine.stream`.

    Args:
        threshold: kept draft text with a lower validity is shown as "=": it equals the target's own choice.
    """

    def __init__(self, threshold: float) -> None:
        self.rows: list[SegmentRow] = []
        self._threshold = threshold
        self._pending: list[SegmentRow] = []

    def update(self, event: Event) -> None:
        if isinstance(event, Drafted):
            self._pending = [SegmentRow("pending", event.text)]
        elif isinstance(event, Verified):
            if event.segments:
                self._pending = [SegmentRow("pending", s.text, s.validity, s.n_tokens) for s in event.segments]
        elif isinstance(event, Accepted):
            self._decide(event.text, event.n_tokens)
        elif isinstance(event, Resumed):
            self._extend(event.text)

    def __rich__(self) -> Table:
        return _grid([*self.rows, *self._pending])

    def _decide(self, text: str, n_tokens: int) -> None:
        """Accept the first tokens of the pending rows, whose text is `text`, and reject the rest. Of a block, the rest
        is drafted again, so only the rejected token remains.

        The pending text of a draft that ends inside a character is longer than `text`."""
        for row in self._pending:
            mine, text = text[: len(row.text)], text[len(row.text) :]
            whole = row.n_tokens <= n_tokens if row.n_tokens else mine == row.text
            n_tokens = max(0, n_tokens - row.n_tokens)
            if whole:
                valid = row.validity is not None and row.validity >= self._threshold
                self.rows.append(SegmentRow("accepted" if valid else "exact", mine, row.validity))
                continue
            if mine:
                self.rows.append(SegmentRow("exact", mine))
            self.rows.append(SegmentRow("rejected", row.text[len(mine) :], row.validity, row.n_tokens))
            if row.n_tokens == 1:
                break
        self._pending = []

    def _extend(self, text: str) -> None:
        """Append the target's text, one row per line; after a rejected token it is the correction."""
        last = self.rows[-1] if self.rows else None
        if last is not None and last.kind == "rejected" and last.n_tokens == 1 and text:
            self.rows[-1] = SegmentRow("corrected", last.text, last.validity, instead=text)
            return
        for line in text.splitlines(keepends=True):
            last = self.rows[-1] if self.rows else None
            if last is not None and last.kind == "target" and not last.text.endswith("\n"):
                last.text += line
            else:
                self.rows.append(SegmentRow("target", line))


def _visible(text: str) -> str:
    return text.strip() or text.replace("\n", "⏎").replace(" ", "␣")


def legend() -> Text:
    """Explain labels and colours."""
    meanings: tuple[tuple[Kind, str], ...] = (
        ("accepted", "accepted: valid"),
        ("exact", "accepted: the target's own choice"),
        ("rejected", "rejected"),
        ("corrected", "corrected token"),
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
    if score.unusual:
        return _grid([SegmentRow("pending", s.text) for s in score.segments], ["?"] * len(score.segments))
    holds = [s.validity is not None and s.validity >= score.threshold for s in score.segments]
    rows = [
        SegmentRow("accepted" if ok else "rejected", s.text, s.validity)
        for s, ok in zip(score.segments, holds, strict=True)
    ]
    labels = ["✓" if ok else "✗" for ok in holds]
    if score.first_error is not None:
        labels[score.first_error] += " first error"
    return _grid(rows, labels)


def _grid(rows: Sequence[SegmentRow], labels: Sequence[str] | None = None) -> Table:
    """One table row per line of text: accepted text, corrections and the target's text share their line."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, style="dim", min_width=4)
    grid.add_column(overflow="fold")
    for line in [[row] for row in rows] if labels else _lines(rows):
        text = Text().join(row.styled for row in line)
        if text.plain.strip():
            kinds = {row.kind for row in line if row.text.strip()}
            kind: Kind = "corrected" if "corrected" in kinds else line[-1].kind
            label = labels[rows.index(line[0])] if labels else LABELS[kind]
            validities = [row.validity for row in line if row.validity is not None and row.kind != "corrected"]
            plain = text.plain
            shown = text[len(plain) - len(plain.lstrip("\n")) : len(plain.rstrip("\n"))]
            grid.add_row(Text(label, STYLES[kind]), f"{validities[-1]:.2f}" if validities else "", shown)
    return grid


def _lines(rows: Sequence[SegmentRow]) -> list[list[SegmentRow]]:
    """Group rows that share a line, and split rows with several lines of accepted text."""
    lines: list[list[SegmentRow]] = []
    joins = False
    for row in rows:
        parts = row.text.splitlines(keepends=True) if row.kind in ("accepted", "exact", "pending") else [row.text]
        for part in parts:
            piece = replace(row, text=part)
            if joins and row.kind != "rejected":
                lines[-1].append(piece)
            else:
                lines.append([piece])
            joins = row.kind != "rejected" and not (row.instead or part).endswith("\n")
    return lines
