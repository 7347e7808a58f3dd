"""The command line: `parse-infer demo | generate | score | bench | cost`.

The place where things are put together: it alone reaches for `data_tools`, and only when a command needs a task.
A mistake of the user's becomes `error: <sentence>` on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.cli.generate import generate
from parse_infer.cli.options import load_engine, read_numbers, read_pairs
from parse_infer.cli.score import score

_EXAMPLES = """
Examples:

\b
  parse-infer demo
  parse-infer generate "A box holds 12 pens. How many pens are in 7 boxes?"
  parse-infer bench --limit 50 --out runs/bench
"""
app = typer.Typer(
    help=f"Fast generation: a draft model writes, the target checks every prefix in one pass.\n\n{_EXAMPLES}",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Not exported by typer; its module has moved between versions.
_ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


@app.command()
def demo(
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Which held-out problems.")] = 0,
    max_new_tokens: options.MaxNewTokens = 256,
    threshold: options.Threshold = None,
    target: options.Target = None,
    draft: options.Draft = None,
    adapter: options.Adapter = None,
    target_drafter: options.TargetDrafter = None,
    draft_drafter: options.DraftDrafter = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Watch PARSE answer held-out word problems, next to the target and the draft model alone.

    \b
    Examples:
      parse-infer demo
      parse-infer demo --limit 5 --seed 7
    """
    task = _task("gsm_symbolic", None)
    problems = _test_problems(task, seed, limit)
    engine = load_engine(
        target,
        draft,
        adapter,
        target_drafter=target_drafter,
        draft_drafter=draft_drafter,
        threshold=threshold,
        device=device,
        dtype=dtype,
    )
    from parse_infer.cli.demo import run_demo

    run_demo(engine, problems, task.check, Console(highlight=False), max_new_tokens=max_new_tokens)


app.command()(generate)
app.command()(score)


