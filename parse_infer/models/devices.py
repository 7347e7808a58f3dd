"""Devices, always the one that is asked about: what torch.cuda takes without an argument is another GPU's on many."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given; the clock may then be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiplies_in_16_bits(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are fast there. A CPU without instructions for them (such as most laptops
    have: AVX2 alone) takes 5 to 50 times as long as in float32."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
