"""Devices, always the one that is asked about: what torch.cuda takes without an argument is another GPU's on many."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given; the clock may then be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
