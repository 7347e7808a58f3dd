"""PARSE: a draft model writes the answer, and the target verifies every prefix in one forward pass.

    from parse_infer import ParseEngine
    engine = ParseEngine.from_pretrained("zoo:target", draft="zoo:draft", adapter="zoo:adapter")
    print(engine.generate("…").text)

The package imports names on first use, so that `import parse_infer` and `parse-infer --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"  # of parse-engine and parse-engine-zoo

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine
    from parse_infer.errors import ParseError
    from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
    from parse_infer.judge.rules.rule import RuleJudge
    from parse_infer.judge.verifier import Verification, Verifier
    from parse_infer.judge.zero_shot import ZeroShotJudge
    from parse_infer.models.decoder import Decoder
    from parse_infer.models.loading import LanguageModel
    from parse_infer.request.output import Generation, Score, Span, Statistics
    from parse_infer.settings.acceptance import maximal_valid_prefix
    from parse_infer.settings.generation import GenerationSettings
    from parse_infer.settings.sampling import Sampling
    from parse_infer.text.cuts import CutPolicy, Segmenter
    from parse_infer.text.prompts import Verbatim

_MODULES = {
    "CutPolicy": "text.cuts",
    "Decoder": "models.decoder",
    "Generation": "request.output",
    "GenerationSettings": "settings.generation",
    "LanguageModel": "models.loading",
    "ParseEngine": "engine",
    "ParseError": "errors",
    "RuleJudge": "judge.rules.rule",
    "Sampling": "settings.sampling",
    "Score": "request.output",
    "Segmenter": "text.cuts",
    "Span": "request.output",
    "Statistics": "request.output",
    "ValidityAdapter": "judge.adapter",
    "ValidityConfig": "judge.adapter",
    "Verbatim": "text.prompts",
    "Verification": "judge.verifier",
    "Verifier": "judge.verifier",
    "ZeroShotJudge": "judge.zero_shot",
    "maximal_valid_prefix": "settings.acceptance",
}

__all__ = [
    "CutPolicy",
    "Decoder",
    "Generation",
    "GenerationSettings",
    "LanguageModel",
    "ParseEngine",
    "ParseError",
    "RuleJudge",
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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'parse_infer' has no attribute {name!r}")
    value = getattr(import_module(f"parse_infer.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
