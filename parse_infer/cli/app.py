"""The command line: `parse-infer demo | generate | score | serve | bench | eval | calibrate | cost`.

A user error prints `error: <sentence>` on standard error and exits with code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from parse_infer.cli.commands.bench import bench
from parse_infer.cli.commands.calibrate import calibrate
from parse_infer.cli.commands.cost import cost
from parse_infer.cli.commands.demo import demo
from parse_infer.cli.commands.eval import evaluate
from parse_infer.cli.commands.generate import generate
from parse_infer.cli.commands.score import score
from parse_infer.cli.commands.serve import serve
from parse_infer.optional_dependencies import missing_package

_EXAMPLES = """
Examples:

\b
  parse-infer demo
  parse-infer generate "A box holds 12 pens. How many pens are in 7 boxes?"
  parse-infer serve --port 8000
  parse-infer bench --limit 50 --out runs/bench
  parse-infer eval --tasks gsm8k --limit 50
"""
app = typer.Typer(
    help=f"Speculative generation: a draft model writes, the target verifies every prefix in one pass.\n\n{_EXAMPLES}",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, score, serve, bench, calibrate, cost):
    app.command()(command)
app.command("eval")(evaluate)
# typer does not export this class, and its module has moved between versions.
_ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for a user error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        code = app(arguments or ["--help"], prog_name="parse-infer", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader (head, less) closed the pipe
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        return 0
    except _ClickException as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]
    except (ModuleNotFoundError, ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        return _complain(_sentence(error))


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def _complain(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
