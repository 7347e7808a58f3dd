"""Registry of recipes and their modules. Python imports this file for every YAML file it runs, so imports are few."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

# Each module has `main(config: ...)`; the annotation names the dataclass whose fields the recipe sets.
RECIPES = {
    "logprob": "parse_train.judge.logprob.train",
    "stream": "parse_train.judge.stream.train",
    "draft_model": "parse_train.train_draft_model",
    "eagle": "parse_train.heads.train_eagle",
    "medusa": "parse_train.heads.train_medusa",
}


def recipes() -> dict[str, str]:
    """Return {kind: module}, including entry points of the group "parse_engine.recipes" in other packages."""
    from importlib.metadata import entry_points

    return RECIPES | {point.name: point.value for point in entry_points(group="parse_engine.recipes")}


def load_recipe(path: str | Path, overrides: Sequence[str]) -> tuple[Callable[[Any], None], Any]:
    """Return the `main` function of the recipe at `path` and its configuration.

    Raises:
        FileNotFoundError, ValueError: as `data_tools.recipe_parser.parse_recipe`, or an unknown kind of recipe.
    """
    from dataclasses import fields
    from typing import get_type_hints

    from data_tools.labels.build_config import BuildConfig
    from data_tools.recipe_parser import parse_recipe, read_recipe
    from parse_infer.errors import ParseError
    from parse_infer.suggest import suggestion

    values, known = read_recipe(path), recipes()
    kind = values.get("recipe")
    ours = values.keys() & {f.name for f in fields(BuildConfig)}
    if kind is None and 2 * len(ours) > len(values):  # most keys, as one may be misspelt
        raise ParseError(f"{path} is a recipe for data: parse-data build {path}")
    if kind is None:
        raise ParseError(f"{path} needs the key recipe, one of {', '.join(known)}")
    if str(kind) not in known:
        raise ParseError(f"{path}: unknown recipe {kind}; {suggestion(str(kind), known)}")
    main = importlib.import_module(known[kind]).main
    (config,) = parse_recipe(path, overrides, [get_type_hints(main)["config"]], "accelerate launch")
    return main, config
