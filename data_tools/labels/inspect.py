"""`parse-data inspect`: class balance, positions of first errors, and coloured examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from data_tools.labels.rows import LabelledDraft, read_rows
from data_tools.labels.shards import rollout_counts
from data_tools.labels.summary import BINS, Summary
from parse_infer.text.prompts import Message

BAR_WIDTH = 32
_VALID, _INVALID = "green", "red"


def inspect_folder(folder: str | Path, n_examples: int = 3, seed: int = 0, console: Console | None = None) -> Summary:
    """Print and return the counts of a folder of labelled drafts, and print examples.

    Half of the examples, rounded up, are drafts with an error. The seed determines the examples.

    Raises:
        FileNotFoundError, ValueError: no data, or a malformed row (named by file and line).
    """
    console = console or Console()
    summary = Summary()
    with_error = _Sample((n_examples + 1) // 2, seed)
    without = _Sample(n_examples, seed)
    for row in read_rows(folder):
        summary.add(row)
        (without if row.first_error is None else with_error).offer(row)
    summary.rollouts = rollout_counts(Path(folder))
    examples = with_error.rows + without.rows[: n_examples - len(with_error.rows)]
    console.print(counts_table(summary, str(folder)))
    console.print(balance_bar(summary))
    if summary.knows_errors:
        console.print(histogram("first error, position in the draft", position_bars(summary)))
        console.print(histogram("first error, segment number", segment_bars(summary)))
    for example in examples:
        console.print(example_panel(example))
    return summary


def counts_table(summary: Summary, title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, figure in summary.lines():
        table.add_row(name, figure)
    return table


def balance_bar(summary: Summary) -> Text:
    """Return one bar in two colours for valid and invalid prefixes."""
    share = summary.valid / summary.prefixes if summary.prefixes else 0.0
    valid = round(2 * BAR_WIDTH * share)
    return Text.assemble(
        ("█" * valid, _VALID),
        ("█" * (2 * BAR_WIDTH - valid), _INVALID),
        f"  {summary.valid:,} valid, {summary.prefixes - summary.valid:,} not valid prefixes",
    )


def position_bars(summary: Summary) -> list[tuple[str, int]]:
    width = 100 // BINS
    return [(f"{width * i}-{width * (i + 1)} %", count) for i, count in enumerate(summary.error_position)]


def segment_bars(summary: Summary, limit: int = 12) -> list[tuple[str, int]]:
    """Count drafts by their first invalid segment, numbered from 1. The last bar counts all segments after `limit`."""
    last = max(summary.error_segment, default=-1)
    bars = [(str(k + 1), summary.error_segment[k]) for k in range(min(last + 1, limit))]
    if last >= limit:
        beyond = sum(count for k, count in summary.error_segment.items() if k >= limit)
        bars.append((f"{limit + 1}-{last + 1}", beyond))
    return bars


def histogram(title: str, bars: Iterable[tuple[str, int]]) -> Table:
    bars = list(bars)
    highest = max((count for _, count in bars), default=0) or 1
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    for name, count in bars:
        table.add_row(name, Text("█" * round(BAR_WIDTH * count / highest), style=_INVALID), f"{count:,}")
    return table


def example_panel(row: LabelledDraft) -> Panel:
    """Return one draft with valid prefixes in green and invalid prefixes in red.

    Each segment shows its value, and the confidence of its label where below 1."""
    text = Text()
    columns = zip(row.completions, row.labels, row.values, row.confidence, strict=True)
    for segment, label, value, confidence in columns:
        body = segment.rstrip("\n")
        text.append(body, style=_VALID if label else _INVALID)
        note = f"  {'✓' if label else '✗'}" + ("" if value is None else f" {value:g}")
        text.append(note + (f" ({confidence:.1%} sure)" if confidence < 1 else ""), style="dim")
        text.append("\n")
    text.rstrip()
    head = Text(_prompt_text(row.prompt), style="bold")
    return Panel(Group(head, text), title=Text(row.problem_id or ""), subtitle=Text(_subtitle(row)))


def _subtitle(row: LabelledDraft) -> str:
    parts = []
    if row.reference is not None:
        parts.append(f"reference {row.reference}")
    if row.target_value is not None:
        parts.append(f"target value {row.target_value:g}")
    if row.temperature is not None:
        parts.append(f"temperature {row.temperature:g}")
    if row.finished is False:
        parts.append("unfinished")
    if row.undecided:
        parts.append(f"{row.undecided} prefixes undecided")
    return ", ".join(parts)


def _prompt_text(prompt: str | Sequence[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


class _Sample:
    """A uniform sample of at most `size` rows of a stream."""

    def __init__(self, size: int, seed: int) -> None:
        self.rows: list[LabelledDraft] = []
        self._size, self._seen, self._random = size, 0, Random(seed)

    def offer(self, row: LabelledDraft) -> None:
        self._seen += 1
        if len(self.rows) < self._size:
            self.rows.append(row)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.rows[place] = row
