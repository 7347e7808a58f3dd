"""Feature ranges of the training drafts: the in-distribution check of a judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parse_infer.judge.token_logprobs import TokenLogprobs

SIZES = (8, 16)
"""Numbers of first draft tokens that are compared: the larger one that a draft, or its first block, has."""
_OUTSIDE = 0.0025  # share of the training drafts below, and above, the range of a feature
_FEATURES = 7  # the columns of `TokenLogprobs.features` that are compared: all but the second and later choices
_LEAST = 100  # drafts
Seen = tuple[float, ...]
"""The number of draft tokens and the sums of their features, while there are too few; else empty."""


@dataclass(frozen=True)
class UsualDrafts:
    """Ranges of the mean features of drafts.

    Attributes:
        ranges: for each size the lowest and the highest usual values, float32 [`_FEATURES`] each.
    """

    ranges: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, drafts: Iterable[TokenLogprobs]) -> UsualDrafts:
        """Measure the ranges; a size with less than 100 drafts gets none."""
        found, ranges = list(drafts), {}
        for size in SIZES:
            means = [_means(draft, size) for draft in found if len(draft.ids) >= size]
            if len(means) >= _LEAST:
                stacked = torch.stack(means)
                ranges[size] = stacked.quantile(_OUTSIDE, 0), stacked.quantile(1 - _OUTSIDE, 0)
        return cls(ranges)

    def look(self, draft: TokenLogprobs, seen: Seen = ()) -> tuple[bool | None, Seen]:
        """Whether the drafts of an answer are usual (None: too few tokens so far), and what to remember if not known.

        Args:
            draft: the next tokens.
            seen: what the call before remembered.
        """
        if not self.ranges:
            return True, ()
        before, *sums = seen or (0.0, *[0.0] * _FEATURES)
        n = int(before) + len(draft.ids)
        size = max((size for size in self.ranges if size <= n), default=None)
        features = draft.features[: (size or n) - int(before), :_FEATURES].float().cpu()
        total = torch.tensor(sums) + features.sum(0)
        if size is None:
            return None, (float(n), *total.tolist())
        low, high = self.ranges[size]
        means = total / size
        return bool(((means >= low) & (means <= high)).all()), ()

    def to_dict(self) -> dict[str, list[list[float]]]:
        return {str(n): [[round(x, 6) for x in side.tolist()] for side in sides] for n, sides in self.ranges.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> UsualDrafts:
        return cls({int(size): (torch.tensor(low), torch.tensor(high)) for size, (low, high) in content.items()})


def _means(draft: TokenLogprobs, size: int) -> Tensor:
    return draft.features[:size, :_FEATURES].float().mean(0)
