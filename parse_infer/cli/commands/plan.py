"""`parse-infer plan`: throughput and latency to expect with and without PARSE, from measured costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parse_infer.errors import SettingsError

_TOKENS = "; default: the file's."


def plan(
    costs: Annotated[Path, typer.Argument(help="File of costs, see below.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, or replicas of the target alone.")] = 2,
    draft_gpus: Annotated[int, typer.Option(min=0, help="Of these, for the draft model; 0: it shares all GPUs.")] = 1,
    rate: Annotated[
        list[float] | None, typer.Option(help="Arrivals per second; repeatable. Default: a range.")
    ] = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Instead of --rate: clients that wait for their answers, as in bench; repeatable."),
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(help=f"Mean length of a prompt{_TOKENS}")] = None,
    answer_tokens: Annotated[float | None, typer.Option(help=f"Mean length of an answer{_TOKENS}")] = None,
    draft_tokens: Annotated[float | None, typer.Option(help=f"Tokens of a draft{_TOKENS}")] = None,
    kept_tokens: Annotated[float | None, typer.Option(help=f"Mean number of kept tokens of a draft{_TOKENS}")] = None,
    target_tokens: Annotated[
        float | None, typer.Option(help="Tokens that the target writes after a draft; default: the file's, else 1.")
    ] = None,
    requests: Annotated[int, typer.Option(min=100, help="Requests of each simulation.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and errors.")] = 0,
) -> None:
    """Predict throughput and latency with and without PARSE, and the arrival rate from which it stops paying.

    The costs come from `parse-infer cost --output FILE` (one request at a time) or, over servers under load, from
    `python -m tools.measure_servers costs FILE`. A small queueing simulation does the rest; no model is loaded.

    \b
    Examples:
      parse-infer cost --output costs.json
      parse-infer plan costs.json --gpus 4 --kept-tokens 60 --answer-tokens 300
    """
    from parse_infer.evaluation.capacity_plan import default_rates, plan_summary, plan_table
    from parse_infer.evaluation.capacity_plan import plan as predict
    from parse_infer.evaluation.serving_costs import Costs

    if draft_gpus >= gpus:
        raise SettingsError(
            f"--draft-gpus {draft_gpus} of --gpus {gpus} leaves none for the target: choose fewer, or 0 to share them"
        )
    if any(not 0 < each < float("inf") for each in rate or ()):
        raise SettingsError(f"--rate {min(rate or ()):g} is no arrival rate: give a positive number per second")
    if rate and clients:
        raise SettingsError("--rate and --clients are two kinds of load: give one")
    known = Costs.read(
        costs,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        draft_tokens=draft_tokens,
        kept_tokens=kept_tokens,
        target_tokens=target_tokens,
    )
    loads = clients or rate or default_rates(known, gpus)
    rows = predict(known, loads, gpus, draft_gpus, requests, seed, closed=bool(clients))
    split = (
        f"{gpus - draft_gpus} for the target and {draft_gpus} for drafts" if draft_gpus else "shared by both models"
    )
    Console().print(f"{gpus} GPUs; with PARSE {split}")
    Console().print(plan_table(rows), plan_summary(rows))
