"""`ApiSettings`: what an operator chooses about the API of one server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parse_infer.serve.admission import Limits
from parse_infer.serve.api_keys import ApiKeys
from parse_infer.serve.audit import RiskSettings


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

    @property
    def strict_defaults(self) -> dict[str, Any]:
        """Defaults about tokens that are the target's own."""
        return {"strict_tokens": self.strict_tokens, "strict_answer": self.strict_answer}
