"""`parse-infer bench`: compare the modes of `parse_infer.evaluation` on the problems of a task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from parse_infer import tracking
from parse_infer.cli import options
from parse_infer.cli.model_options import NO_DRAFTER, ModelOptions, progress, with_models
from parse_infer.cli.options import read_numbers, read_sampling
from parse_infer.cli.problems import describe_problems, open_task, take_problems
from parse_infer.cli.setting_options import with_settings
from parse_infer.errors import ParseError
from parse_infer.evaluation.excluded_settings import NOT_MEASURED
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import GREEDY
from parse_infer.tracking import RunOptions

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine


# A mode names its own token drafter and judge.
@with_models(target_drafter=NO_DRAFTER, judge=None, parallel=None)
@with_settings(without=["threshold", *NOT_MEASURED], max_new_tokens=256)
def bench(
    models: ModelOptions,
    settings: GenerationSettings,
    risk: options.MeasuredRisk = None,
    task: options.TaskName = "gsm_symbolic",
    task_option: options.TaskOptions = None,
    split: Annotated[
        str, typer.Option(metavar="test|validation|train", help="Split of the task; tune settings on validation.")
    ] = "test",
    limit: Annotated[int, typer.Option(min=1, help="Number of problems; a larger one adds to a finished run.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problem selection and of the bootstrap.")] = 0,
    modes: Annotated[str | None, typer.Option(metavar="A,B,…", help="Default: the first eight below.")] = None,
    out: Annotated[str, typer.Option(metavar="DIR", help=options.RESULTS_HELP)] = "runs/bench",
    zero_shot_threshold: Annotated[
        float | None, typer.Option(help="Threshold of the zero-shot judge; default 0.5.")
    ] = None,
    thresholds: Annotated[
        str | None, typer.Option(metavar="A,B,…|none", help="Thresholds of the figure; default: 0.05 to 0.99.")
    ] = None,
    sweep_limit: Annotated[int, typer.Option(min=0, help="Number of problems for the figure's thresholds.")] = 100,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            "--samples",
            min=1,
            help="Runs per problem and mode; tables use the median time, and with --temperature all runs, which are "
            "samples. With --clients: runs of all modes.",
        ),
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="Of all modes, without the drafts for a judge.")] = 0.0,
    draft_temperature: Annotated[
        float, typer.Option(min=0, help="Of the drafts that a judge reads, which are greedy by default.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="With --temperature, see generate.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="With --temperature, see generate.")] = 0,
    clients: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="With --backend vllm: numbers of concurrent clients; default: 1,4,16,32."),
    ] = None,
    report_to: Annotated[str, typer.Option(metavar="none|wandb", help="Tracker of the results.")] = "none",
    project: Annotated[str, typer.Option(help="Project in the tracker.")] = "parse",
) -> None:
    """Compare PARSE with the target alone, the draft model alone, sequential and token-level speculation.

    Writes results.json, results.md and figure.png; an interrupted run continues with the same command.

    \b
    Modes:
      target            the target alone
      draft             the draft model alone
      target+draft      lossless speculative decoding: the draft model proposes the target's tokens
      assisted          transformers' assisted generation with the same draft model
      sequential        verify each segment before drafting the next (SpecReason), with PARSE's token drafter
      parse             PARSE with its defaults: trained adapter, the draft model as token drafter
      parse-min-p       PARSE without training: keeps what min-p sampling of the target could have written (min_p 0.1)
      parse-zero-shot   PARSE without training: the prompt asks the target whether each prefix is right
      parse-RULE        PARSE with another judge without training: parse-relaxed-acceptance, parse-accept-threshold,
                        parse-typical-acceptance, parse-fly
      transformers      the target alone in transformers' own decode loop
      target+NAME       the target with the token drafter lookup, draft or the folder of a trained head
      parse:whole       PARSE with this --block-tokens; also parse:auto, parse:32
      parse:adaptive    PARSE; the target answers alone while measurements say that this is faster
      parse:stream      PARSE, streamed: a short first block, so that the first text comes early
      parse+NAME        PARSE with this token drafter for the target; parse+none: without any

    \b
    Sizes follow a name:
      target+draft:tokens=12:confidence=0.3, parse+FOLDER:tokens=4:top_k=3
      target+draft:greedy=1 (with --temperature: the draft model proposes its first choices, and draws nothing)
      assisted:tokens=12:confidence=0.3:schedule=heuristic (default: transformers' own), assisted:ensemble=0.5 (lossy)
      parse-min-p:ratio=0.3, parse-fly:entropy=0.5:window=4 (options of --judge)

    \b
    Modes with --backend vllm (clients.json, clients.md, clients.png):
      target, parse, parse:whole, parse:32, parse:adaptive
      target+ngram, target+FOLDER (of a head): vLLM's own speculative decoding; sizes as in target+ngram:tokens=5
      parse+ngram, parse+FOLDER: PARSE with a target server that speculates

    \b
    Examples:
      parse-infer bench --backend vllm --clients 1,4,16,32 --out runs/bench-clients
      parse-infer bench --limit 300 --out runs/bench
      parse-infer bench --temperature 0.7 --samples 4 --modes target,target+draft,parse --out runs/sampled
      parse-infer bench --adapter runs/logprob/adapter --risk 0.05 --modes target,target+draft,parse --out runs/promise
      parse-infer bench --modes target,target+lookup,parse,parse+lookup --out runs/bench-tokens
      parse-infer bench --split validation --modes target,assisted,assisted:tokens=8 --out runs/search
      parse-infer bench --task jsonl --task-option path=problems.jsonl --modes target,parse --out runs/mine
    """
    if report_to not in tracking.TRACKERS:
        raise ParseError(f"--report-to is {report_to!r}; choose one of {', '.join(tracking.TRACKERS)}")
    sampling = read_sampling(temperature, top_p, top_k)
    if draft_temperature and (risk is not None or models.served):
        raise ParseError(
            f"--draft-temperature is {draft_temperature}, but promises and benchmarks of servers have greedy drafts: "
            "omit it"
        )
    asked = settings.override(threshold=models.threshold, resume_sampling=sampling)
    settings = models.with_promise(asked, risk).override(resume_sampling=GREEDY)
    loaded_task, where = open_task(task, task_option), describe_problems(task, task_option, split, seed)
    names = None if modes is None else tuple(name.strip() for name in modes.split(","))
    pair = tuple(str(model) for model in (models.target, models.draft) if model)
    tracked = RunOptions(Path(out), "bench", "bench", pair, project) if report_to == "wandb" else None
    if models.served:
        if not sampling.greedy:
            raise ParseError(f"--temperature is {temperature}, but a benchmark of servers is greedy: omit it")
        if thresholds is not None or zero_shot_threshold is not None or sweep_limit != 100:
            raise ParseError("--thresholds, --sweep-limit and --zero-shot-threshold are for --backend local")
        problems = take_problems(loaded_task, split, seed, limit)
        load_modes = names or ("target", "parse", "parse:adaptive")
        _bench_clients(
            models,
            load_modes,
            clients or "1,4,16,32",
            problems,
            loaded_task.check,
            out,
            settings,
            repeats,
            where,
            promised=risk is not None,
            track=tracked,
        )
        return
    if clients is not None:
        raise ParseError("--clients needs --backend vllm: the local backend answers one request at a time")
    from parse_infer.evaluation.mode_names import DEFAULT_MODES, NEEDS_ADAPTER, base_of, needs
    from parse_infer.evaluation.run import THRESHOLDS, BenchSettings, run_bench
    from parse_infer.evaluation.tables import acceptance_note, terminal_tables

    benchmark = BenchSettings(
        modes=names or DEFAULT_MODES,
        generation=settings,
        sampling=sampling,
        draft_temperature=draft_temperature,
        zero_shot_threshold=zero_shot_threshold,
        thresholds=THRESHOLDS if thresholds is None else read_numbers(thresholds, "--thresholds"),
        sweep_limit=sweep_limit,
        repeats=repeats,
        seed=seed,
    )
    needs_draft, needs_judge = needs(benchmark.modes)
    if zero_shot_threshold is not None and "parse-zero-shot" not in map(base_of, benchmark.modes):
        raise ParseError("--zero-shot-threshold is for the mode parse-zero-shot: name it in --modes")
    judged = any(base_of(mode) in NEEDS_ADAPTER for mode in benchmark.modes)
    if (models.threshold is not None or risk is not None) and not judged:
        raise ParseError(
            f"--{'threshold' if risk is None else 'risk'} is for the modes {' and '.join(NEEDS_ADAPTER)}, and --modes "
            "names neither; the thresholds of rules are those of --thresholds"
        )
    problems = take_problems(loaded_task, split, seed, limit)
    engine = models.load(needs_draft=needs_draft, needs_judge=needs_judge, promised=risk is not None)
    if modes is None:
        benchmark = replace(benchmark, modes=_possible(DEFAULT_MODES, engine))
    results = run_bench(engine, problems, loaded_task.check, out, benchmark, task=where)
    with tracking.job(tracked):
        track_results(results["environment"], results["modes"])
    console = Console(highlight=False)
    for table in terminal_tables(results, console.width):
        console.print(table)
    console.print(acceptance_note(results))
    console.print(f"Written: {out}/results.json, results.md, figure.png", soft_wrap=True)


def _bench_clients(
    models: ModelOptions,
    modes: tuple[str, ...],
    clients: str,
    problems: Sequence[Any],
    check: Callable[[Any, str], bool | None],
    out: str,
    settings: GenerationSettings,
    turns: int,
    task: str,
    promised: bool,
    track: RunOptions | None,
) -> None:
    import torch

    from parse_infer.calibration.held_out import leave_out_learnt
    from parse_infer.evaluation.load_test import LoadTest, check_server_modes, clients_table, run_clients
    from parse_infer.models.environment import describe_machine

    parts = [part.strip() for part in clients.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ParseError(f"--clients is {clients!r}; give whole numbers of at least 1, such as 1,4,16")
    check_server_modes(modes, starts=not models.target_url)
    if any(mode.startswith("parse") for mode in modes):
        problems = leave_out_learnt(problems, models.train_problems)
    alone = replace(models, draft=None, adapter=None, calibration=None, draft_url=None, local_draft=None)

    def connect(stock: bool, options: dict[str, Any]) -> ParseEngine:
        if stock:
            return alone.load(needs_draft=False, needs_judge=False, target_options=options)
        return models.load(target_options=options, promised=promised)

    machine = {"coordinator": describe_machine(torch.device("cpu"))}  # remote servers do not report their hardware
    baseline = "the servers of --target-url" if models.target_url else "a stock server of vLLM"
    about = {**models.describe_servers(), "baseline": baseline, "task": task, **machine}
    together = bool(models.target_url) or not torch.cuda.is_available()
    results = run_clients(
        connect,
        LoadTest(modes, [int(part) for part in parts], settings, turns, together),
        problems,
        check,
        out,
        about,
        progress,
    )
    with tracking.job(track):
        track_results(about, {f"{cell['mode']}, {cell['clients']} clients": cell for cell in results["cells"]})
    Console(highlight=False).print(clients_table(results))
    print(f"Written: {out}/clients.json, clients.md, clients.png")


def track_results(environment: dict[str, Any], modes: dict[str, dict[str, Any]]) -> None:
    """Log the environment and every mode's figures to the current run."""
    tracking.note(environment)
    names = sorted({name for figures in modes.values() for name in figures})
    rows = [[mode, *(_cell(figures.get(name)) for name in names)] for mode, figures in modes.items()]
    tracking.log_table("modes", ["mode", *names], rows)


def _cell(value: object) -> object:
    """A figure as a table has it; an interval becomes text."""
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def _possible(modes: tuple[str, ...], engine: ParseEngine) -> tuple[str, ...]:
    """Drop the speculation mode where draft model and target have different tokens."""
    from parse_infer.evaluation.mode_names import SPECULATION
    from parse_infer.models.token_map import token_map

    if engine.draft is None or token_map(engine.draft.tokenizer, engine.target.tokenizer) is not None:
        return modes
    print(f"note: skipping {SPECULATION}: the two models have different tokens", file=sys.stderr)
    return tuple(mode for mode in modes if mode != SPECULATION)
