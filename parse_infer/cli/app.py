"""The command line `parse-infer`: all its commands.

A user error prints `error: <sentence>` on standard error and exits with code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from parse_infer.cli.commands.advise import advise
from parse_infer.cli.commands.bench import bench
from parse_infer.cli.commands.calibrate import calibrate
from parse_infer.cli.commands.cost import cost
from parse_infer.cli.commands.demo import demo
from parse_infer.cli.commands.eval import evaluate
from parse_infer.cli.commands.generate import generate
from parse_infer.cli.commands.plan import plan
from parse_infer.cli.commands.score import score
from parse_infer.cli.commands.serve import serve
from parse_infer.cli.commands.transfer import transfer
from parse_infer.cli.entry_point import APP_OPTIONS, add_command, run_app, with_version

_EXAMPLES = """
Examples:

\b
  parse-infer demo
  parse-infer generate "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"
  parse-infer serve --port 8000
  parse-infer bench --limit 50 --out runs/bench
  parse-infer eval --tasks gsm8k --num-fewshot 0 --limit 50
"""
app = typer.Typer(
    help=f"Speculative generation: a draft model writes, the target verifies every prefix in one pass.\n\n{_EXAMPLES}",
    **APP_OPTIONS,
)
app.callback()(with_version)
for command in (demo, generate, score, serve, bench, calibrate, transfer, advise, cost, plan):
    add_command(app, command)
add_command(app, evaluate, "eval")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for a user error)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run_app(app, "parse-infer", argv)


if __name__ == "__main__":
    sys.exit(main())
