"""Settings of a calibration: the risk levels to promise, and the operating points to try."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from parse_infer.calibration.schema import Loss, OperatingPoint, risks
from parse_infer.errors import CalibrationError
from parse_infer.settings.acceptance import ACCEPT_NOTHING, Acceptance, check_share, check_threshold
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import GREEDY, Sampling, seed_of

# Fixed before any problem is seen. Evenly spaced in log-odds, because validities concentrate near 1.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 2)) for x in range(-18, 15)), 0.0)
BLOCKS: tuple[BlockTokens, ...] = ("whole", "auto")


def candidates(
    blocks: Sequence[BlockTokens] = BLOCKS,
    acceptance: Acceptance = GenerationSettings.acceptance,
    thresholds: Collection[float] = (),
) -> list[list[OperatingPoint]]:
    """Return one sequence of operating points per length of blocks, from accepting nothing to the lowest threshold.

    Raises ValueError for empty `blocks`, an invalid length or an invalid threshold.
    """
    if not blocks:
        raise CalibrationError("block_tokens is empty; give auto, whole or numbers")
    for length in blocks:
        GenerationSettings(block_tokens=length)  # raises for an invalid one
    tried = sorted({ACCEPT_NOTHING, *map(check_threshold, thresholds)}, reverse=True) if thresholds else THRESHOLDS
    return [[OperatingPoint(t, length, acceptance) for t in tried] for length in dict.fromkeys(blocks)]


@dataclass(frozen=True)
class CalibrationSettings:
    """The risk levels to promise, and the operating points to try."""

    risks: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    confidence: float = 0.9
    loss: Loss = "lost"
    blocks: tuple[BlockTokens, ...] = BLOCKS
    acceptance: Acceptance = GenerationSettings.acceptance
    max_new_tokens: int = 256
    majority: int = 0
    """With loss "disagreement": number of target samples for a majority answer; 0: the target's greedy answer."""
    sampling: Sampling = GREEDY
    """The target's, and the seed of all samples (None: 0). Drafts are greedy."""
    samples: int = 1
    """Answers to each problem, each with a seed of its own; the loss of a problem is their mean."""
    timed: int = 100
    """Number of problems on which answers are timed: the target's first sample alone, and each text of PARSE. The
    target's other texts come from the operating point that accepts nothing, which is several times faster and, in
    float32, exact or of the same distribution. In other dtypes the target answers all problems alone, or, with a
    `batch_size`, in batches of its own."""
    thresholds: tuple[float, ...] = ()
    """Thresholds to try, chosen before any problem is seen; empty: `THRESHOLDS`. Accepting nothing is always tried."""
    batch_size: int = 1
    """Answers at a time to the problems that are not timed (`JointDecoder`)."""

    def __post_init__(self) -> None:
        for name in ("samples", "timed", "batch_size", "majority"):
            if type(value := getattr(self, name)) is not int:
                raise CalibrationError(f"{name} is {value!r}; it must be a whole number")
        object.__setattr__(self, "risks", risks(self.risks))
        object.__setattr__(self, "blocks", tuple(dict.fromkeys(self.blocks)))
        check_share(self.confidence, "confidence")
        if self.loss not in get_args(Loss):
            raise CalibrationError(f"loss is {self.loss!r}; choose one of {', '.join(get_args(Loss))}")
        if self.majority and (self.majority < 3 or self.loss != "disagreement"):
            raise CalibrationError(
                f"majority is {self.majority}: it takes at least 3 samples, and only loss disagreement uses it"
            )
        if (self.samples > 1 and self.sampling.greedy) or self.samples < 1:
            fits = "1 for greedy answers, which are the same" if self.sampling.greedy else "at least 1"
            raise CalibrationError(f"samples is {self.samples}, with {self.sampling}: give {fits}")
        if self.loss == "disagreement" and not self.sampling.greedy:
            raise CalibrationError(
                f"loss disagreement needs greedy answers: at {self.sampling} the target's own "
                "answers disagree too; choose loss accuracy or lost"
            )
        if self.timed < 1:
            raise CalibrationError(f"timed is {self.timed}: without a timed problem no speedup is known")
        if self.batch_size < 1:
            raise CalibrationError(f"batch_size is {self.batch_size}; it must be at least 1")
        candidates(self.blocks, self.acceptance, self.thresholds)  # raises for an unknown value
        self.generation()

    @property
    def orders(self) -> list[list[OperatingPoint]]:
        return candidates(self.blocks, self.acceptance, self.thresholds)

    @property
    def level(self) -> float:
        """Share of the error budget for each sequence of operating points."""
        return (1 - self.confidence) / len(self.blocks)

    @property
    def binary(self) -> bool:
        """Whether losses are 0 or 1."""
        return self.loss != "accuracy" and self.samples == 1

    def generation(self, *purpose: object) -> GenerationSettings:
        """Settings of one sample of a problem; each `purpose` has its own random numbers."""
        plain = GenerationSettings(self.max_new_tokens, acceptance=self.acceptance, strict_tokens=0, adaptive=False)
        if self.sampling.greedy:
            return plain
        return plain.override(resume_sampling=replace(self.sampling, seed=seed_of(self.sampling.seed or 0, *purpose)))
