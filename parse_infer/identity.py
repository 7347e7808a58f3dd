"""Which models measured something: part of its results, and of what must not change between two halves of a run."""

from __future__ import annotations

import hashlib
from typing import Any

from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import LanguageModel
from parse_infer.models.packed_linear import n_parameters
from parse_infer.verify.segments import CutPolicy
from parse_infer.verify.verifier import Judge


def describe_models(
    target: LanguageModel, draft: LanguageModel | None, judge: Judge | None, cut_policy: CutPolicy
) -> dict[str, Any]:
    """Device, number type and the loaded parts, each with a fingerprint that tells a retrained one apart; how prompts
    are rendered, and where drafts are cut."""
    return {
        "device": str(target.model.device),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "target": _describe(target),
        "draft": _describe(draft) if draft is not None else None,
        "adapter": None if judge is None else judge.fingerprint,
        "cut_policy": cut_policy.to_dict(),
        "template_options": dict(target.template_options),
    }


def _describe(model: LanguageModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": n_parameters(model.model),
        "weights": hashlib.sha256(fingerprint(model.model).encode()).hexdigest()[:12],
    }
