"""Pages of the documentation that are built from the code: command line, recipes, Python, spellings, errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from transformers import TrainingArguments

import parse_infer
from data_tools import cli as parse_data
from data_tools.labels.build_config import BuildConfig
from parse_infer.backends.local.options import LocalOptions
from parse_infer.backends.servers.options import ServerOptions
from parse_infer.cli import app as parse_infer_app
from parse_infer.serve.protocol.chat import ChatBody
from parse_infer.serve.protocol.fields import ParseOptions
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_train.__main__ import USAGE
from parse_train.recipe import recipes
from tools.docs_errors import errors_page, escape

# Where a command, a request or a recipe has another word for an argument of Python.
COMMAND_LINE = {
    "template_options": "--template-option",
    "api_key": "--server-key",
    "draft_api_key": "--draft-key",
    "draft_sampling": "--draft-temperature",
}
REQUEST = {
    "max_new_tokens": "max_completion_tokens, max_tokens",
    "template_options": "chat_template_kwargs",
    "draft_sampling": "parse.draft_temperature",
    "draft_text": "parse.draft_text, prediction",
}
RECIPE = {
    "max_new_tokens": "max_draft_tokens, max_rollout_tokens",
    "parallel": "concurrency",
    "temperature": "temperatures, rollout_temperature",
    "top_p": "draft_top_p, rollout_top_p",
}


def command_line() -> str:
    parts = []
    for name, app in (("parse-infer", parse_infer_app.app), ("parse-data", parse_data.app)):
        for command, content in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
            parts += [f"## {name} {command}", "", _help(content.help or ""), "", *_options(content)]
    return "\n".join([*parts, "## parse-train", "", "```", USAGE, "```", ""])


def _help(text: str) -> str:
    """The first paragraphs, and the rest, which keeps its lines, as a block."""
    text, _, rest = inspect.cleandoc(text).replace("\b", "").partition("\nExamples:\n")
    block = rest.partition("\nKeys of the recipe")[0].strip("\n")
    return text.strip() + (f"\n\n```\n{inspect.cleandoc(block)}\n```" if block else "")


def _options(command: Any) -> list[str]:
    lines = ["| option | default | |", "|---|---|---|"]
    for option in command.params:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        value = f" `{option.metavar}`" if option.metavar else ""
        default = "" if option.default in (None, False, "", ()) else f"`{option.default}`"
        if "--help" not in option.opts:
            lines.append(f"| {names}{value.replace('|', chr(92) + '|')} | {default} | {escape(option.help or '')} |")
    return [*lines, ""]


def recipe_keys() -> str:
    """Every key of every recipe but those of transformers' TrainingArguments, whose other defaults are listed."""
    parts = ["## Data: parse-data build", "", *_keys(BuildConfig)]
    for kind, module in recipes().items():
        config = get_type_hints(importlib.import_module(module).main)["config"]
        parts += [f"## recipe: {kind}", "", f"`{config.__module__}.{config.__name__}`", "", *_keys(config)]
    return "\n".join(parts)


def _keys(config: type) -> list[str]:
    theirs = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    lines, changed = ["| key | default | |", "|---|---|---|"], []
    for field in dataclasses.fields(config):
        default = "" if field.default is dataclasses.MISSING else field.default
        if field.name not in theirs:
            lines.append(f"| `{field.name}` | {_code(default)} | {escape(field.metadata.get('help', ''))} |")
        elif default != theirs[field.name].default:
            changed.append(f"`{field.name}` {_code(default)}")
    note = "All keys of transformers' `TrainingArguments` too, with other defaults for: " + ", ".join(changed) + "."
    return [*lines, "", note if issubclass(config, TrainingArguments) else "", ""]


def _code(value: object) -> str:
    text = str(value).replace("|", "\\|")
    return f"`{text}`" if text and value is not None else ""


def python_api() -> str:
    """The public names, for mkdocstrings."""
    return "\n\n".join(
        f"::: parse_infer.{parse_infer._MODULES[name]}.{name}"
        for name in ("ParseEngine", *(name for name in parse_infer.__all__ if name != "ParseEngine"))
    )


def spellings() -> str:
    """One line for each argument of Python that the command line, a request or a recipe has too."""
    commands = typer.main.get_command(parse_infer_app.app).commands.values()  # type: ignore[attr-defined]
    options = {name for command in commands for option in command.params for name in option.opts}
    keys = {field.name for field in dataclasses.fields(BuildConfig)}
    lines = ["| Python | command line | request to the server | recipe of data |", "|---|---|---|---|"]
    for name in _arguments():
        option = COMMAND_LINE.get(name, "--" + name.replace("_", "-"))
        field = f"parse.{name}" if name in ParseOptions.model_fields else name if name in ChatBody.model_fields else ""
        key = name if name in keys else ""
        cells = (option if option in options else "", REQUEST.get(name, field), RECIPE.get(name, key))
        if any(cells):
            coded = (", ".join(f"`{word}`" for word in cell.split(", ")) if cell else "" for cell in cells)
            lines.append(f"| `{name}` | {' | '.join(coded)} |")
    return "\n".join(lines)


def _arguments() -> list[str]:
    """Arguments of `ParseEngine.from_pretrained`, and of `generate`, once each."""
    models = inspect.signature(parse_infer.ParseEngine.from_pretrained).parameters
    classes = (LocalOptions, ServerOptions, GenerationSettings, Sampling)
    fields = [field.name for each in classes for field in dataclasses.fields(each)]
    return list(dict.fromkeys([*models, *fields, "draft_text"]))


BUILT: dict[str, Callable[[], str]] = {
    "command_line": command_line,
    "recipe_keys": recipe_keys,
    "python_api": python_api,
    "spellings": spellings,
    "errors": errors_page,
}
