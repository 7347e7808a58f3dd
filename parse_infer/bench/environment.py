"""The models that a benchmark ran: part of its results, and of what must not change between two halves of a run."""

from __future__ import annotations

import hashlib
from typing import Any

from parse_infer.engine import ParseEngine
from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import LanguageModel
from parse_infer.models.packed_linear import n_parameters


def describe_models(engine: ParseEngine) -> dict[str, Any]:
    """Device, number type and the loaded parts, each with a fingerprint that tells a retrained one apart."""
    target = engine.target.model
    return {
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": _describe(engine.target),
        "draft": _describe(engine.draft) if engine.draft is not None else None,
        "adapter": _adapter_fingerprint(engine),
    }


def _describe(model: LanguageModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": n_parameters(model.model),
        "weights": hashlib.sha256(fingerprint(model.model).encode()).hexdigest()[:12],
    }


def _adapter_fingerprint(engine: ParseEngine) -> str | None:
    if engine.judge is None:
        return None
    weights = [p.detach().float().cpu().numpy().tobytes() for p in engine.judge.head.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:12]
