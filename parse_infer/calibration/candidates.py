"""Operating points that a calibration tries, in the order of its tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from parse_infer.acceptance import ACCEPT_NOTHING, Acceptance
from parse_infer.calibration.schema import OperatingPoint
from parse_infer.errors import CalibrationError
from parse_infer.settings import GenerationSettings, Resume

# Fixed before any problem is seen. Evenly spaced in log-odds, because validities concentrate near 1.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 4)) for x in range(-28, 29)), 0.0)
RESUMES: tuple[Resume, ...] = get_args(Resume)


def candidates(
    resumes: Sequence[Resume] = RESUMES, acceptance: Acceptance = GenerationSettings.acceptance
) -> list[list[OperatingPoint]]:
    """Return one sequence of operating points per resume mode, from accepting nothing to accepting everything.

    Raises ValueError for an empty `resumes` or an unknown mode.
    """
    unknown = [resume for resume in resumes if resume not in RESUMES]
    if unknown or not resumes:
        raise CalibrationError(f"resume is {', '.join(unknown) or 'empty'}; choose among {', '.join(RESUMES)}")
    return [[OperatingPoint(t, resume, acceptance) for t in THRESHOLDS] for resume in dict.fromkeys(resumes)]
