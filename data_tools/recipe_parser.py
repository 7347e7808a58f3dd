"""Read a recipe: a YAML file whose keys are the fields of a dataclass. Command-line options override the keys.

TRL's `TrlParser` parses. This module adds one-sentence errors that name the closest known key, rejects abbreviated
options, and checks the types in the file as argparse checks them on the command line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast, get_args, get_origin, get_type_hints

import yaml
from trl.scripts.utils import TrlParser

from parse_infer.errors import ParseError
from parse_infer.suggest import suggestion


class RecipeParser(TrlParser):
    """TRL's parser without abbreviated options; errors raise `ValueError`, and mappings are YAML text."""

    def __init__(self, dataclass_types: Iterable[type], recipe: str | Path, command: str) -> None:
        super().__init__(dataclass_types=cast(Any, dataclass_types), prog=f"{command} {recipe}", allow_abbrev=False)
        self.recipe = recipe
        self.types = {name: kind for cls in self.dataclass_types for name, kind in get_type_hints(cls).items()}
        for action in self._actions:
            if get_origin(self.types.get(action.dest)) is dict:
                action.type = mapping

    def error(self, message: str) -> NoReturn:
        raise ParseError(f"{self.recipe}: {message}")

    def check_values(self, values: dict[str, Any]) -> None:
        """Check recipe values as argparse checks options; replace, in place, a single value by a list where needed."""
        for action in self._actions:
            value = values.get(action.dest)
            if value is None:
                if action.dest in values and not self._takes(action, type(None)):
                    self.error(f"{action.dest} is empty: give it a value, or leave the key out")
                continue
            if action.nargs == "+":
                items = value if isinstance(value, list) else [value]
                try:
                    values[action.dest] = [self._get_value(action, str(item)) for item in items]
                except argparse.ArgumentError as error:
                    self.error(str(error))
            elif isinstance(value, list | dict):
                if not self._takes(action, type(value)):
                    self.error(f"{action.dest} is {value!r}; it takes one value")
            elif action.choices is not None and value not in action.choices:
                self.error(f"{action.dest} is {value!r}; choose one of {', '.join(map(str, action.choices))}")

    def _takes(self, action: argparse.Action, kind: type) -> bool:
        """Whether the type of the action's field allows a value of type `kind`."""
        hint = self.types.get(action.dest)
        return any((get_origin(each) or each) is kind for each in (hint, *get_args(hint)))

    def known_keys(self) -> list[str]:
        return sorted({action.dest for action in self._actions} - {"help"})


def parse_recipe(path: str | Path, overrides: Sequence[str], types: Sequence[type], command: str) -> tuple[Any, ...]:
    """Return one instance of each dataclass in `types`, from the recipe at `path` and `--key value` overrides.

    A mapping under the key `env` sets environment variables, as in TRL. `command` appears in the help text.

    Raises:
        FileNotFoundError: the recipe does not exist.
        ValueError: no YAML mapping, an unknown key (the error names the closest known key), or a wrong type.
    """
    values = read_recipe(path)
    values.pop("recipe", None)  # `parse_train` reads the kind of recipe
    environment = values.pop("env", None) or {}
    if not isinstance(environment, dict):
        raise ParseError(f"{path}: env must be a mapping of variable names to values, not {environment!r}")
    os.environ.update({str(key): str(value) for key, value in environment.items()})
    parser = RecipeParser(types, path, command)
    # argparse checks types of strings only, so numbers are passed as strings.
    as_text = {
        key: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in values.items()
    }
    unused = parser.set_defaults_with_config(**as_text)
    _refuse_unknown(parser, path, unused[::2])
    parser.check_values(as_text)
    parser.set_defaults_with_config(**as_text)
    _, rest = parser.parse_known_args(list(overrides))
    _refuse_unknown(parser, "command line", [word.split("=")[0] for word in rest if word.startswith("--")])
    if rest:
        raise ParseError(f"command line: {rest[0]!r} follows no option; write --key value")
    return parser.parse_args_into_dataclasses(args=list(overrides), look_for_args_file=False)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Return the YAML mapping at `path`; raise FileNotFoundError, or ValueError with the line number."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no recipe {path}; the project's own recipes are in the folder recipes/")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ParseError(f"{path} is not valid YAML{where}: {getattr(error, 'problem', error)}") from error
    if not isinstance(values, dict):
        raise ParseError(f"{path} must be a YAML mapping of keys to values, for example `margin: 0.25`")
    return {str(key): value for key, value in values.items()}


def _refuse_unknown(parser: RecipeParser, where: str | Path, keys: Sequence[str]) -> None:
    for key in keys:
        name = key.lstrip("-").replace("-", "_")
        raise ParseError(f"{where}: unknown key {name}; {suggestion(name, parser.known_keys())}")


def mapping(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise ParseError(text)
    return value
