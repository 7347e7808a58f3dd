"""Judges without training, by name: `judge="min_p:ratio=0.3"`, or `--judge min_p:ratio=0.3`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import SettingsError
from parse_infer.judge.judge import Judge
from parse_infer.judge.min_p import MinP
from parse_infer.judge.zero_shot import ZeroShot
from parse_infer.suggest import suggestion


class Rule(Protocol):
    """A dataclass whose fields are the options of a judge, numbers with defaults."""

    def load(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> Judge:
        """Make the judge of a target. Over servers there is no `model`."""
        ...


RULES: dict[str, type[Rule]] = {"min_p": MinP, "zero_shot": ZeroShot}


def find_rule(judge: str | None, adapter: str | Path | None = None) -> Rule | None:
    """Read `NAME[:KEY=VALUE,…]`; None for None.

    Raises:
        ValueError: an unknown name or key, a value out of range, or an adapter besides.
    """
    if judge is None:
        return None
    if not isinstance(judge, str):
        raise SettingsError(f"judge is {judge!r}; give a name such as 'min_p:ratio=0.3', or use from_models.")
    if adapter is not None:
        raise SettingsError(f"adapter {str(adapter)!r} and judge {judge!r} were both given: choose one")
    name, _, given = judge.partition(":")
    if name not in RULES:
        raise SettingsError(f"{name!r} is not a judge; {suggestion(name, RULES)}")
    known = [field.name for field in fields(RULES[name])]  # type: ignore[arg-type]
    options: dict[str, float] = {}
    for pair in filter(None, given.split(",")):
        key, _, value = pair.partition("=")
        if key not in known:
            hint = suggestion(key, known) if known else "it has no options"
            raise SettingsError(f"{key!r} is no option of the judge {name}; {hint}")
        if key in options:
            raise SettingsError(f"{key} of the judge {name} was given twice: give one")
        try:
            options[key] = float(value)
        except ValueError as error:
            raise SettingsError(f"{key} of the judge {name} is {value!r}; it must be a number") from error
    return RULES[name](**options)
