"""Load test with concurrent clients over vLLM: PARSE and the target alone, each with or without vLLM's speculation.

Each client sends its next problem after its last answer. Every cell of the table starts with an empty prefix cache.
The modes take turns, so that a change in the machine's speed affects all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.table import Table

from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.figure import plot
from parse_infer.evaluation.mode_names import block_tokens_of, is_adaptive
from parse_infer.evaluation.modes import BenchProblem, problems_digest
from parse_infer.evaluation.statistics import wilson_interval
from parse_infer.evaluation.tables import format_number, format_percent, format_times, markdown_table, terminal_table
from parse_infer.files import write_json, write_text
from parse_infer.models.environment import describe_run
from parse_infer.request.events import Accepted, Done, Resumed
from parse_infer.settings.generation import GenerationSettings
from parse_infer.token_drafters.medusa import MedusaConfig
from parse_infer.token_drafters.registry import check_head_name, find_head, is_medusa, split_name

_TOKENS = 3
_NGRAM = "ngram"
MODES = {
    "target": "vLLM, target alone",
    "parse": "PARSE",
    "parse:adaptive": "PARSE, adaptive",
}
"""The target server's own speculation may follow, n-grams or a head: "target+ngram:tokens=5", "parse+FOLDER"."""
_COLOURS = ("#222222", "#999999", "#7b3294", "#c51b7d", "#1b7837", "#7fbf7b", "#2166ac", "#b2611d", "#8c510a")


@dataclass(frozen=True)
class Cell:
    """One turn of one mode with a number of clients. Lists have one entry per answer, in seconds."""

    mode: str
    clients: int
    wall_s: float
    answers: int
    correct: int | None
    """None: the task has no references."""
    tokens: int
    draft_tokens: int
    accepted_tokens: int
    cpu_s: float
    """CPU time of the engine's process, including an in-process draft model but no servers."""
    first_s: list[float] = field(default_factory=list)
    """Time from the request to its first text."""
    all_s: list[float] = field(default_factory=list)
    turn: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        return self.mode, self.clients, self.turn


@dataclass(frozen=True)
class LoadTest:
    """What to measure.

    Attributes:
        clients: numbers of concurrent clients.
        turns: runs of each mode with each number of clients.
        together: keep all servers up, and alternate the modes for each number of clients. False (a GPU holds only
            one): finish all turns of one server before the next.
    """

    modes: Sequence[str]
    clients: Sequence[int]
    settings: GenerationSettings
    turns: int = 1
    together: bool = True


def check_server_modes(names: Sequence[str], starts: bool = True) -> None:
    """Raise ValueError or FileNotFoundError for an unknown mode or a head that vLLM cannot use. With `starts` False,
    also for a mode that must start a server."""
    for name in names:
        mode, plus, _ = name.partition("+")
        if mode not in MODES and not (mode.startswith("parse:") and block_tokens_of(mode)):
            known = ", ".join([*MODES, "parse:N"])
            raise ParseError(
                f"unknown mode {name!r} for --backend vllm; choose from {known}; vLLM's own speculation may follow, "
                f"as in target+{_NGRAM} or parse+FOLDER"
            )
        if plus and not starts:
            raise ParseError(f"{name} needs a server of its own: leave --target-url out")
        server_of(name)


def server_of(name: str) -> tuple[bool, dict[str, Any]]:
    """The target server of a mode: whether it is a stock server, and vLLM's options for its own speculation.

    Raises ValueError or FileNotFoundError for a size or a head that vLLM cannot use.
    """
    mode, plus, speculation = name.partition("+")
    if not plus:
        return mode == "target", {}
    kind, sizes = split_name(speculation)
    tokens = sizes.pop("tokens", _TOKENS)
    if sizes or not isinstance(tokens, int) or tokens < 1:
        raise ParseError(f"mode {name!r} has a wrong size: give tokens=NUMBER, at least 1, and nothing else")
    options = {"method": "ngram", "prompt_lookup_max": 4} if kind == _NGRAM else _head_options(name, kind)
    return mode == "target", {"speculative_config": {**options, "num_speculative_tokens": tokens}}


def _head_options(name: str, head: str) -> dict[str, Any]:
    """vLLM's speculative options for a head, a folder or Hugging Face id."""
    check_head_name(f"the head of mode {name!r}", head, (_NGRAM,))
    folder, config = find_head(head)
    folder = folder.absolute()
    if not is_medusa(config):
        parallel = {"parallel_drafting": True} if config.get("parallel_drafting") else {}
        return {"method": "eagle3", "model": str(folder), **parallel}
    shape = MedusaConfig.from_dict(config)
    if "target_num_hidden_layers" in config or shape.truncated_vocab_size != shape.vocab_size:
        raise ParseError(
            f"vLLM cannot load the Medusa heads {folder} as they are: rewrite them with "
            "convert of tools/medusa_for_vllm.py, and give the new folder"
        )
    return {"method": "medusa", "model": str(folder)}


