"""`parse-infer calibrate`: find the settings that keep a risk promise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.cli.model_options import ModelOptions, with_models
from parse_infer.cli.options import read_numbers, read_sampling
from parse_infer.cli.problems import describe_problems, open_task, take_problems
from parse_infer.cli.setting_options import number_or_choice

if TYPE_CHECKING:
    from rich.table import Table

    from parse_infer.calibration.schema import Calibration


@with_models(threshold=None, calibration=None, parallel=None)
def calibrate(
    models: ModelOptions,
    task: options.TaskName = "gsm_symbolic",
    task_option: options.TaskOptions = None,
    split: Annotated[str, typer.Option(metavar="test|validation|train", help="Split of the task.")] = "validation",
    limit: Annotated[int, typer.Option(min=1, help="Number of problems; smaller risks need more.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problem selection.")] = 0,
    risk: Annotated[
        str, typer.Option(metavar="A,B,…", help="Losses that may be expected, such as 0.02; one promise for each.")
    ] = "0.01,0.02,0.05,0.1",
    confidence: Annotated[float, typer.Option(help="Confidence of each promise.")] = 0.9,
    loss: Annotated[
        str,
        typer.Option(
            metavar="accuracy|lost|disagreement",
            help="accuracy: the target's accuracy minus PARSE's. lost: the share of requests that the target alone "
            "answers right and PARSE wrong. disagreement, without a checker: PARSE's final answer differs from the "
            "target's.",
        ),
    ] = "lost",
    temperature: Annotated[float, typer.Option(min=0, help="Of the target; 0: greedy. Drafts are greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the target's sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of the target's sampling; 0: all tokens.")] = 0,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Sampled answers to each problem; default: 4, greedy 1.")
    ] = None,
    majority: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --loss disagreement: the target's answer is the majority of this many samples; 0: its greedy "
            "answer.",
        ),
    ] = 0,
    block_tokens: Annotated[
        str,
        typer.Option(metavar="whole,auto,N", help="Lengths of blocks to try; one alone needs fewer problems."),
    ] = "whole,auto",
    timed: Annotated[
        int,
        typer.Option(
            min=1,
            help="Problems on which answers are timed: the target's first alone, and each text of PARSE once.",
        ),
    ] = 100,
    thresholds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="Thresholds to try, chosen before; default: 34 from 0 to 1. A few cost less."
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of answers decoded together, on problems that are not timed. Faster for large "
            "models. Needs a --judge such as min_p, or an adapter without a second stream, --block-tokens auto, "
            "and a draft model whose tokens are tokens of the target.",
        ),
    ] = 1,
    max_new_tokens: options.MaxNewTokens = 256,
    out: Annotated[str, typer.Option(metavar="DIR", help=options.RESULTS_HELP)] = "runs/calibration",
) -> None:
    """Find the fastest settings that keep a promise: "at most 5 in 100 requests are lost, with 90 % confidence".

    With --loss accuracy: "at most 2 points of accuracy are lost". A promise holds for its own sampling only. The
    target alone and PARSE under every threshold answer every problem. Drafts, validities and continuations are
    computed once, so many thresholds cost little. Writes calibration.json into --out. If the adapter's folder
    is on this machine and --cut-policy is not given, its calibration.json gets the calibration too, beside those of
    other samplings and backends. `parse-infer generate --risk 0.05` reads it there.

    \b
    Examples:
      parse-infer calibrate --limit 500
      parse-infer calibrate --adapter runs/judge/adapter --risk 0.05 --limit 1000
      parse-infer calibrate --temperature 0.7 --top-p 0.8 --top-k 20 --loss accuracy --risk 0.05
      parse-infer calibrate --block-tokens auto --thresholds 0.97,0.8,0.5 --batch-size 32
      parse-infer calibrate --task jsonl --task-option path=prompts.jsonl --task-option check_with=none \\
          --loss disagreement
    """
    loaded_task = open_task(task, task_option)
    from data_tools.tasks.checkers import same_answer
    from data_tools.tasks.task import comparison
    from parse_infer.calibration.calibration_file import FILE, add_calibration, save_calibrations
    from parse_infer.calibration.measure import calibrate as measure
    from parse_infer.calibration.measure import check_problems
    from parse_infer.calibration.settings import CalibrationSettings

    sampling = replace(read_sampling(temperature, top_p, top_k), seed=None if temperature == 0 else seed)
    settings = CalibrationSettings(
        risks=read_numbers(risk, "--risk"),
        confidence=confidence,
        loss=loss,  # type: ignore[arg-type]
        blocks=tuple(map(number_or_choice, block_tokens.split(","))),
        max_new_tokens=max_new_tokens,
        majority=majority,
        sampling=sampling,
        samples=samples or (1 if sampling.greedy else 4),
        timed=timed,
        thresholds=() if thresholds is None else read_numbers(thresholds, "--thresholds"),
        batch_size=batch_size,
    )
    problems = take_problems(loaded_task, split, seed, limit)
    check_problems(problems, settings)
    where = describe_problems(task, task_option, split, seed)
    with models.load() as engine:
        compare = partial(comparison, loaded_task)
        calibration = measure(
            engine, problems, loaded_task.check, same_answer, out, settings, task=where, comparison=compare
        )
    console = Console(highlight=False)
    console.print(promises_table(calibration))
    save_calibrations(Path(out) / FILE, [calibration])
    console.print(f"Written: {Path(out) / FILE}", soft_wrap=True)
    plain = models.cut_policy is None and models.judge is None  # else the adapter's own calibrations must stay
    if plain and models.adapter_name is not None and Path(models.adapter_name).is_dir():
        path = Path(models.adapter_name) / FILE
        held = " and ".join(f"{each.sampling} ({each.backend})" for each in add_calibration(path, calibration))
        console.print(f"Written: {path}, with promises for {held}", soft_wrap=True)


def promises_table(calibration: Calibration) -> Table:
    """Build the terminal table of a calibration's promises."""
    from parse_infer.evaluation.tables import terminal_table
    from parse_infer.settings.acceptance import describe_threshold

    cells = []
    for risk, place in calibration.promises.items():
        figures = ["-", "-", "-", "not proven"]
        if place is not None:
            tried = calibration.tried[place]
            figures = [
                describe_threshold(tried.setting.threshold),
                str(tried.setting.block_tokens),
                f"{tried.losses:g}",
                f"{tried.speedup:.2f}x",
            ]
        cells.append([f"{risk:.4g}", f"{calibration.confidence:.4g}", *figures])
    heading = (f"at most ({calibration.loss})", "confidence", "threshold", "block tokens", "lost here", "speed-up")
    title = f"{calibration.n_problems} problems of {calibration.task}, {calibration.sampling}"
    return terminal_table(heading, cells, title=title)