@app.command()
def bench(
    task: Annotated[str, typer.Option(help="gsm_symbolic, gsm8k or jsonl.")] = "gsm_symbolic",
    task_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task, such as path=…; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of test problems.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Which test problems; also the bootstrap's seed.")] = 0,
    modes: Annotated[str | None, typer.Option(metavar="A,B,…", help="Default: the first six below.")] = None,
    out: Annotated[str, typer.Option(metavar="DIR", help="Results; a run continues there.")] = "runs/bench",
    max_new_tokens: options.MaxNewTokens = 256,
    threshold: options.Threshold = None,
    zero_shot_threshold: Annotated[float | None, typer.Option(help="For the zero-shot judge; default 0.5.")] = None,
    resume: Annotated[
        str, typer.Option(help="After a rejected draft, in the PARSE modes: finish or hand_back.")
    ] = "finish",
    thresholds: Annotated[
        str | None, typer.Option(metavar="A,B,…|none", help="Thresholds of the figure; default: 0.05 to 0.99.")
    ] = None,
    sweep_limit: Annotated[int, typer.Option(min=0, help="Run the figure's thresholds on this many problems.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per problem and mode; the median time counts.")] = 1,
    target: options.Target = None,
    draft: options.Draft = None,
    adapter: options.Adapter = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    template_option: options.TemplateOption = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Compare PARSE with the target alone, the draft model alone, sequential and token-level speculation.

    Writes results.json, results.md and figure.png; an interrupted run continues with the same command.

    \b
    Modes:
      target            the target alone
      draft             the draft model alone
      parse             PARSE with the trained adapter
      parse-zero-shot   PARSE, the target itself asked whether each prefix is right
      sequential        one segment at a time, each verified before the next (SpecReason)
      assisted          transformers' assisted generation with the same draft model
      transformers      the target alone in transformers' own decode loop
      target+NAME       the target alone, its tokens guessed by lookup, draft, eagle3, parallel, medusa or a folder
      parse+NAME        PARSE, with such guesses for what the target writes
      parse+NAME+NAME   the same, and the second for what the draft model writes

    \b
    Examples:
      parse-infer bench --limit 300 --out runs/bench
      parse-infer bench --modes target,target+eagle3,parse,parse+eagle3,parse+draft+parallel --out runs/bench-tokens
      parse-infer bench --task jsonl --task-option path=problems.jsonl --modes target,parse --out runs/mine
    """
    loaded_task = _task(task, task_option)
    from parse_infer.bench.mode_names import DEFAULT_MODES, check_guides, needs
    from parse_infer.bench.run import THRESHOLDS, BenchSettings, run_bench
    from parse_infer.bench.tables import acceptance_note, terminal_tables

    settings = BenchSettings(
        modes=DEFAULT_MODES if modes is None else tuple(modes.split(",")),
        max_new_tokens=max_new_tokens,
        threshold=threshold,
        zero_shot_threshold=zero_shot_threshold,
        resume=resume,  # type: ignore[arg-type]
        thresholds=THRESHOLDS if thresholds is None else read_numbers(thresholds, "--thresholds"),
        sweep_limit=sweep_limit,
        repeats=repeats,
        seed=seed,
    )
    needs_draft, needs_judge = needs(settings.modes)
    check_guides(settings.modes, target or "zoo:target", (draft or "zoo:draft") if needs_draft else None)
    problems = _test_problems(loaded_task, seed, limit)
    engine = load_engine(
        target,
        draft,
        adapter,
        needs_draft=needs_draft,
        needs_judge=needs_judge,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        template_options=template_option,
    )
    name = " ".join([task, *(task_option or ())])
    try:
        results = run_bench(engine, problems, loaded_task.check, out, settings, task=f"{name}, seed {seed}")
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    console = Console(highlight=False)
    for table in terminal_tables(results, console.width):
        console.print(table)
    console.print(acceptance_note(results))
    console.print(f"Written: {out}/results.json, results.md, figure.png", soft_wrap=True)


@app.command()
def cost(
    target: Annotated[str, typer.Option(help="qwen3-8b, qwen3-0.6b, a Hugging Face id or a folder.")] = "qwen3-8b",
    draft: Annotated[str, typer.Option(help="The same for the draft model.")] = "qwen3-0.6b",
    context: Annotated[int, typer.Option(min=8, help="Tokens of the prompt.")] = 512,
    draft_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a whole draft.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each forward is timed.")] = 20,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """What every kind of forward costs at a pair's real size, with random weights: no download.

    Shows what a pair can gain on a machine before anything is trained: the price of the packed pass, of a look at
    several guessed tokens, and of each drafter, in target forwards. dtype auto is bfloat16 on a GPU, else float32.

    \b
    Examples:
      parse-infer cost
      parse-infer cost --target zoo:target --draft zoo:draft --context 200 --draft-tokens 100
    """
    place, numbers = options.placement(device, dtype)
    from parse_infer.bench.forward_cost import forward_costs

    table, summary = forward_costs(target, draft, context, draft_tokens, rounds, place, numbers)
    Console().print(f"{target} and {draft}, random weights, {numbers}, {place}, {context} tokens of context")
    Console().print(table, summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for a mistake of the user's)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        code = app(arguments or ["--help"], prog_name="parse-infer", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except _ClickException as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]
    except ModuleNotFoundError as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        return _complain(f"the package {error.name!r} is missing: pip install 'parse-engine[data]' or {error.name}")
    except (ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.strerror and error.filename:
            return _complain(f"{error.strerror}: {error.filename}")
        return _complain(str(error))


def _complain(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _task(name: str, task_options: Sequence[str] | None) -> Any:
    from data_tools.tasks.registry import load_task

    values = read_pairs(task_options, "--task-option")
    task = load_task(name, **values)
    for key, value in values.items():
        default = getattr(type(task), key, None)
        if isinstance(default, (int, float)) and not isinstance(value, (int, float, type(None))):
            raise ValueError(f"--task-option {key} is {value!r}; it must be a number (or null)")
    return task


def _test_problems(task: Any, seed: int, limit: int) -> list[Any]:
    """The first test problems of a task; fewer than `limit` if it has no more."""
    problems = list(islice(task.problems("test", seed=seed, limit=limit), limit))
    if not problems:
        raise ValueError(f"task {task.name} has no test problems")
    if len(problems) < limit:
        print(f"note: task {task.name} has {len(problems)} test problems, not {limit}", file=sys.stderr)
    return problems


if __name__ == "__main__":
    sys.exit(main())
