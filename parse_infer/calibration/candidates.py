"""Operating points that a calibration tries, in the order of its tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parse_infer.acceptance import ACCEPT_NOTHING, Acceptance
from parse_infer.calibration.schema import OperatingPoint
from parse_infer.errors import CalibrationError
from parse_infer.settings import BlockTokens, GenerationSettings

# Fixed before any problem is seen. Evenly spaced in log-odds, because validities concentrate near 1.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 4)) for x in range(-28, 29)), 0.0)
BLOCKS: tuple[BlockTokens, ...] = ("whole", "auto")


def candidates(
    blocks: Sequence[BlockTokens] = BLOCKS, acceptance: Acceptance = GenerationSettings.acceptance
) -> list[list[OperatingPoint]]:
    """Return one sequence of operating points per length of blocks, from accepting nothing to accepting everything.

    Raises ValueError for empty `blocks` or an invalid length.
    """
    if not blocks:
        raise CalibrationError("block_tokens is empty; give auto, whole or numbers")
    for length in blocks:
        GenerationSettings(block_tokens=length)  # raises for an invalid one
    return [[OperatingPoint(t, length, acceptance) for t in THRESHOLDS] for length in dict.fromkeys(blocks)]
