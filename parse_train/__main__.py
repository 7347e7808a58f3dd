"""Run a training recipe: `accelerate launch RECIPE [--key value …]`.

Equivalent: `torchrun RECIPE`, `python RECIPE` and `./RECIPE` (see `parse_train.recipe_hook`),
`python -m parse_train RECIPE`, `accelerate launch -m parse_train RECIPE`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Sequence

import parse_infer
from parse_infer.errors import ParseError
from parse_infer.files import writing
from parse_infer.optional_dependencies import missing_package
from parse_train.recipe import load_recipe, recipes

PLAN = "--plan"
USAGE = f"""usage: accelerate launch RECIPE [--key value ...]
       parse-train RECIPE [--key value ...]      (or python -m parse_train)
       parse-train RECIPE --plan

RECIPE is a YAML file whose key `recipe` is one of: {", ".join(recipes())}.
Its other keys are the fields of that recipe's configuration. The option --key overrides the key of the same name.
`python RECIPE --help` lists all keys. --plan prints memory and time and loads no weights; it takes a recipe of
`parse-data build` too. PARSE_TRACEBACK=1 prints the traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe named by the first argument, and return the exit code (2 for a user error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"], ["--version"]):
        print(parse_infer.__version__ if arguments == ["--version"] else USAGE)
        return 0
    try:
        if not arguments or arguments[0].startswith("-"):
            raise ParseError("name a recipe first: accelerate launch recipes/train.yaml [--key value ...]")
        if PLAN in arguments:
            _print_plan(arguments[0], [argument for argument in arguments[1:] if argument != PLAN])
            return 0
        _before_group()
        run, config = load_recipe(arguments[0], arguments[1:])
        with writing(config.output_dir):
            run(config)
        _leave_group()
    except (ModuleNotFoundError, ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        sentence = missing_package(error) if isinstance(error, ModuleNotFoundError) else str(error)
        # Every process of a distributed run prints its error, because only one process may detect the error.
        rank = os.environ.get("RANK", "0")
        whose = "error" if rank == "0" else f"error (process {rank})"
        print(f"{whose}: {sentence}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes the training", file=sys.stderr, flush=True)
        return 130
    return 0


def _print_plan(recipe: str, overrides: Sequence[str]) -> None:
    """Print memory and time of the recipe, in the first process only."""
    from parse_train.training_plan import load_config_of, plan_training  # imported here to keep other commands fast

    if os.environ.get("RANK", "0") == "0":
        print("\n".join(plan_training(load_config_of(recipe, overrides)).lines()))


def _before_group() -> None:
    """Import modules that would keep a process group alive if imported after the group's creation.

    Functions of these modules bind the current group as a default argument. Threads of a group that outlives Python
    sometimes abort the process after all work is done.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        importlib.import_module(
            "torch.distributed.nn.functional"
        )  # torch imports it with the first DistributedDataParallel
        if importlib.util.find_spec("deepspeed"):
            importlib.import_module("deepspeed.comm.torch")


def _leave_group() -> None:
    """Collect Trainers, whose reference cycles refer to the process group, and end the group with its threads.

    In this order: a DistributedDataParallel that drops the last reference to the group does so with the GIL, and waits
    for ever for a thread of the group that needs the GIL to release its last tensors.
    """
    from torch import distributed  # imported here to keep --help fast

    if distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
