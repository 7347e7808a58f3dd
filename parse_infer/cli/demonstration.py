"""The demonstration: live answers of PARSE to a few problems, and a summary table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parse_infer.cli.rich_view import AnswerView, legend
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.modes import BenchProblem, Mode, clear_caches, make_modes, timed
from parse_infer.events import Done, Resumed
from parse_infer.models.prompts import Prompt, Verbatim, content_of
from parse_infer.output import Generation
from parse_infer.settings import GenerationSettings

REFRESH_S = 0.05
NAMES = {"target": "target alone", "draft": "draft model alone", "parse": "PARSE"}


@dataclass
class Tally:
    """Totals of one mode."""

    problems: int = 0
    right: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, generation: Generation, seconds: float, right: bool) -> None:
        self.problems += 1
        self.right += right
        self.tokens += len(generation.token_ids)
        self.seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run_demo(
    engine: ParseEngine,
    problems: Sequence[BenchProblem],
    check: Callable[[Any, str], bool],
    console: Console,
    *,
    max_new_tokens: int = 256,
) -> dict[str, Tally]:
    """Answer every problem with PARSE (shown live), the target alone and the draft model alone; print a table.

    All three decode greedily from empty caches. Timings exclude the terminal drawing.

    Raises:
        ValueError: no problems, or an engine without draft model or judge.
    """
    if not problems:
        raise ParseError("there are no problems to show: choose another limit")
    settings = GenerationSettings(max_new_tokens)
    modes = make_modes(engine, ("target", "draft"), settings)
    engine.generate(problems[0].prompt, settings)  # warm-up
    for mode in modes:
        timed(engine, mode, problems[0].prompt)
    tallies = {name: Tally() for name in NAMES}
    accepted = drafted = 0
    console.print(legend())
    for number, problem in enumerate(problems, 1):
        console.print()
        console.print(Text(f"{number}/{len(problems)}  {_question(problem.prompt)}", "bold"))
        generation, seconds = watch(engine, problem.prompt, settings, console)
        right = check(problem, generation.text)
        tallies["parse"].add(generation, seconds, right)
        accepted, drafted = accepted + generation.stats.accepted_tokens, drafted + generation.stats.draft_tokens
        alone = {}
        for mode in modes:
            alone[mode.name] = _alone(engine, mode, problem, check, tallies)
        console.print(_verdict(problem, right, generation, seconds, alone))
    console.print()
    console.print(summary(tallies, accepted / max(1, drafted)))
    return tallies


def watch(
    engine: ParseEngine, prompt: Prompt, settings: GenerationSettings, console: Console
) -> tuple[Generation, float]:
    """Show an answer while the engine generates it; returns the answer and the engine's seconds."""
    clear_caches(engine)
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
    assert generation is not None
    return generation, worked


def summary(tallies: dict[str, Tally], acceptance: float) -> Table:
    """Build the table of right answers and tokens per second of each mode."""
    caption = f"PARSE kept {acceptance:.0%} of the draft."
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("", "right", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, tally in tallies.items():
        ratio = tally.tokens_per_s / tallies["target"].tokens_per_s
        share = f"{tally.right} of {tally.problems} ({tally.right / tally.problems:.0%})"
        style = "bold" if name == "parse" else None
        table.add_row(NAMES[name], share, f"{tally.tokens_per_s:.0f}", f"{ratio:.1f}×", style=style)
    return table


def _alone(
    engine: ParseEngine,
    mode: Mode,
    problem: BenchProblem,
    check: Callable[[Any, str], bool],
    tallies: dict[str, Tally],
) -> float:
    generation, seconds = timed(engine, mode, problem.prompt)
    tallies[mode.name].add(generation, seconds, check(problem, generation.text))
    return seconds


def _verdict(
    problem: BenchProblem, right: bool, generation: Generation, seconds: float, alone: dict[str, float]
) -> Text:
    text = Text("right" if right else f"wrong (it is {problem.reference})", "green" if right else "red")
    stats = generation.stats
    text.append(
        f"  kept {stats.acceptance_rate:.0%} of the draft, {stats.target_forwards} target forwards, {seconds:.2f} s; "
        f"target alone {alone['target']:.2f} s, draft model alone {alone['draft']:.2f} s",
        "dim",
    )
    return text


def _question(prompt: Prompt) -> str:
    prompt = content_of(prompt)
    if isinstance(prompt, Verbatim):
        return prompt.text
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
