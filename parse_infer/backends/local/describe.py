"""Descriptions of the measured models, for results and for the check that a resumed run uses the same models."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

from torch import nn

from parse_infer.judge.judge import Judge
from parse_infer.models.cpu.int8_linear import Int8Linear
from parse_infer.models.cpu.prepacked_linear import n_parameters
from parse_infer.models.fingerprint import fingerprint, fingerprint_of
from parse_infer.models.loading import LanguageModel
from parse_infer.text.cuts import CutPolicy
from parse_infer.token_drafters.proposer import TokenProposer


def describe_models(
    target: LanguageModel, draft: LanguageModel | None, judge: Judge | None, cut_policy: CutPolicy
) -> dict[str, Any]:
    """Describe device, dtype, models, judge, cut policy and template options. Fingerprints identify the weights.

    The draft model has a `dtype` only where it is not the target's.
    """
    dtype = _dtype(target)
    return {
        "device": str(target.model.device),
        "dtype": dtype,
        "target": _describe(target, dtype),
        "draft": _describe(draft, dtype) if draft is not None else None,
        "adapter": None if judge is None else judge.fingerprint,
        "cut_policy": cut_policy.to_dict(),
        "template_options": dict(target.template_options),
    }


def describe_drafter(drafter: TokenProposer | None) -> dict[str, Any] | None:
    """Describe a token drafter: its class, its sizes and its head's fingerprint. It affects speed, never answers."""
    if drafter is None:
        return None
    sizes = [name for name in inspect.signature(type(drafter)).parameters if name not in ("head", "model", "draft")]
    described = {"kind": type(drafter).__name__, **{name: getattr(drafter, name, None) for name in sizes}}
    head = getattr(drafter, "head", None)
    return described | ({"weights": _short(fingerprint_of(_weights(head)))} if isinstance(head, nn.Module) else {})


def _describe(model: LanguageModel, usual_dtype: str) -> dict[str, Any]:
    described = {
        "name": model.name,
        "parameters": n_parameters(model.model),
        "weights": _short(fingerprint(model.model)),
    }
    dtype = _dtype(model)
    return described if dtype == usual_dtype else described | {"dtype": dtype}


def _dtype(model: LanguageModel) -> str:
    if any(isinstance(module, Int8Linear) for module in model.model.modules()):
        return "int8"
    return str(model.model.dtype).removeprefix("torch.")


def _weights(head: nn.Module) -> list[Any]:
    return [value for value in head.state_dict().values() if value.is_floating_point()]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
