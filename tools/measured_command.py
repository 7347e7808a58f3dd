"""Command line of a measurement: a recipe, overrides of its keys, and options of the measurement."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from data_tools.recipe_parser import parse_recipe
from parse_train.judge.probe.config import ValidityTrainingConfig


def run_measurement(
    argv: Sequence[str] | None, command: str, example: str, options: type, run: Callable[[Any, Any, list[str]], None]
) -> int:
    """Call `run(recipe, options, arguments)` and return the exit code, 2 for a user error.

    Args:
        argv: arguments; None: those of the process.
        command: the command before the recipe.
        example: valid arguments, for the error message.
        options: dataclass of the measurement's options.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0].startswith("-"):
            raise ValueError(f"name a recipe first: {command} {example}")
        config, how = parse_recipe(arguments[0], arguments[1:], [ValidityTrainingConfig, options], command)
        run(config, how, arguments)
    except (ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
