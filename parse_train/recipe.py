"""Read a recipe: a YAML file whose keys are the fields of a dataclass, each overridable on the command line."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin, get_type_hints

import yaml
from trl.scripts.utils import TrlParser

# Each module has `main(config: ItsConfig)`; the annotation names the dataclass whose fields the recipe may set.
RECIPES = {
    "validity": "parse_train.validity",
    "language_model": "parse_train.language_model",
    "tokenizer": "parse_train.tokenizer",
}


class RecipeParser(TrlParser):
    """TRL's parser with complete option names, mistakes raised as `ValueError`, and mappings as YAML text."""

    def __init__(self, dataclass_types: Iterable[Any], recipe: str | Path) -> None:
        super().__init__(dataclass_types=dataclass_types, prog=f"python -m parse_train {recipe}", allow_abbrev=False)
        self.recipe = recipe
        types = {name: kind for cls in self.dataclass_types for name, kind in get_type_hints(cls).items()}
        for action in self._actions:
            if get_origin(types.get(action.dest)) is dict:
                action.type = _mapping

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.recipe}: {message}")

    def check_choices(self, values: dict[str, Any]) -> None:
        """What argparse checks on the command line only. A single value stands for a list of one (in place)."""
        for action in self._actions:
            value = values.get(action.dest)
            if action.nargs == "+" and value is not None and not isinstance(value, list):
                values[action.dest] = [value]
            elif action.choices is not None and action.dest in values and value not in action.choices:
                choices = ", ".join(map(str, action.choices))
                self.error(f"{action.dest} is {value!r}; choose one of {choices}")

    def known_keys(self) -> list[str]:
        return sorted({action.dest for action in self._actions} - {"help"})


def _mapping(text: str) -> dict[str, Any]:
    value = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The YAML mapping at `path`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not YAML (names the line), or not a mapping.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no recipe {path}; the package's own recipes are in the folder recipes/")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path} is not valid YAML{where}: {getattr(error, 'problem', error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a YAML mapping of keys to values, for example `learning_rate: 1.0e-3`")
    return values


def parse_recipe(path: str | Path, overrides: Sequence[str], types: Sequence[type]) -> tuple[Any, ...]:
    """One instance of each of the dataclasses `types`, from the recipe at `path` and `--key value` overrides.

    A mapping under the key `env` sets environment variables, as in TRL.

    Raises:
        ValueError: an unknown key (names the closest known one), or a value of the wrong type.
    """
    values = read_recipe(path)
    values.pop("recipe", None)
    environment = values.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"{path}: env must be a mapping of variable names to values, got {environment!r}")
    os.environ.update({key: str(value) for key, value in environment.items()})
    parser = RecipeParser(types, path)
    # argparse checks the types of strings alone, so numbers go in as text.
    numbers_as_text = {
        key: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in values.items()
    }
    parser.check_choices(numbers_as_text)
    unused = parser.set_defaults_with_config(**numbers_as_text)
    _refuse_unknown(parser, path, unused[::2])
    *configs, rest = parser.parse_args_into_dataclasses(
        args=list(overrides), return_remaining_strings=True, look_for_args_file=False
    )
    _refuse_unknown(parser, "command line", [word.split("=")[0] for word in rest if word.startswith("-")])
    if rest:
        raise ValueError(f"command line: {rest[0]!r} belongs to no key; write --key value")
    return tuple(configs)


def _refuse_unknown(parser: RecipeParser, where: str | Path, keys: Sequence[str]) -> None:
    for key in keys:
        name = key.lstrip("-").replace("-", "_")
        raise ValueError(f"{where}: unknown key {name}; did you mean {closest(name, parser.known_keys())}?")


def closest(name: str, known: Sequence[str]) -> str:
    """The entry of `known` most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def load_recipe(path: str | Path, overrides: Sequence[str]) -> tuple[Callable[[Any], None], Any]:
    """The `main` of the recipe at `path` and the configuration to call it with."""
    kind = read_recipe(path).get("recipe")
    if kind is None:
        raise ValueError(f"{path} needs the key recipe, one of {', '.join(RECIPES)}")
    if kind not in RECIPES:
        raise ValueError(f"{path}: unknown recipe {kind}; did you mean {closest(str(kind), list(RECIPES))}?")
    main = importlib.import_module(RECIPES[kind]).main
    (config,) = parse_recipe(path, overrides, [get_type_hints(main)["config"]])
    return main, config
