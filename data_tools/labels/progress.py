"""Progress of a build: a bar with rate and time left on a terminal, a line every `LINE_EVERY` seconds elsewhere."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

LINE_EVERY = 30.0  # seconds between lines without a terminal
_servers = logging.getLogger("parse_infer.backends")


class BuildProgress:
    """Context manager that shows progress, and the messages about servers.

    Problems of earlier runs count as done, but not in the rate.
    """

    def __init__(self, name: str, total: int | None, done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.total, self.before, self.done = total, done, done
        self.rows = self.n_rollouts = 0
        self.started = self.last_line = time.monotonic()
        self._notes = logging.Handler()
        self._notes.emit = lambda record: self.note(record.getMessage())  # type: ignore[method-assign]
        columns: list[ProgressColumn] = [
            SpinnerColumn(),
            BarColumn(bar_width=12),
            _text("{task.completed:.0f}/{task.fields[of]} problems"),
            _text("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True, min_width=7)),
            _text("{task.fields[left]}"),
        ]
        if self.console.width >= 100:
            columns.append(_text("[dim]{task.fields[activity]}"))
        self._bar = Progress(
            *columns, console=self.console, speed_estimate_period=900, disable=not self.console.is_terminal
        )
        of = "?" if total is None else str(total)
        self._task = self._bar.add_task(name, total=total, completed=done, of=of, rate="", left="left", activity="")
        self.note(f"{name}: {done} of {of} problems are done" if done else f"{name}: {of} problems")

    def __enter__(self) -> BuildProgress:
        self._level = _servers.level
        _servers.setLevel(logging.INFO)
        _servers.addHandler(self._notes)
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.update(self._task, left="" if self.done == self.total else "left", activity="")
        self._bar.stop()
        _servers.removeHandler(self._notes)
        _servers.setLevel(self._level)
        if self.done > self.before and not self.console.is_terminal:
            self.note(self._state())

    def activity(self, text: str) -> None:
        self._bar.update(self._task, activity=text)
        if not self.console.is_terminal and time.monotonic() - self.last_line > LINE_EVERY:
            self.note(f"{self._state()}  {text}")

    def advance(self, done: int, rows: int, rollouts: int) -> None:
        """Set the number of finished problems, add `rows`, and set the number of rollouts of this run."""
        self.done, self.n_rollouts = done, rollouts
        self.rows += rows
        self._bar.update(self._task, completed=done, rate=self._rate())
        if not self.console.is_terminal and time.monotonic() - self.last_line > LINE_EVERY:
            self.note(self._state())

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-6)
        return f"{self.rows / seconds:.1f} rows/s  {self.n_rollouts / seconds:.1f} rollouts/s"

    def _state(self) -> str:
        text = f"{self.done}/{self.total or '?'} problems  {self.rows} rows  {self._rate()}"
        if self.total:
            seconds = (time.monotonic() - self.started) / max(self.done - self.before, 1) * (self.total - self.done)
            text += f"  {seconds / 60:.1f} min left"
        return text

    def note(self, text: str) -> None:
        """Print one message for the user."""
        self.last_line = time.monotonic()
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _text(template: str) -> TextColumn:
    return TextColumn(template, table_column=Column(no_wrap=True))
