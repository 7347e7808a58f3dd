"""Device helpers with an explicit device, because torch.cuda's default is another device on multi-GPU machines."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work, before reading the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiplies_in_16_bits(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are fast on the device. A CPU without bfloat16 instructions (AVX2 alone, as in
    most laptops) takes 5 to 50 times as long as in float32."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def device_name(device: torch.device) -> str | None:
    """Return the GPU's name; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
