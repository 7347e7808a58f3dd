"""Judges without training, by name: `judge="min_p:ratio=0.3"`, or `--judge min_p:ratio=0.3`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import ClassVar, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import SettingsError
from parse_infer.judge.judge import Judge
from parse_infer.judge.rules.accept_threshold import AcceptThreshold
from parse_infer.judge.rules.fly import FLy
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.rules.relaxed_acceptance import RelaxedAcceptance
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.judge.rules.typical_acceptance import TypicalAcceptance
from parse_infer.judge.zero_shot import ZeroShot
from parse_infer.suggest import suggestion


class Rule(Protocol):
    """A dataclass whose fields are the options of a judge, numbers with defaults.

    Attributes:
        summary: what the judge does, in one line.
    """

    summary: ClassVar[str]

    def load(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> Judge:
        """Make the judge of a target. Over servers there is no `model`."""
        ...


RULES: dict[str, type[Rule]] = {
    "min_p": MinP,
    "relaxed_acceptance": RelaxedAcceptance,
    "accept_threshold": AcceptThreshold,
    "typical_acceptance": TypicalAcceptance,
    "fly": FLy,
    "zero_shot": ZeroShot,
}


def find_rule(judge: str | None, adapter: str | Path | None = None) -> Rule | None:
    """Read `NAME[:KEY=VALUE,…]`; None for None.

    With an adapter the rule is a floor (`parse_infer.judge.floor`), so it must be a `TokenRule`.

    Raises:
        ValueError: an unknown name or key, a value out of range, or an adapter besides a judge that is no floor.
    """
    if judge is None:
        return None
    if not isinstance(judge, str):
        raise SettingsError(f"judge is {judge!r}; give a name such as 'min_p:ratio=0.3', or use from_models.")
    name, _, given = judge.partition(":")
    if name not in RULES:
        raise SettingsError(f"{name!r} is not a judge; {suggestion(name, RULES)}")
    if adapter is not None and not issubclass(RULES[name], TokenRule):
        raise SettingsError(
            f"adapter {str(adapter)!r} and judge {judge!r} were both given: choose one, or give a rule on tokens as "
            "the adapter's floor, such as min_p:ratio=0.01"
        )
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
