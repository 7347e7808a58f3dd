"""Run a training recipe: `accelerate launch RECIPE [--key value …]`.

Also `torchrun RECIPE` and `python RECIPE` (see `parse_train.recipe_hook`), `python -m parse_train RECIPE`,
`accelerate launch -m parse_train RECIPE`, and a recipe as a program: `./RECIPE`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Sequence

from parse_infer.optional_dependencies import missing_package
from parse_train.recipe import load_recipe, recipes

USAGE = f"""usage: accelerate launch RECIPE [--key value ...]
       python -m parse_train RECIPE [--key value ...]

RECIPE is a YAML file whose key `recipe` is one of: {", ".join(recipes())}.
Its other keys are the fields of that recipe's configuration, and so are the --key options, which override them;
`python RECIPE --help` lists them all. PARSE_TRACEBACK=1 shows where an error arose."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe named by the first argument; returns the exit code (2 for a mistake of the user's)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        if not arguments or arguments[0].startswith("-"):
            raise ValueError("name a recipe first: accelerate launch recipes/train.yaml [--key value ...]")
        _before_group()
        run, config = load_recipe(arguments[0], arguments[1:])
        run(config)
        _leave_group()
    except (ModuleNotFoundError, ValueError, OSError) as error:
        if os.environ.get("PARSE_TRACEBACK"):
            raise
        sentence = missing_package(error) if isinstance(error, ModuleNotFoundError) else str(error)
        # Every process of a distributed run says so: the mistake may be visible to one of them alone.
        rank = os.environ.get("RANK", "0")
        whose = "error" if rank == "0" else f"error (process {rank})"
        print(f"{whose}: {sentence}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it can", file=sys.stderr, flush=True)
        return 130
    return 0


def _before_group() -> None:
    """Imports, before there is a process group, what would otherwise keep it alive to the end of the process.

    Functions of these modules have the group of the moment they are imported as a default argument, and a
    group's threads that outlive Python now and then end it with an abort, after all the work is done.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        importlib.import_module("torch.distributed.nn.functional")  # torch does with its first DistributedDataParallel
        if importlib.util.find_spec("deepspeed"):
            importlib.import_module("deepspeed.comm.torch")


def _leave_group() -> None:
    """Ends the process group with its threads; a Trainer, which is full of cycles, refers to it until collected."""
    from torch import distributed  # the recipe has imported it; --help need not

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()


if __name__ == "__main__":
    sys.exit(main())
