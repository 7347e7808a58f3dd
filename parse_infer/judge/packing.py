"""The packed layout of a verification pass: pure, batched functions, shared by training and inference.

    input_ids    [ prompt … | d1 d2 d3 d4 d5 d6 d7 d8 | P P | P P | … ]
    position_ids [ 0 … n-1  | n …              n+7    | continue from the probe's own cut ]
    mask           causal over prompt and draft; a probe sees the tokens before its cut and itself

A probe is a run of tokens that judges and is dropped after the pass: the zero-shot judge's question behind each cut,
or the second stream. `visible[b, k]` is the number of prompt and draft tokens before probe k: its cut, counted from
the start of the prompt. Right padding needs no mask, because it lies beyond every visible count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parse_infer.errors import ModelError
from parse_infer.models.decoder import Trailing


def probes(probe_ids: Sequence[int], visible: Sequence[int], n_keys: int, device: torch.device) -> Trailing:
    """Build K probes after one context of prompt and draft, for `Decoder.forward`.

    Args:
        probe_ids: the P tokens of each probe.
        visible: number of context tokens that each of the K probes sees.
        n_keys: tokens of the context.

    Raises:
        ValueError: the probe is empty, or an entry of `visible` is outside 1..n_keys.
    """
    if not probe_ids:
        raise ModelError("a probe needs at least one token")
    if any(not 0 < v <= n_keys for v in visible):
        raise ModelError(f"a probe must see between 1 and {n_keys} tokens, not {list(visible)}")
    cuts, p = torch.tensor([list(visible)], device=device), len(probe_ids)
    positions = probe_positions(cuts, p)[0]
    return Trailing([*probe_ids] * len(visible), positions, lambda window: probe_mask(cuts, p, n_keys, window))


def probe_positions(visible: Tensor, probe_len: int) -> Tensor:
    """Return position ids of the probe tokens: probe k continues at position `visible[b, k]`.

    Args:
        visible: int64 [B, K].
        probe_len: P, tokens in a probe.

    Returns:
        int64 [B, K*P].
    """
    steps = torch.arange(probe_len, device=visible.device)
    return (visible[:, :, None] + steps).flatten(1)


def probe_mask(visible: Tensor, probe_len: int, n_keys: int, window: int | None = None) -> Tensor:
    """Return the attention mask of the probe tokens: keys before their cut, and their own probe up to themselves.

    Args:
        visible: int64 [B, K].
        probe_len: P, tokens in a probe.
        n_keys: keys before the probes, cached keys included; key j is at position j.
        window: sliding window w of the layer, which hides keys at a distance of w or more; None: no window.

    Returns:
        bool [B, 1, K*P, n_keys + K*P].
    """
    device, (b, k) = visible.device, visible.shape
    keys = torch.arange(n_keys, device=device)
    before = keys < visible[:, :, None, None]  # [B, K, 1, n_keys]
    steps = torch.arange(probe_len, device=device)
    if window is None:
        before = before.expand(b, k, probe_len, n_keys)
    else:
        positions = visible[:, :, None, None] + steps[:, None]  # [B, K, P, 1]
        before = before & (positions - keys < window)
    within = steps[:, None] >= steps  # [P, P]
    if window is not None:
        within = within & (steps[:, None] - steps < window)
    same_probe = torch.eye(k, dtype=torch.bool, device=device)
    own = (same_probe[:, None, :, None] & within[None, :, None, :]).reshape(k * probe_len, k * probe_len)
    before = before.reshape(b, k * probe_len, n_keys)
    return torch.cat([before, own.expand(b, -1, -1)], dim=-1).unsqueeze(1)


def readout_index(n_probes: int, probe_len: int) -> Tensor:
    """Return the index of each probe's last token among the K*P probe tokens: int64 [K]."""
    return torch.arange(1, n_probes + 1) * probe_len - 1
