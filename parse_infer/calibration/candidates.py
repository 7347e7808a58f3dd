"""The settings that a calibration tries, in the order in which it tests them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from parse_infer.acceptance import ACCEPT_NOTHING, Acceptance
from parse_infer.calibration.schema import OperatingPoint
from parse_infer.settings import GenerationSettings, Resume

# Fixed before any problem is seen. Even in log-odds: validities crowd near 1, and that is where thresholds differ.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 4)) for x in range(-28, 29)), 0.0)
RESUMES: tuple[Resume, ...] = get_args(Resume)


def candidates(
    resumes: Sequence[Resume] = RESUMES, acceptance: Acceptance = GenerationSettings.acceptance
) -> list[list[OperatingPoint]]:
    """An order of settings for each way to resume: from accepting nothing to accepting everything.

    Raises ValueError for no way to resume, or an unknown one.
    """
    unknown = [resume for resume in resumes if resume not in RESUMES]
    if unknown or not resumes:
        raise ValueError(f"resume is {', '.join(unknown) or 'empty'}; choose among {', '.join(RESUMES)}")
    return [[OperatingPoint(t, resume, acceptance) for t in THRESHOLDS] for resume in dict.fromkeys(resumes)]
