"""Split attention: the ordinary causal kernel for prompt and draft, and a mask for the few probe rows only.

`enable_split_attention(model)` selects it ("parse_split", registered in `transformers.AttentionInterface`). An
attention mask with fewer rows than queries covers the TRAILING queries only. Earlier queries attend causally to the
cache and to each other, and never to the keys of the trailing tokens. A mask with zero rows therefore means "causal
throughout"; cached prefills get it instead of a dense matrix. Calls without a mask or with a full mask of several
queries go to transformers' SDPA function unchanged, which copies the keys and values that query heads share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from parse_infer.errors import ModelError
from parse_infer.models.architecture import decoder_layers, layer_windows, text_config

SPLIT_ATTENTION = "parse_split"
_WINDOW = "split_attention_window"  # attribute of a layer's attention
CHUNK_ROWS = 256  # rows of a masked chunk, if no kernel supports the causal pattern; bounds the mask's size


def split_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`; see the module's docstring for the rule.

    Args:
        query: [B, heads, T, D]; key, value: [B, kv heads, past + T, D].
        attention_mask: bool [B, 1, rows, past + T] for the last `rows` queries, rows <= T; or None.

    Returns:
        ([B, T, heads, D], None).
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} needs soft-capping or sinks: split attention has neither")
    n_queries, n_keys = query.shape[2], key.shape[2]
    if n_queries == 1 and attention_mask is not None and attention_mask.shape[-2] == 1:
        return _masked(query, key, value, attention_mask, dropout, scaling), None
    if attention_mask is None or attention_mask.shape[-2] == n_queries:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    trailing = attention_mask.shape[-2]
    leading, seen = n_queries - trailing, n_keys - trailing
    window = getattr(module, _WINDOW, kwargs.get("sliding_window"))
    out = _causal(module, query[:, :, :leading], key[:, :, :seen], value[:, :, :seen], window, dropout, scaling)
    if trailing:
        tail = _masked(query[:, :, leading:], key, value, attention_mask, dropout, scaling)
        out = torch.cat([out, tail], dim=1)
    return out, None


def _causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Compute causal attention aligned to the end of the keys ([B, T, heads, D]), without a T x T mask."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    past = n_keys - n_queries
    if window is not None and window >= n_keys:
        window = None  # the window covers all keys
    if query.device.type == "cuda" and window is None:
        return causal_on_gpu(query, key, value, dropout, scaling)
    if n_queries == 1 or (past == 0 and window is None):
        first = 0 if window is None else n_keys - window
        key, value = key[:, :, first:], value[:, :, first:]
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal=True)[0]
    parts, size = [], max(1, CHUNK_ROWS * key.shape[1] // query.shape[1])
    for start in range(0, n_queries, size):
        stop = min(start + size, n_queries)
        first = 0 if window is None else max(0, past + start - window + 1)
        last = past + stop
        mask = _band(past + start, past + stop, first, last, window, query.device)
        chunk = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        parts.append(_masked(*chunk, mask, dropout, scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def causal_on_gpu(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Compute causal attention aligned to the end of the keys ([B, T, heads, D]) with a fused CUDA kernel.

    Flash attention reads grouped keys and values in place. Memory-efficient attention (float32, old GPUs) needs
    repeated keys and values. For grouped inputs torch would choose the math kernel instead, which also repeats them
    and stores all T x T scores.
    """
    (n_queries, n_keys), groups = (query.shape[2], key.shape[2]), query.shape[1] // key.shape[1]
    if n_queries == 1:
        return _masked(query, key, value, None, dropout, scaling)
    grouped = groups > 1 and can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, True))
    if not grouped:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    mask = causal_lower_right(n_queries, n_keys)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """Compute attention of a few rows under a mask [B, 1, n, keys] (None: one row that sees all): [B, n, heads, D].

    Query heads that share keys and values become rows of one head, so that no key or value is copied.
    """
    (batch, heads, n, size), kv_heads = query.shape, key.shape[1]
    groups = heads // kv_heads
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, groups * n, size),
        key,
        value,
        attn_mask=mask if groups == 1 or mask is None else mask.repeat(1, 1, groups, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(batch, heads, n, -1).transpose(1, 2)  # some CUDA kernels return another memory layout


def _band(row: int, row_end: int, key: int, key_end: int, window: int | None, device: torch.device) -> Tensor:
    """Build the causal (and windowed) mask of rows and keys at absolute positions: bool [1, 1, rows, keys]."""
    rows = torch.arange(row, row_end, device=device)[:, None]
    keys = torch.arange(key, key_end, device=device)
    allowed = keys <= rows
    if window is not None:
        allowed &= rows - keys < window
    return allowed[None, None]


def split_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Mask function for `transformers.AttentionMaskInterface`, without dense masks for plain causal patterns.

    Without padding, the result is None if SDPA's `is_causal` suffices. Otherwise it is a mask with zero rows, which
    means "causal throughout" to `split_attention_forward`. Padding and other patterns get transformers' SDPA mask.
    """
    plain = attention_mask is None and allow_is_causal_skip and isinstance(q_offset, int)
    if plain and kv_offset == 0 and kv_length == q_offset + q_length:
        fits_window = local_size is None or kv_length <= local_size
        if fits_window and (q_length == 1 or q_offset == 0):
            return None
        return torch.empty(batch_size, 1, 0, kv_length, dtype=torch.bool, device=device)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **kwargs,
    )


def enable_split_attention(model: PreTrainedModel) -> None:
    """Enable split attention for `model` and its submodules. Plain forwards and decoding give SDPA's results.

    Raises:
        ValueError: the packed pass does not support the model: recurrent, linear, chunked or bidirectional attention,
            soft-capped attention scores, attention sinks, or shared KV layers.
    """
    name, config = type(model).__name__, text_config(model)
    windows, kinds = layer_windows(model), getattr(config, "layer_types", None)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelError(
            f"{name} caps its attention scores (attn_logit_softcapping), which PyTorch's fused attention cannot do: "
            "choose a target without it (Gemma 3 instead of Gemma 2)"
        )
    if any(hasattr(module, "sinks") for module in model.modules()):
        raise ModelError(f"{name} uses attention sinks, which split attention does not support: choose another target")
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} does not take attention functions from transformers' AttentionInterface: choose a target that "
            "does (Llama, Qwen, Mistral, Gemma 3, …)"
        )
    # Not every architecture passes the window to its attention function.
    for index, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            setattr(module, _WINDOW, windows[kinds[index]] if kinds else next(iter(windows.values())))
    for module in model.modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", False) and not hasattr(module, _WINDOW):
            raise ModelError(f"{name} has {type(module).__name__} outside its decoder layers: choose another target")
    if config._attn_implementation != SPLIT_ATTENTION:
        model.set_attn_implementation(SPLIT_ATTENTION)


def layer_masks(windows: dict[str, int | None], mask_of: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
    """Build the model's `attention_mask` argument: `mask_of(window)` for each layer kind in `layer_windows(model)`.

    The result is a dictionary by kind for hybrid models, as transformers expects, and a single mask for others.
    """
    masks = {kind: mask_of(window) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


AttentionInterface.register(SPLIT_ATTENTION, split_attention_forward)
AttentionMaskInterface.register(SPLIT_ATTENTION, split_attention_mask)
