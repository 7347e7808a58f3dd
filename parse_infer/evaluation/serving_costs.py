"""Measured costs of a pair on servers: what `parse-infer plan` reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from parse_infer.errors import SettingsError
from parse_infer.files import read_json

_OF_ANSWERS = ("draft_tokens", "kept_tokens", "target_tokens", "prompt_tokens", "answer_tokens")
COSTS_HINT = "write it with `parse-infer cost --output`"


@dataclass(frozen=True)
class Curve:
    """Seconds per token by the number of running requests."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, name: str, value: Any) -> Curve:
        """Read a number (of one request), or a mapping from loads. Raises SettingsError."""
        try:
            items = value.items() if isinstance(value, Mapping) else [(1, value)]
            points = tuple(sorted((float(load), float(seconds)) for load, seconds in items))
        except (TypeError, ValueError):
            points = ()
        if not points or not all(load >= 1 and 0 < seconds < math.inf for load, seconds in points):
            raise SettingsError(
                f'{name} is {value!r}: give seconds per token by load, such as {{"1": 0.01, "8": 0.02}}'
            )
        return cls(points)

    def at(self, load: float) -> float:
        points = self.points
        if load >= points[-1][0]:
            return points[-1][1] * load / points[-1][0]
        for (low, before), (high, after) in pairwise(points):
            if load <= high:
                return before + (after - before) * max(0.0, load - low) / (high - low)
        return points[0][1]


def _lengths(found: Any) -> tuple[float, ...]:
    if not isinstance(found, list) or not all(isinstance(n, (int, float)) and 1 <= n < math.inf for n in found):
        raise SettingsError(f"answer_lengths is {found!r}: give a list of numbers of tokens, each at least 1")
    return tuple(map(float, found))


@dataclass(frozen=True)
class Costs:
    """Costs of a pair and its requests, as `parse-infer cost --output` and `tools.measure_servers` write them.

    Attributes:
        target_token_s, draft_token_s: seconds per token that one request of n on a server writes.
        read_token_s: seconds per token that the target reads.
        draft_tokens: tokens of a draft.
        kept_tokens: mean number of its first tokens that the target keeps.
        target_tokens: tokens that the target writes after a draft.
        prompt_tokens, answer_tokens: mean lengths.
        answer_lengths: lengths of measured answers, whose mean is `answer_tokens`; empty: exponential around it.
        parse_token_s: seconds per token of one of n answers with PARSE, where both models share a server; None: what
            the other costs add up to.
    """

    target_token_s: Curve
    draft_token_s: Curve
    read_token_s: Curve
    draft_tokens: float
    kept_tokens: float
    answer_tokens: float
    prompt_tokens: float = 0.0
    target_tokens: float = 1.0
    answer_lengths: tuple[float, ...] = ()
    parse_token_s: Curve | None = None

    @classmethod
    def read(cls, path: str | Path, **given: float | None) -> Costs:
        """Read a file of costs; `given` numbers replace its own. Raises SettingsError or OSError."""
        return cls.of(read_json(Path(path), COSTS_HINT), str(path), **given)

    @classmethod
    def of(cls, held: dict[str, Any], path: str = "the costs", **given: float | None) -> Costs:
        """Read the content of such a file, called `path` in errors. Raises SettingsError."""
        given = {name: value for name, value in given.items() if value is not None}
        held = held | given
        if not given.keys().isdisjoint(_OF_ANSWERS):
            held.pop("parse_token_s", None)  # measured with others, and with the reads of their prompts
        if "answer_tokens" in given:
            held.pop("answer_lengths", None)
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name
            if name not in held and field.default is MISSING:
                option = "" if name.endswith("_s") else f", or --{name.replace('_', '-')}"
                raise SettingsError(f"{path} has no {name}: give it there{option}")
            if name not in held:
                continue
            if name == "answer_lengths":
                values[name] = _lengths(held[name])
            elif name.endswith("_s"):
                values[name] = Curve.of(name, held[name])
            else:
                value = held[name]
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise SettingsError(f"{name} is {value!r}: give a number of tokens")
                values[name] = float(value)
        costs = cls(**values)
        if costs.answer_tokens < 1 or costs.draft_tokens < 1:
            raise SettingsError("answer_tokens and draft_tokens must be at least 1")
        if costs.kept_tokens > costs.draft_tokens:
            raise SettingsError(f"kept_tokens ({costs.kept_tokens:g}) exceed draft_tokens ({costs.draft_tokens:g})")
        if costs.kept_tokens + costs.target_tokens <= 0:
            raise SettingsError("kept_tokens and target_tokens are both 0: no answer would grow")
        return costs

    @property
    def tokens_to_error(self) -> float:
        """Mean number of tokens of an endless draft before the first wrong one; 0 if nothing is kept."""
        block, kept = self.draft_tokens, self.kept_tokens
        if not kept:
            return 0.0
        low, high = kept, 1e6 * block
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if middle * -math.expm1(-block / middle) < kept else (low, middle)
        return low
