"""The mask of a packed pass as one dense matrix, the reference for split attention."""

from __future__ import annotations

import torch
from torch import Tensor

from parse_infer.judge.packing import probe_mask


def dense_mask(past: int, causal: int, visible: Tensor, probe_len: int, window: int | None = None) -> Tensor:
    """Return the mask of a packed pass as one dense matrix.

    Args:
        past: tokens in the cache.
        causal: prompt and draft tokens of this pass, before the probes.
        visible: int64 [B, K].
        probe_len: P.
        window: sliding window of the layer, or None.

    Returns:
        bool [B, 1, causal + K*P, past + causal + K*P].
    """
    b, k = visible.shape
    n_keys = past + causal
    rows = torch.arange(past, n_keys, device=visible.device)[:, None]
    keys = torch.arange(n_keys, device=visible.device)
    allowed = keys <= rows
    if window is not None:
        allowed = allowed & (rows - keys < window)
    blind = torch.zeros(causal, k * probe_len, dtype=torch.bool, device=visible.device)
    top = torch.cat([allowed, blind], dim=-1).expand(b, 1, -1, -1)
    return torch.cat([top, probe_mask(visible, probe_len, n_keys, window)], dim=-2)
