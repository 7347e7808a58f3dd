"""Command-line options from the fields of `GenerationSettings`: their names, help texts, bounds and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from parse_infer.cli.expand import KIND, Command, expand_parameter
from parse_infer.settings.fields import SettingField, setting_fields
from parse_infer.settings.generation import DRAFT_TEMPERATURE, GenerationSettings
from parse_infer.settings.sampling import Sampling

_LISTS = [one.name for one in setting_fields(GenerationSettings).values() if one.default == ()]
_NUMBERS_OR_CHOICES = [one.name for one in setting_fields(GenerationSettings).values() if one.is_number_or_choice]
# Each Sampling field is an option of its own, for both models (`GenerationSettings.override`).
SAMPLING = ("draft_sampling", "resume_sampling")


def option_of(name: str) -> OptionInfo:
    """The typer option of one setting, for a command that spells out its type and default."""
    return _option(setting_fields(GenerationSettings)[name])


def number_or_choice(text: str) -> Any:
    """Read a whole number; return other texts, which the dataclass checks."""
    return int(text) if text.strip().isdecimal() else text.strip()


def with_settings(without: Collection[str] = (), **defaults: object) -> Callable[[Command], Command]:
    """Replace a command's parameter `settings: GenerationSettings` by one option per field.

    Args:
        without: fields that are not offered.
        defaults: other defaults than those of the dataclass.
    """
    offered = [one for name, one in setting_fields(GenerationSettings).items() if name not in without]
    parameters = [_parameter(one, defaults) for one in offered if one.name not in SAMPLING]
    samples = not {*SAMPLING} & {*without}
    if samples:
        parameters += [_parameter(one, defaults) for one in setting_fields(Sampling).values()]
        text = "Sampling temperature of the draft model; default: --temperature."
        parameters.append(_keyword(DRAFT_TEMPERATURE, float | None, typer.Option(help=text), None))

    def build(**values: Any) -> GenerationSettings:
        values |= {name: tuple(values[name] or ()) for name in _LISTS if name in values}
        values |= {name: number_or_choice(values[name]) for name in _NUMBERS_OR_CHOICES if name in values}
        return GenerationSettings.of(values)

    return expand_parameter("settings", parameters, build)


def _parameter(one: SettingField, defaults: dict[str, object]) -> inspect.Parameter:
    if one.name in _LISTS:  # a repeatable option
        item = one.hint.__args__[0]
        return _keyword(one.name, list[item] | None, _option(one), None)  # type: ignore[valid-type]
    kind = str if one.choices else one.hint
    return _keyword(one.name, kind | None if one.optional else kind, _option(one), defaults.get(one.name, one.default))


def _keyword(name: str, kind: object, option: OptionInfo, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, KIND, default=default, annotation=Annotated[kind, option])


def _option(one: SettingField) -> OptionInfo:
    """The option of a field. The dataclass checks choices and shares, in one sentence with the way out."""
    text = f"{one.help.removesuffix('.')}; repeatable." if one.name in _LISTS else one.help
    minimum = one.bounds.get("ge") if one.hint is int else None
    values = (*one.choices, "N") if one.is_number_or_choice else one.choices
    return typer.Option(min=minimum, metavar="|".join(values) or None, help=text)
