"""Progress of readings that may take long, such as that of the prompts to leave out."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import TypeVar

from rich.console import Console

from parse_infer.calibration.record_store import progress_bar

SILENT_S = 2.0  # a shorter reading shows nothing
LINE_EVERY_S = 30.0  # without a terminal
T = TypeVar("T")


def reading(
    items: Iterable[T], what: str, total: int | None = None, console: Console | None = None
) -> Generator[T, None, None]:
    """Yield the items. After two seconds, show on standard error how many were read: a bar, or lines off a terminal.

    Args:
        what: what is read, for the user.
        total: number of items, if known.
    """
    console = console or Console(stderr=True)
    bar, next_sign = None, time.monotonic() + SILENT_S
    try:
        for n, item in enumerate(items, 1):
            if bar is not None:
                bar.update(bar.task_ids[0], completed=n)
            elif time.monotonic() >= next_sign:
                next_sign += LINE_EVERY_S
                if console.is_terminal:
                    bar = progress_bar(console)
                    bar.start()
                    bar.add_task(what, total=total, completed=n)
                else:
                    of = "" if total is None else f" of {total:,}"
                    console.print(f"{what}: {n:,}{of}", highlight=False, markup=False, soft_wrap=True)
            yield item
    finally:
        if bar is not None:
            bar.stop()
