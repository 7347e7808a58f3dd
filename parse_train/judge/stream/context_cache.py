"""Key-value cache of a prompt that the second stream reads without changing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class ContextCache(DynamicCache):
    """A `DynamicCache` in which every layer caches every token, as at inference: the masks apply windows.

    Attributes:
        fixed: layers get their new keys and values behind the cached ones, and the cache keeps neither: the draft is
            read twice, and a checkpointed layer runs twice.
    """

    fixed = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.fixed:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        cached: Any = self.layers[layer_idx]
        return torch.cat([cached.keys, key_states], dim=-2), torch.cat([cached.values, value_states], dim=-2)
