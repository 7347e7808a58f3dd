"""`ApiSettings`: what an operator chooses about the API of one server."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from parse_infer.serve.admission import Limits
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
    api_key: str | None = None
    """API key that clients must send; None: no key."""
    model: str | None = None
    """Served name of the target; None: its own name."""
    risk_settings: RiskSettings = field(default_factory=RiskSettings)
    adaptive: bool = False
    """Default of `GenerationSettings.adaptive`."""
    strict: bool = False
    """Reject unknown fields instead of ignoring them with a warning."""
    generation_config: bool = True
    """Take sampling defaults from the target's generation config; False: greedy."""
    metrics: bool = True
    """Have `/metrics` among the routes; False: it has a port of its own."""
