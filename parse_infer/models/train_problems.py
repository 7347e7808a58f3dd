"""Hashes of the prompts that a model or a judge was trained on: lines of `train_problems.txt` in its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers.utils.hub import cached_file

from parse_infer.models.loading import find_model
from parse_infer.models.names import is_gguf

TRAIN_PROBLEMS = "train_problems.txt"


def write_train_problems(folder: Path, hashes: Iterable[str]) -> None:
    """Write the `prompt_hash` of every training prompt to the folder of a model or a judge."""
    (folder / TRAIN_PROBLEMS).write_text("".join(f"{one}\n" for one in sorted(set(hashes))), encoding="utf-8")


def read_train_problems(folder: Path) -> frozenset[str]:
    """Return the hashes that a folder lists; empty without a list."""
    path = folder / TRAIN_PROBLEMS
    return frozenset(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else frozenset()


def train_problems_of(*models: str | Path | None) -> frozenset[str]:
    """Return the hashes that models, their LoRAs and bases list, in local folders or on the Hugging Face Hub.

    Raises ValueError or OSError if a name is no language model; None is no model.
    """
    return frozenset[str]().union(*(_listed(model) for model in models if model is not None))


def _listed(model: str | Path) -> frozenset[str]:
    base, loras = find_model(model)
    folders = [lora.folder for lora in loras]
    if isinstance(base, Path):
        folders.append(base)
    elif not is_gguf(base):
        file = cached_file(
            base,
            TRAIN_PROBLEMS,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        folders += [Path(file).parent] if file else []
    return frozenset[str]().union(*map(read_train_problems, folders))
