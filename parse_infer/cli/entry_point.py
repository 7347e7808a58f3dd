"""Run a typer app: exit codes, and errors as one sentence on standard error."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from parse_infer.optional_dependencies import missing_package

# Of every typer.Typer here.
APP_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
# typer does not export this class, and its module has moved between versions.
_ClickException: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def run_app(app: typer.Typer, name: str, argv: Sequence[str] | None, interrupted: str = "") -> int:
    """Run the command line; returns the exit code (2 for a user error).

    Args:
        argv: arguments; None: those of the process.
        interrupted: printed after an interruption.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    in_full = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
        return f"warning: {message}\n" if category is UserWarning else in_full(message, category, *place)

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        code = app(arguments or ["--help"], prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        if interrupted:
            print(interrupted, file=sys.stderr)
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
