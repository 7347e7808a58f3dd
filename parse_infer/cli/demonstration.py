"""The demonstration: live answers of PARSE to a few problems, and a summary table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parse_infer.calibration.held_out import check_ids
from parse_infer.cli.answer_output import report_fallback
from parse_infer.cli.rich_view import AnswerView, legend
from parse_infer.engine import ParseEngine
from parse_infer.evaluation.modes import Answer, BenchProblem, Mode, make_modes, problems_digest, timed
from parse_infer.evaluation.records import Record, acceptance_rate, costs
from parse_infer.evaluation.tables import terminal_table
from parse_infer.request.events import Done, Resumed
from parse_infer.request.output import Generation
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.prompts import Prompt, Verbatim, content_of

REFRESH_S = 0.05
NAMES = {
    "target": "target alone",
    "draft": "draft model alone",
    "lossless": "lossless speculation",
    "parse": "PARSE",
}
_TRIED_AS_FIRST = 5  # problems


def run_demo(
    engine: ParseEngine,
    problems: Sequence[BenchProblem],
    check: Callable[[Any, str], bool | None],
    console: Console,
    *,
    max_new_tokens: int = 256,
) -> dict[str, list[Record]]:
    """Answer every problem with PARSE (shown live) and with the other modes of `NAMES`; print a table.

    All decode greedily from empty caches. Timings exclude the terminal drawing. A problem that PARSE answers right is
    shown first. This changes the order only: every problem is shown and counted once.

    Raises:
        ValueError: no problems, or an engine without draft model or judge.
    """
    check_ids(problems)
    settings = GenerationSettings(max_new_tokens)
    exact = settings.override(mode="exact")
    generate: Callable[..., Any] = engine.generate  # one prompt, one Generation
    modes = [*make_modes(engine, ("target", "draft"), settings), Mode("lossless", lambda p: generate(p, exact))]
    first = _right_one(problems, lambda p: generate(p, settings), check)  # also a warm-up
    for mode in modes:
        timed(engine, mode, first.prompt)
    records: dict[str, list[Record]] = {name: [] for name in NAMES}
    console.print(legend())
    if first is not problems[0]:
        console.print(Text("A problem that PARSE answers right comes first. The table counts all problems.", "dim"))
    for number, problem in enumerate([first, *(other for other in problems if other is not first)], 1):
        console.print()
        console.print(Text(f"{number}/{len(problems)}  {_question(problem.prompt)}", "bold"))
        answers = {"parse": watch(engine, problem.prompt, settings, console)}
        report_fallback(answers["parse"][0], settings)
        answers |= {mode.name: timed(engine, mode, problem.prompt) for mode in modes}
        for name, (generation, seconds) in answers.items():
            own = {"problem_id": problem.id, "digest": problems_digest([problem]), "mode": name, "repeat": 0}
            records[name].append(Record.of(generation, seconds, correct=check(problem, generation.text), **own))
        console.print(verdict(problem.reference, {name: rows[-1] for name, rows in records.items()}))
    console.print()
    console.print(demo_figures(records))
    return records


def _right_one(
    problems: Sequence[BenchProblem], answer: Answer, check: Callable[[Any, str], bool | None]
) -> BenchProblem:
    """Find a problem whose draft the judge can score and whose answer is right, else return the first problem."""
    for problem in problems[:_TRIED_AS_FIRST]:
        generation = answer(problem.prompt)
        if generation.fallback is None and check(problem, generation.text):
            return problem
    return problems[0]


def watch(
    engine: ParseEngine, prompt: Prompt, settings: GenerationSettings, console: Console
) -> tuple[Generation, float]:
    """Show an answer while the engine generates it; returns the answer and the engine's seconds."""
    engine.clear_caches()
    view = AnswerView(engine.threshold if settings.threshold is None else settings.threshold)
    worked, drawn, generation = 0.0, 0.0, None
    with Live(view, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        events = engine.stream(prompt, settings)
        start = time.perf_counter()
        for event in events:
            now = time.perf_counter()
            worked += now - start
            view.update(event)
            if not isinstance(event, Resumed) or now - drawn > REFRESH_S:
                live.refresh()
                drawn = now
            if isinstance(event, Done):
                generation = event.generation
            start = time.perf_counter()
    if not console.is_terminal:  # `Live` leaves the cursor behind its last line
        console.line()
    assert generation is not None
    return generation, worked


def demo_figures(records: dict[str, list[Record]]) -> Table:
    """Build the table of right answers and tokens per second of each mode."""
    rate = {name: costs(rows)["tokens_per_s"] for name, rows in records.items()}
    right = {name: sum(bool(row.correct) for row in rows) for name, rows in records.items()}
    n = len(records["parse"])
    cells = [
        [
            NAMES[name],
            f"{right[name]} of {n} ({right[name] / n:.0%})",
            f"{rate[name]:.0f}",
            f"{rate[name] / rate['target']:.1f}×",
        ]
        for name in records
    ]
    caption = f"PARSE kept {acceptance_rate(records['parse']):.0%} of the draft."
    return terminal_table(("", "right", "tokens/s", "speed-up"), cells, caption=caption)


def verdict(reference: str, records: dict[str, Record]) -> Text:
    """Say whether PARSE's answer is right, whether the target alone is, and what each mode's answer took."""
    parse, target = records["parse"], records["target"]
    if parse.correct:
        text = Text("right", "green")
    elif target.correct:
        text = Text(f"wrong, where the target alone is right (it is {reference})", "red")
    else:
        text = Text(f"wrong, as the target alone (it is {reference})", "yellow")
    others = ", ".join(f"{NAMES[name]} {record.seconds:.2f} s" for name, record in records.items() if name != "parse")
    text.append(
        f"  kept {acceptance_rate([parse]):.0%} of the draft, {parse.target_forwards} target forwards, "
        f"{parse.seconds:.2f} s; {others}",
        "dim",
    )
    return text


def _question(prompt: Prompt) -> str:
    prompt = content_of(prompt)
    if isinstance(prompt, Verbatim):
        return prompt.text
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
