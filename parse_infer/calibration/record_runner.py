"""The loop of every long measurement: run what a `RecordStore` lacks, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rich.console import Console

from parse_infer.calibration.record_store import R, RecordStore, progress_bar

Run = TypeVar("Run")


def run_missing(
    store: RecordStore[R],
    runs: Mapping[Any, Run],
    measure: Callable[[list[Run]], Iterable[R]],
    label: str,
    console: Console | None = None,
) -> list[R]:
    """Measure the runs whose keys `store` lacks, and return the records of all runs, in order.

    Args:
        runs: everything that the measurement consists of, by record key.
        measure: yields the record of each run in a list, in order. It may warm up first, and it may measure several
            runs at the same time. Each record is on disk before the next one is requested.
        label: name of the progress bar.
        console: console of the progress bar; None: standard error.
    """
    pending = [run for key, run in runs.items() if key not in store.records]
    if pending:
        with progress_bar(console) as progress:
            bar = progress.add_task(label, total=len(runs), completed=len(runs) - len(pending))
            try:
                for record in measure(pending):
                    store.append(record)
                    progress.advance(bar)
            except KeyboardInterrupt:
                print("interrupted; the same command continues where it stopped", file=sys.stderr)
                raise
    return [store.records[key] for key in runs]