def _label(name: str) -> str:
    mode, plus, speculation = name.partition("+")
    label = MODES.get(mode) or f"{MODES['parse']}, blocks of {block_tokens_of(mode)}"
    if not plus:
        return label
    kind, sizes = split_name(speculation)
    label = f"{label if mode != 'target' else 'vLLM'} with {'n-grams' if kind == _NGRAM else kind}"
    return label + (f", {sizes['tokens']} tokens" if sizes else "")


def run_clients(
    connect: Callable[[bool, dict[str, Any]], ParseEngine],
    load: LoadTest,
    problems: Sequence[BenchProblem],
    check: Callable[[Any, str], bool | None],
    folder: str | Path,
    about: Mapping[str, Any],
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the missing measurements; write `clients.json`, `clients.md` and `clients.png` into the folder.

    Args:
        connect: returns an engine over the target server of `server_of`; modes with the same server share it.
        about: models, task and machine; a continued run must have the same.

    Returns:
        The content of `clients.json`: `about`, and `cells` with the figures of the table.
    """
    modes, clients = list(dict.fromkeys(load.modes)), list(dict.fromkeys(load.clients))
    settings, turns = load.settings, load.turns
    config = {**about, "settings": asdict(settings), "problems": problems_digest(problems)}
    store = RecordStore(folder, config, Cell)
    runs = list(_order(modes, clients, turns))
    server_by_mode = {mode: server_of(mode) for mode in modes}
    if not load.together:
        runs.sort(key=lambda key: list(server_by_mode.values()).index(server_by_mode[key[0]]))

    def measure(pending: list[tuple[str, int, int]]) -> Iterator[Cell]:
        up: dict[str, ParseEngine] = {}
        warm = set()
        with ExitStack() as servers:
            for mode, n, turn in pending:
                server = server_by_mode[mode]
                if str(server) not in up:
                    if not load.together:
                        servers.close()
                        up.clear()
                    up[str(server)] = engine = servers.enter_context(connect(*server))
                    engine.backend.falls_back = False
                engine = up[str(server)]
                on_progress(f"{_label(mode)}, {n} clients" + (f", turn {turn + 1} of {turns}" if turns > 1 else ""))
                if (mode, n) not in warm:
                    engine.backend.run(_measure(engine, mode, n, turn, problems[: 2 * n], check, settings))
                    warm.add((mode, n))
                yield engine.backend.run(_measure(engine, mode, n, turn, problems, check, settings))

    run_missing(store, {key: key for key in runs}, measure, "load test")

    def measured(mode: str, n: int) -> list[Cell]:
        return [store.records[mode, n, turn] for turn in range(turns) if mode in modes]

    cells = [cell_figures(measured(mode, n), measured("target", n)) for n in clients for mode in modes]
    conditions = {"max_new_tokens": settings.max_new_tokens, "n_problems": len(problems), "turns": turns}
    results = {"about": {**about, **conditions, **describe_run()}, "cells": cells}
    write_json(Path(folder) / "clients.json", results)
    write_text(Path(folder) / "clients.md", clients_markdown(results))
    draw_clients(results, Path(folder) / "clients.png")
    return results


def _order(modes: Sequence[str], clients: Sequence[int], turns: int) -> Iterator[tuple[str, int, int]]:
    """Keys of cells. Every other turn reverses the modes, so that none always comes first."""
    for turn in range(turns):
        for n in clients:
            for mode in reversed(modes) if turn % 2 else modes:
                yield mode, n, turn


def cell_figures(own: Sequence[Cell], alone: Sequence[Cell]) -> dict[str, Any]:
    """Figures of one mode with a number of clients, over all turns.

    Args:
        own: the mode's turns.
        alone: turns of the target alone with as many clients; empty: the speed-up is None.

    Returns:
        `speedup` is in answers/s, `speedup_range` its lowest and highest turn (None for a single turn).
    """
    first = own[0]
    answers, seconds = sum(cell.answers for cell in own), sum(cell.wall_s for cell in own)
    drafted, kept = sum(cell.draft_tokens for cell in own), sum(cell.accepted_tokens for cell in own)
    right = None if any(cell.correct is None for cell in own) else sum(cell.correct or 0 for cell in own)
    # Answers/s, since answer lengths differ between modes.
    each = [_answers_per_s([cell]) / _answers_per_s([other]) for cell, other in zip(own, alone, strict=False)]
    return {
        "mode": first.mode,
        "clients": first.clients,
        "answers": answers,
        "accuracy": None if right is None else right / answers,
        # All turns use the same problems, so more turns do not narrow the interval.
        "accuracy_ci": None if right is None else wilson_interval(round(right / len(own)), first.answers),
        "tokens_per_s": sum(cell.tokens for cell in own) / seconds,
        "speedup": _answers_per_s(own) / _answers_per_s(alone) if alone else None,
        "speedup_range": [min(each), max(each)] if len(each) > 1 else None,
        **percentiles("first_", [s for cell in own for s in cell.first_s]),
        **percentiles("", [s for cell in own for s in cell.all_s]),
        "acceptance_rate": kept / drafted if drafted else None,
        "coordinator_cpu_ms": 1000 * sum(cell.cpu_s for cell in own) / answers,
    }


def _answers_per_s(cells: Sequence[Cell]) -> float:
    return sum(cell.answers for cell in cells) / sum(cell.wall_s for cell in cells)


def clients_table(results: dict[str, Any]) -> Table:
    """Build the main columns, for 80 characters; `clients_markdown` has the rest."""
    columns = [_HEADER.index(name) for name in _SHORT]
    heading = [name.replace(", ", "\n") for name in _SHORT]
    return terminal_table(heading, [[_row(cell)[i] for i in columns] for cell in results["cells"]])


def clients_markdown(results: dict[str, Any]) -> str:
    """The content of `clients.md`."""
    about = [f"- {key}: {value}" for key, value in results["about"].items()]
    return "\n".join([*about, "", *markdown_table(_HEADER, list(map(_row, results["cells"])))]) + "\n"


def draw_clients(results: dict[str, Any], path: Path) -> None:
    """Plot answers per second over the target alone, and the median latency, against the number of clients."""
    cells = results["cells"]
    compared = all(cell["speedup"] for cell in cells)
    with plot(path, results, columns=2) as (left, right):
        for mode, colour in zip(dict.fromkeys(cell["mode"] for cell in cells), cycle(_COLOURS), strict=False):
            own = [cell for cell in cells if cell["mode"] == mode]
            at = [cell["clients"] for cell in own]
            speed = [cell["speedup" if compared else "tokens_per_s"] for cell in own]
            left.plot(at, speed, "o-", color=colour, label=_label(mode))
            right.plot(at, [cell["p50_s"] for cell in own], "o-", color=colour)
        left.set_ylabel("answers/s over the target alone" if compared else "tokens/s")
        right.set_ylabel("median time of an answer, s")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({cell["clients"] for cell in cells}))
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.set_xlabel("concurrent clients")


async def _measure(
    engine: ParseEngine,
    mode: str,
    clients: int,
    turn: int,
    problems: Sequence[BenchProblem],
    check: Callable[[Any, str], bool | None],
    settings: GenerationSettings,
) -> Cell:
    engine.clear_caches()  # each cell starts with an empty prefix cache
    settings = settings.override(
        block_tokens=block_tokens_of(mode) or settings.block_tokens, adaptive=is_adaptive(mode)
    )
    waiting = iter(problems)
    first_s, all_s, completed = [], [], []

    async def client() -> None:
        for problem in waiting:
            begun, first = time.perf_counter(), None
            events = engine.events(problem.prompt, settings, alone=mode.startswith("target"))
            async with aclosing(events):
                async for event in events:
                    if first is None and isinstance(event, (Accepted, Resumed)) and event.text:
                        first = time.perf_counter()
                    if isinstance(event, Done):
                        completed.append((problem, event.generation))
            end = time.perf_counter()
            first_s.append((first or end) - begun)
            all_s.append(end - begun)

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    right = [check(problem, generation.text) for problem, generation in completed]
    generations = [generation for _, generation in completed]
    return Cell(
        mode=mode,
        clients=clients,
        turn=turn,
        wall_s=wall,
        cpu_s=cpu,
        answers=len(completed),
        correct=None if None in right else sum(map(bool, right)),
        tokens=sum(len(generation.token_ids) for generation in generations),
        draft_tokens=sum(generation.stats.draft_tokens for generation in generations),
        accepted_tokens=sum(generation.stats.accepted_tokens for generation in generations),
        first_s=[round(s, 4) for s in first_s],
        all_s=[round(s, 4) for s in all_s],
    )


_HEADER = ["mode", "clients", "right, %", "answers/s, to target", "tokens/s", "first text p50", "first text p99"]
_HEADER += ["answer p50", "answer p99", "accepted, %", "engine CPU"]
_SHORT = ["mode", "clients", "right, %", "answers/s, to target", "tokens/s", "answer p50", "accepted, %"]


def _row(cell: dict[str, Any]) -> list[str]:
    return [
        _label(cell["mode"]),
        str(cell["clients"]),
        format_percent(cell["accuracy"], cell["accuracy_ci"]),
        format_times(cell["speedup"], cell["speedup_range"]),
        format_number(cell["tokens_per_s"], 0),
        *(f"{cell[name]:.2f} s" for name in ("first_p50_s", "first_p99_s", "p50_s", "p99_s")),
        format_percent(cell["acceptance_rate"]),
        f"{cell['coordinator_cpu_ms']:.1f} ms",
    ]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, as "{name}p50_s" and "{name}p99_s"."""
    ordered = sorted(values)
    return {f"{name}p{percent}_s": ordered[len(ordered) * percent // 100] for percent in (50, 99)}
