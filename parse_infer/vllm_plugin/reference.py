"""Validities of one short draft by the local backend, for the server's self-check at start-up.

Wrong validities are silent: a compiled graph without the adapter's update still returns numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.cuts import Segmenter
from parse_infer.judge.verifier import Verifier
from parse_infer.models.loading import load_language_model
from parse_infer.models.names import resolve

PROMPT = "A boy has 17 pencils. His brother has 25 pencils. How many pencils do they have together?"
DRAFT = "The boy has 17 pencils and his brother has 25.\nTogether they have 17 + 25 = 52 pencils.\nThe answer is 52."
_LIMIT = 8.0  # clips compared logits: float32 has no more digits for validities beyond


@dataclass(frozen=True)
class Reference:
    """A draft and its validities.

    Attributes:
        context_ids, draft_ids, cuts: the judged draft.
        validity: one validity per cut.
    """

    context_ids: Sequence[int]
    draft_ids: Sequence[int]
    cuts: Sequence[int]
    validity: Sequence[float]

    def difference(self, found: Sequence[float]) -> float:
        """Largest difference in the logit to other validities of the same cuts."""
        return max(abs(_logit(a) - _logit(b)) for a, b in zip(self.validity, found, strict=True))


def measure(target: str | Path, adapter: str | Path) -> Reference:
    """Load target and adapter and judge `DRAFT` in the checkpoint's dtype. Raises as loading them does."""
    lm = load_language_model(target, role="target", device="cpu")
    judge = ValidityAdapter.from_pretrained(resolve(adapter), lm.model)
    context = lm.render(PROMPT)
    draft = lm.tokenizer.encode(DRAFT, add_special_tokens=False)
    if lm.end_token is not None:
        draft = [*draft, lm.end_token]
    verifier = Verifier(lm.decoder, judge, Segmenter(lm.tokenizer))
    lm.decoder.seek(context)
    verified = verifier.verify(draft)
    return Reference(context, draft, verified.cuts, verified.validity)


def _logit(validity: float) -> float:
    edge = 1 / (1 + math.exp(_LIMIT))
    p = min(max(validity, edge), 1 - edge)
    return math.log(p / (1 - p))
