"""`Sampling`: sampling settings of one decode, without torch (`parse_infer.models.token_sampling` samples)."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from numbers import Real
from typing import cast

from parse_infer.errors import SettingsError
from parse_infer.settings.fields import plain, setting, setting_fields

_GREEDY = 1e-5  # lower temperatures would overflow the logits
_HIGHEST = 1_000_000  # far above, float32 has no such number


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed that depends on the text of all parts."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one decode.

    Raises:
        ValueError: a value outside its range.
    """

    # A value below 1e-5 is greedy too, as in vLLM.
    temperature: float = setting(0.0, "Sampling temperature of the target; 0 is greedy.", ge=0)
    top_p: float = setting(
        1.0, "Sample from the smallest set of most likely tokens with at least this total probability.", gt=0, le=1
    )
    top_k: int = setting(0, "Sample from this many most likely tokens; 0: from all.", ge=0)
    seed: int | None = setting(None, "Seed of the sampling; default: PyTorch's global generator.")

    def __post_init__(self) -> None:
        for name in setting_fields(type(self)):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not _is_finite(self.temperature) or not 0 <= self.temperature <= _HIGHEST:
            raise SettingsError(
                f"temperature must be a number from 0 (greedy) to {_HIGHEST:,}, not {self.temperature!r}"
            )
        if not _is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must be a number above 0 and at most 1, not {self.top_p!r}")
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise SettingsError(f"top_k must be a whole number of at least 0 (0 keeps all tokens), not {self.top_k!r}")
        object.__setattr__(self, "top_k", int(self.top_k))
        if self.seed is not None:
            if not _is_whole(self.seed) or not -(2**63) <= self.seed < 2**63:
                raise SettingsError(f"seed must be a whole number of at most 63 bits or None, not {self.seed!r}")
            object.__setattr__(self, "seed", int(self.seed))

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY

    def draws_like(self, other: Sampling) -> bool:
        """Whether both draw from the same distribution."""
        return (self.greedy and other.greedy) or replace(self, seed=None) == replace(other, seed=None)

    def __str__(self) -> str:
        """ "greedy answers", or the temperature and what truncates the distribution."""
        if self.greedy:
            return "greedy answers"
        given = [f"temperature {self.temperature:g}"]
        given += [f"top_p {self.top_p:g}"] if self.top_p < 1 else []
        given += [f"top_k {self.top_k}"] if self.top_k else []
        return ", ".join(given)


def _is_finite(value: object) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and abs(cast("float", value)) <= sys.float_info.max  # NaN is not


def _is_whole(value: object) -> bool:
    return _is_finite(value) and int(value) == value  # type: ignore[call-overload]


GREEDY = Sampling()
