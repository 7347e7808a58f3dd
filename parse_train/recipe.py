"""Which module runs a recipe; reading one is `data_tools.recipe`'s work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from data_tools.recipe import closest, parse_recipe, read_recipe

# Each module has `main(config: ItsConfig)`; the annotation names the dataclass whose fields the recipe may set.
RECIPES = {
    "validity": "parse_train.validity",
    "language_model": "parse_train.language_model",
    "tokenizer": "parse_train.tokenizer",
    "eagle": "parse_train.eagle",
    "medusa": "parse_train.medusa",
}


def load_recipe(path: str | Path, overrides: Sequence[str]) -> tuple[Callable[[Any], None], Any]:
    """The `main` of the recipe at `path` and the configuration to call it with.

    Raises:
        FileNotFoundError, ValueError: as `data_tools.recipe.parse_recipe`, or no such kind of recipe.
    """
    kind = read_recipe(path).get("recipe")
    if kind is None:
        raise ValueError(f"{path} needs the key recipe, one of {', '.join(RECIPES)}")
    if kind not in RECIPES:
        raise ValueError(f"{path}: unknown recipe {kind}; did you mean {closest(str(kind), list(RECIPES))}?")
    main = importlib.import_module(RECIPES[kind]).main
    (config,) = parse_recipe(path, overrides, [get_type_hints(main)["config"]], "python -m parse_train")
    return main, config
