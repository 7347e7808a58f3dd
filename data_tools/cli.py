"""The command `parse-data`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from data_tools.labels.build_config import BuildConfig
from parse_infer import tracking
from parse_infer.cli.entry_point import APP_OPTIONS, add_command, run_app, with_version
from parse_infer.errors import ParseError
from parse_infer.tracking import RunOptions

app = typer.Typer(
    help="Build training data for PARSE: drafts of one model, cut into prefixes, labelled by rollouts of another.",
    epilog="PARSE_TRACEBACK=1 prints the traceback of an error.",
    **APP_OPTIONS,
)

_BUILD_HELP = f"""Build a data set, or resume an interrupted build.

\b
Examples:
  parse-data build recipes/data.yaml
  parse-data build recipes/data.yaml --limit 16 --output_dir data/try --task_options '{{}}'   # a trial
  parse-data build recipes/data.yaml --backend openai --target-url http://localhost:8000 \\
      --draft-url http://localhost:8001
  parse-data build recipes/data.yaml --temperatures 0.5 1.0 --task_options '{{max_number: 100}}'

Keys of the recipe; the option of the same name overrides the key:

\b
{chr(10).join(f"  --{f.name:<24}{f.metadata['help']}" for f in fields(BuildConfig))}"""

_PLAN_HELP = """Label a few problems, and predict what training a judge for this pair would bring.

The labels are kept in the recipe's output_dir, where a later build continues, beside plan.json with all figures.

\b
Examples:
  parse-data plan recipes/data.yaml
  parse-data plan recipes/data.yaml --limit 100 --output_dir data/other-pair --target ... --draft ...

Every key of the recipe is an option, as for parse-data build."""

_READ_HELP = """Let the target read the drafts of a finished build, for a judge on log-probabilities.

Neither the task nor the draft model is needed, so labelled drafts can be read again on another machine or engine.

\b
Examples:
  parse-data read data/validity
  tar -xf zoo/labels/qwen-coder-code.tar.xz -C data && parse-data read data/qwen-coder-code
  parse-data read data/validity --dtype bfloat16 --device cuda"""

_INSPECT_HELP = """Print class balance, positions of first errors, and coloured examples.

\b
Examples:
  parse-data inspect data/validity
  parse-data inspect data/validity --examples 10 --seed 1"""


_OVERRIDES = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "max_content_width": 119,
    "help_option_names": ["-h", "--help"],
}
_Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file of keys and values.")]


def _config(recipe: str, overrides: list[str], command: str) -> BuildConfig:
    from data_tools.recipe_parser import parse_recipe, read_recipe

    if recipe.startswith("-"):
        raise ParseError(f"name the recipe first: {command} recipes/data.yaml [--key value ...]")
    if (kind := read_recipe(recipe).get("recipe")) is not None:
        raise ParseError(f"{recipe} is a recipe for training ({kind}): accelerate launch {recipe}")
    (config,) = parse_recipe(recipe, overrides, [BuildConfig], command)
    return config


def build(context: typer.Context, recipe: _Recipe) -> None:
    from rich.console import Console

    from data_tools.labels.build import build as run_build
    from data_tools.labels.inspect import counts_table

    config = _config(recipe, context.args, "parse-data build")
    run = RunOptions(
        Path(config.output_dir), "build", "data", (config.target, config.draft), config.project, config=asdict(config)
    )
    summary = run_build(config)
    with tracking.job(run if config.report_to == "wandb" else None):
        tracking.summarise(summary.figures())
        tracking.log_artifact("reference", "dataset", f"{run.pair}-drafts", config.output_dir, summary.figures())
    Console().print(counts_table(summary, config.output_dir))


def plan(
    context: typer.Context,
    recipe: _Recipe,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems to label; the plan needs 50 to 100.")] = 64,
) -> None:
    from rich.console import Console

    from data_tools.labels.plan_run import plan_tables, run_plan

    config = _config(recipe, context.args, "parse-data plan")
    Console().print(plan_tables(run_plan(config, limit), config.output_dir))


def read(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="output_dir of a build.")],
    logprobs: Annotated[int, typer.Option(min=1, max=20, help="First choices to store per token.")] = 5,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the target; default: as in the build.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the target; default: the GPU, if any.")] = None,
) -> None:
    from data_tools.labels.build import read_again

    read_again(folder, logprobs, dtype, device)


def inspect(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="output_dir of a build, or a .jsonl file of it.")],
    examples: Annotated[int, typer.Option(min=0, help="Number of drafts to show.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the choice of drafts.")] = 0,
) -> None:
    from data_tools.labels.inspect import inspect_folder

    inspect_folder(folder, examples, seed)


app.callback()(with_version)
add_command(app, build, text=_BUILD_HELP, context_settings=_OVERRIDES)
add_command(app, plan, text=_PLAN_HELP, context_settings=_OVERRIDES)
add_command(app, read, text=_READ_HELP)
add_command(app, inspect, text=_INSPECT_HELP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `parse-data` and return the exit code: 2 for a user error, which stderr reports in one sentence."""
    return run_app(app, "parse-data", argv, "interrupted; the same command continues where it stopped")


if __name__ == "__main__":
    sys.exit(main())
