"""`ApiSettings`: what an operator chooses about the API of one server."""

from __future__ import annotations

from dataclasses import dataclass, field

from parse_infer.serve.admission import Limits
from parse_infer.serve.audit import RiskSettings


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
