"""Output of `parse-infer generate`: on the terminal, as JSON, or in a folder where an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from parse_infer.calibration.promises import resolve_risk
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.cli.options import print_json
from parse_infer.cli.prompt_rows import PromptRow
from parse_infer.cli.rich_view import STYLES, coloured_spans
from parse_infer.engine import ParseEngine
from parse_infer.request.events import Accepted, Done, Event, Resumed
from parse_infer.request.output import FALLBACKS, Generation
from parse_infer.settings.generation import GenerationSettings


@dataclass(frozen=True)
class AnswerRecord:
    """One line of an answer file."""

    row: int
    """Line in the file of prompts, from 0."""
    id: object
    answer: dict[str, Any]

    @property
    def key(self) -> int:
        return self.row


def print_answers(engine: ParseEngine, rows: Sequence[PromptRow], settings: GenerationSettings, as_json: bool) -> None:
    """Print each complete answer, in the order of the rows."""
    out = Console(highlight=False, soft_wrap=True)
    for number, (row, generation) in enumerate(zip(rows, _generations(engine, rows, settings), strict=True)):
        if as_json:
            print_json({**row.labels, **_as_json(generation)})
        else:
            if number:
                out.print()
            out.print(coloured_spans(generation.spans))
            _print_cost(generation)
        report_fallback(generation, settings, row.place)


def stream_answers(
    engine: ParseEngine, rows: Sequence[PromptRow], settings: GenerationSettings, as_json: bool
) -> None:
    """Print text, or events with `as_json`, while the engine generates one answer after the other."""
    out = Console(highlight=False, soft_wrap=True)
    for number, row in enumerate(rows):
        if number and not as_json:
            out.print()
        for event in _events(engine, row, settings):
            done = event.generation if isinstance(event, Done) else None
            if as_json:
                body = asdict(event) if done is None else _as_json(done)
                print_json({**row.labels, "event": type(event).__name__.lower(), **body})
            elif isinstance(event, (Accepted, Resumed)):
                out.print(Text(event.text, STYLES["accepted" if isinstance(event, Accepted) else "target"]), end="")
            elif done is not None:
                out.print()
                _print_cost(done)
            if done is not None:
                report_fallback(done, settings, row.place)


def answer_file(engine: ParseEngine, rows: Sequence[PromptRow], settings: GenerationSettings, folder: str) -> None:
    """Append each answer to `records.jsonl` of the folder, in the order of the rows.

    Raises ValueError for a folder that holds answers to other prompts, or from other models or settings.
    """
    prompts = json.dumps([[row.prompt, row.id, row.draft] for row in rows]).encode()
    config = {
        **engine.describe(),
        "drafters": engine.describe_drafters(),
        "threshold": engine.threshold,
        "prompts": hashlib.sha256(prompts).hexdigest()[:16],
        "settings": asdict(resolve_risk(settings, engine.calibrations)),
    }
    store = RecordStore(folder, config, AnswerRecord, "run of answers")

    def measure(pending: list[tuple[int, PromptRow]]) -> Iterator[AnswerRecord]:
        generations = _generations(engine, [row for _, row in pending], settings)
        for (number, row), generation in zip(pending, generations, strict=True):
            report_fallback(generation, settings, row.place)
            yield AnswerRecord(number, row.id, _as_json(generation))

    run_missing(store, {number: (number, row) for number, row in enumerate(rows)}, measure, "answers")
    print(f"Written: {len(rows)} answers in {folder}/records.jsonl")


def _generations(engine: ParseEngine, rows: Sequence[PromptRow], settings: GenerationSettings) -> Iterator[Generation]:
    for row in rows:
        if row.draft is not None:
            with row.located():
                engine.check(row.prompt, settings, row.draft)

    def prepared() -> Iterator[AsyncGenerator[Event, None]]:
        for row in rows:
            with row.located():
                events = engine.events(row.prompt, settings, row.draft, streamed=False)
            yield events

    yield from engine.collect(prepared())


def _events(engine: ParseEngine, row: PromptRow, settings: GenerationSettings) -> Iterator[Event]:
    with row.located():
        return engine.stream(row.prompt, settings, row.draft)


def report_fallback(generation: Generation, settings: GenerationSettings, place: str = "") -> None:
    """Print a line on standard error if the target answered without the requested draft."""
    reason = generation.fallback
    if reason is None:
        return
    where = f"{place}: " if place else ""
    promise = "" if settings.risk is None else f"; the promise of --risk {settings.risk:g} does not hold for it"
    line = f"note: {where}{FALLBACKS[reason]}, so the answer is the target's own ({reason}){promise}"
    print(line, file=sys.stderr, flush=True)


def _as_json(generation: Generation) -> dict[str, Any]:
    body = asdict(generation)
    body["stats"]["acceptance_rate"] = generation.stats.acceptance_rate
    return body


def _print_cost(generation: Generation) -> None:
    stats, timings = generation.stats, generation.timings
    kept = f"kept {stats.acceptance_rate:.0%} of {stats.draft_tokens} draft tokens"
    text = (
        f"{'lossless speculation' if generation.lossless else kept}, {stats.target_forwards} target "
        f"forwards, {len(generation.token_ids)} tokens in {timings.total_s:.2f} s (draft {timings.draft_s:.2f}, "
        f"verify {timings.verify_s:.2f}, resume {timings.resume_s:.2f}); ended by {generation.finish_reason}"
    )
    Console(stderr=True, highlight=False).print(text, style="dim")
