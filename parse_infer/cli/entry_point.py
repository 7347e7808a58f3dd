"""Run a typer app: exit codes, and errors as one sentence on standard error."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parse_infer.optional_dependencies import missing_package

# Of every typer.Typer here.
APP_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # options as recipes spell them are the same
    },
}
# typer does not export this class, and its module has moved between versions.
_ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
_INTERRUPTED = 130  # exit code, as of shells


def _show_version(requested: bool) -> None:
    if requested:
        import parse_infer

        print(parse_infer.__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


def with_version(version: Version = False) -> None:
    """The callback of an app: `--version`."""


def add_command(
    app: typer.Typer,
    command: Callable[..., None],
    name: str | None = None,
    *,
    text: str | None = None,
    context_settings: dict[str, Any] | None = None,
) -> None:
    """Add a command. The list of commands shows the whole first paragraph of its help.

    Args:
        text: help of the command; default: the docstring of the function.
    """
    text = inspect.getdoc(command) or "" if text is None else text
    short = " ".join(text.partition("\n\n")[0].split())
    app.command(name, help=text, short_help=short, context_settings=context_settings)(command)


def run_app(app: typer.Typer, name: str, argv: Sequence[str] | None, interrupted: str = "interrupted") -> int:
    """Run the command line; returns the exit code (2 for a user error).

    Args:
        argv: arguments; None: those of the process.
        interrupted: printed after an interruption.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    in_full = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is UserWarning:
            return f"warning: {message}\n"
        return in_full(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        code = app(arguments or ["--help"], prog_name=name, standalone_mode=False)
        if code == _INTERRUPTED:  # typer makes this of an interruption
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print(interrupted, file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) closed the pipe
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        return 0
    except _ClickException as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]
    except (ModuleNotFoundError, ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        return _complain(_sentence(error))
    finally:
        warnings.formatwarning = in_full


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def _complain(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
