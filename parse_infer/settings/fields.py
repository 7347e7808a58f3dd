"""Fields of settings dataclasses: each carries its help text and bounds, for Python, command line and HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from parse_infer.errors import SettingsError

T = TypeVar("T")


def setting(default: T, text: str, **bounds: float) -> T:
    """Define a dataclass field with a help text and bounds (`ge`, `gt`, `le`, `lt`, as in pydantic)."""
    return field(default=default, metadata={"help": text, "bounds": bounds})


def plain(value: object) -> object:
    """Return a scalar of NumPy or PyTorch as Python's own; other values unchanged."""
    is_scalar = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
    return cast(Any, value).item() if is_scalar else value


@dataclass(frozen=True)
class SettingField:
    """Description of one setting.

    Attributes:
        hint: type, without None.
        optional: whether None is allowed.
        bounds: see `setting`.
    """

    name: str
    hint: Any
    optional: bool
    default: object
    help: str
    bounds: dict[str, Any]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a Literal, or of one in a union with int; else ()."""
        kinds = (self.hint, *get_args(self.hint))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def is_number_or_choice(self) -> bool:
        """Whether the type is a union of int and a Literal."""
        return bool(self.choices) and int in get_args(self.hint)

    def check(self, value: object) -> None:
        """Check a choice, a whole number or a bool; other types have their own checks. Raises SettingsError."""
        if value is None and self.optional:
            return
        known = ", ".join(self.choices)
        if self.is_number_or_choice:
            if value in self.choices or (type(value) is int and value >= self.bounds["ge"]):
                return
            raise SettingsError(
                f"{self.name} is {value!r}; it must be a whole number of at least {self.bounds['ge']}, or one of: "
                f"{known}."
            )
        if self.choices and value not in self.choices:
            raise SettingsError(f"{self.name} is {value!r}; it must be one of: {known}.")
        if self.hint is bool and not isinstance(value, bool):
            raise SettingsError(f"{self.name} is {value!r}; it must be True or False.")
        if self.hint is int:
            minimum = self.bounds["ge"]
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise SettingsError(f"{self.name} is {value!r}; it must be a whole number of at least {minimum}.")


def setting_fields(settings: type) -> dict[str, SettingField]:
    """Describe the fields of a settings dataclass, by name and in order."""
    return _described(settings)


@cache
def _described(settings: type) -> dict[str, SettingField]:
    hints, found = get_type_hints(settings), {}
    for one in fields(settings):
        types = get_args(hints[one.name])
        optional = NoneType in types
        hint = next(kind for kind in types if kind is not NoneType) if optional else hints[one.name]
        found[one.name] = SettingField(
            one.name, hint, optional, one.default, one.metadata["help"], one.metadata["bounds"]
        )
    return found
