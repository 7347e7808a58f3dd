"""`ApiSettings`: what an operator chooses about the API of one server."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parse_infer.serve.admission import Limits
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.settings.generation import GenerationSettings


@dataclass(frozen=True)
class RiskSettings:
    """The default risk of a server, and its audit rate."""

    risk: float | None = None
    """Default risk of requests that the calibration covers."""
    audit: float = 0.0
    """Share of the answers under a risk promise that are compared with the target's own."""
    same: Callable[[str, str], bool] = operator.eq
    """Whether two texts give the same final answer."""

    @property
    def expected(self) -> GenerationSettings:
        """Settings of a request with all defaults and no token limit."""
        return GenerationSettings(1 << 31, risk=self.risk)


@dataclass(frozen=True)
class ApiSettings:
    """Limits, access and the defaults of requests."""

    limits: Limits = field(default_factory=Limits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    """API keys that clients must send. Without any, requests need no key."""
    model: str | None = None
    """Served name of the target; None: its own name."""
    risk_settings: RiskSettings = field(default_factory=RiskSettings)
    adaptive: bool = False
    """Default of `GenerationSettings.adaptive`."""
    strict_tokens: int | None = None
    strict_answer: bool = False
    """Defaults of these `GenerationSettings`, except for requests with a `risk`."""
    strict: bool = False
    """Reject unknown fields instead of ignoring them with a warning."""
    generation_config: bool = True
    """Take sampling defaults from the target's generation config; False: greedy."""
    metrics: bool = True
    """Have `/metrics` among the routes; False: it has a port of its own."""

    @property
    def strict_defaults(self) -> dict[str, Any]:
        """Defaults about tokens that are the target's own."""
        return {"strict_tokens": self.strict_tokens, "strict_answer": self.strict_answer}
