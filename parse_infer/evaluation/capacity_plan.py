"""Predict throughput and latency of PARSE and of the target alone on a number of GPUs: `parse-infer plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from parse_infer.evaluation.serving_costs import Costs
from parse_infer.evaluation.serving_simulation import Outcome, Way, alone, parse, parse_as_a_whole, simulate
from parse_infer.evaluation.tables import format_times, terminal_table

_MORE = 1.02  # answers/s that are more than chance
_TURNS = 4  # requests in a simulation per request that all servers can run at once
_SHARES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)  # of the target's capacity


@dataclass(frozen=True)
class Row:
    """Both ways to answer at one load: arrivals per second, or a number of clients in a closed loop."""

    load: float
    alone: Outcome
    parse: Outcome
    closed: bool = False

    @property
    def unit(self) -> str:
        return "clients" if self.closed else "arrivals/s"

    @property
    def pays(self) -> bool:
        """Whether the median answer comes sooner; of clients, and of arrivals beyond a capacity, whether more come."""
        if self.closed or self.alone.overloaded or self.parse.overloaded:
            return self.parse.answers_per_s > _MORE * self.alone.answers_per_s
        return self.parse.p50_s < self.alone.p50_s


def plan(
    costs: Costs,
    loads: Sequence[float],
    gpus: int,
    draft_gpus: int,
    requests: int = 2000,
    seed: int = 0,
    closed: bool = False,
) -> list[Row]:
    """Compare both ways on `gpus` GPUs. With PARSE `draft_gpus` of them run the draft model.

    Args:
        loads: arrivals per second, or with `closed` numbers of clients, each of which waits for its answer.
        requests: of each simulation, at least: many servers need more until they run what they will always run.
    """
    at_once = round(gpus * costs.target_token_s.points[-1][0])

    def at(load: float, way: Way, targets: int, drafts: int) -> Outcome:
        if not closed:
            return simulate(costs, way, load, targets, drafts, max(requests, _TURNS * at_once), seed)
        clients = int(load)
        return simulate(costs, way, None, targets, drafts, max(requests, 10 * clients), seed, clients)

    with_parse = parse if draft_gpus or costs.parse_token_s is None else parse_as_a_whole
    return [
        Row(load, at(load, alone, gpus, 0), at(load, with_parse, gpus - draft_gpus, draft_gpus), closed)
        for load in sorted(loads)
    ]


def default_rates(costs: Costs, gpus: int) -> list[float]:
    """Arrival rates up to beyond what the target alone can answer at its largest measured load."""
    load, seconds = costs.target_token_s.points[-1]
    answer_s = costs.answer_tokens * seconds / load + costs.prompt_tokens * costs.read_token_s.points[-1][1]
    return [float(f"{gpus / answer_s * share:.2g}") for share in _SHARES]


def plan_table(rows: Sequence[Row]) -> Table:
    """Build the table. "!" marks arrivals beyond the capacity, for which the times grow without end."""
    header = [
        rows[0].unit,
        *(f"{way}\n{name}" for way in ("alone", "PARSE") for name in ("answers/s", "p50, s", "p99, s")),
    ]
    cells = []
    for row in rows:
        figures: list[str] = []
        for outcome in (row.alone, row.parse):
            times = ["", ""] if outcome.overloaded else [f"{outcome.p50_s:.3g}", f"{outcome.p99_s:.3g}"]
            figures += [f"{outcome.answers_per_s:.3g}" + "!" * outcome.overloaded, *times]
        known = not (row.alone.overloaded or row.parse.overloaded)
        faster = format_times(row.alone.p50_s / row.parse.p50_s if known else None)
        cells.append([f"{row.load:g}", *figures, faster, "yes" if row.pays else "no"])
    return terminal_table([*header, "sooner", "pays"], cells)


def plan_summary(rows: Sequence[Row]) -> str:
    """Say in a sentence at which of the loads PARSE pays."""
    unit = rows[0].unit
    overloaded = " (!: arrivals exceed what the servers can answer)"
    marked = overloaded if any(row.alone.overloaded or row.parse.overloaded for row in rows) else ""
    first = next((n for n, row in enumerate(rows) if row.pays), len(rows))
    stops = next((n for n, row in enumerate(rows) if n > first and not row.pays), len(rows))
    if first == len(rows):
        several = f" to {rows[-1].load:g}" if len(rows) > 1 else ""
        return f"PARSE does not pay at {rows[0].load:g}{several} {unit}{marked}."
    begins = f"from {rows[first].load:g} " if first else "up "
    paid = f"PARSE pays {begins}to {rows[stops - 1].load:g} {unit}"
    if stops == len(rows):
        return f"{paid}, the highest load here{marked}."
    return f"{paid} and stops paying by {rows[stops].load:g}{marked}."
