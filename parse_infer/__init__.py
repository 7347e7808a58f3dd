"""PARSE: a draft model writes the answer, the target checks the meaning of every prefix in one forward pass.

    from parse_infer import ParseEngine
    engine = ParseEngine.from_pretrained("zoo:target", draft="zoo:draft", adapter="zoo:adapter")
    print(engine.generate("…").text)

Names are imported on first use, so that `import parse_infer` (and `parse-infer --help`) costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parse_infer.coordinator.engine import Coordinator
    from parse_infer.engine import ParseEngine
    from parse_infer.generation import Generation, GenerationSettings, Score, Span, Statistics
    from parse_infer.models.decoder import Decoder
    from parse_infer.models.prompts import Verbatim
    from parse_infer.models.sampling import Sampling
    from parse_infer.policy import maximal_valid_prefix
    from parse_infer.verify.segments import CutPolicy, Segmenter
    from parse_infer.verify.trained_judge import ValidityAdapter, ValidityConfig
    from parse_infer.verify.verifier import Verification, Verifier
    from parse_infer.verify.zero_shot_judge import ZeroShotJudge

_MODULES = {
    "Coordinator": "coordinator.engine",
    "CutPolicy": "verify.segments",
    "Decoder": "models.decoder",
    "Generation": "generation",
    "GenerationSettings": "generation",
    "ParseEngine": "engine",
    "Sampling": "models.sampling",
    "Score": "generation",
    "Segmenter": "verify.segments",
    "Span": "generation",
    "Statistics": "generation",
    "ValidityAdapter": "verify.trained_judge",
    "ValidityConfig": "verify.trained_judge",
    "Verbatim": "models.prompts",
    "Verification": "verify.verifier",
    "Verifier": "verify.verifier",
    "ZeroShotJudge": "verify.zero_shot_judge",
    "maximal_valid_prefix": "policy",
}

__all__ = [
    "Coordinator",
    "CutPolicy",
    "Decoder",
    "Generation",
    "GenerationSettings",
    "ParseEngine",
    "Sampling",
    "Score",
    "Segmenter",
    "Span",
    "Statistics",
    "ValidityAdapter",
    "ValidityConfig",
    "Verbatim",
    "Verification",
    "Verifier",
    "ZeroShotJudge",
    "maximal_valid_prefix",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'parse_infer' has no attribute {name!r}")
    value = getattr(import_module(f"parse_infer.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
