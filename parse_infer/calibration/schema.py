"""Promises: per-request risk levels and the operating points that keep them.

A promise covers whole requests, not drafts or verification passes. On new problems like the calibration's, PARSE's
expected loss is at most `risk`, with the stated confidence. `LOSSES` says what a loss is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parse_infer.errors import CalibrationError
from parse_infer.settings.acceptance import Acceptance, check_share
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import GREEDY, Sampling

Loss = Literal["accuracy", "lost", "disagreement"]
LOSSES: dict[Loss, str] = {
    "accuracy": "accuracy of the target alone minus PARSE's",
    "lost": "the target alone is right and PARSE is wrong",
    "disagreement": "PARSE's final answer is not the target's own",
}
LOCAL = "local"
WAY_OUT = "run `parse-infer calibrate` again"


@dataclass(frozen=True)
class OperatingPoint:
    """Settings that a calibration chooses; fields as in `GenerationSettings`."""

    threshold: float
    block_tokens: BlockTokens = "auto"
    acceptance: Acceptance = GenerationSettings.acceptance


@dataclass(frozen=True)
class TestedPoint:
    """Results of one operating point on the problems of a calibration."""

    setting: OperatingPoint
    losses: float
    """Sum over all problems."""
    bound: float
    """Upper confidence bound of the risk of this point alone; a promise also accounts for the points tested before."""
    speedup: float
    """Mean time of the target alone over mean time of this point, on the timed problems."""
    disagreement: float
    """Upper confidence bound of the share of final answers that differ from the target's greedy answer."""


@dataclass(frozen=True)
class Calibration:
    """What was measured at one sampling, and what it promises.

    Attributes:
        task: name of the task.
        n_problems: number of problems.
        problems: hash of their ids and prompts.
        loss: definition of a loss, see `LOSSES`.
        confidence: of each promise.
        max_new_tokens: budget of the answers. Truncated answers count as wrong, also the target's. With a larger
            budget, a promise covers only problems that the target answers within this budget.
        models: target, draft model and judge, as the engine describes them.
        tried: all operating points, in the order of the tests.
        promises: for each risk the index in `tried` of the fastest point shown to keep it, or None.
        sampling: the target's, without seed. A promise covers these settings only; drafts are greedy.
        samples: answers to each problem.
        made: date, command and environment of the calibration.
    """

    task: str
    n_problems: int
    problems: str
    loss: Loss
    confidence: float
    max_new_tokens: int
    models: dict[str, Any]
    tried: list[TestedPoint]
    promises: dict[float, int | None]
    sampling: Sampling = GREEDY
    samples: int = 1
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The backend that was calibrated."""
        return str(self.models.get("backend", LOCAL))

    @property
    def key(self) -> tuple[str, Sampling]:
        """Backend and sampling, by which an engine and its requests choose a calibration."""
        return self.backend, GREEDY if self.sampling.greedy else self.sampling

    def setting(self, risk: float) -> TestedPoint:
        """Return the fastest operating point that keeps `risk`.

        Raises:
            ValueError: the calibration did not test this risk, or no point keeps it. The message names the nearest.
        """
        place = self.promises.get(risk)
        if place is not None:
            return self.tried[place]
        shown = [r for r, where in self.promises.items() if where is not None]
        if not shown:
            raise CalibrationError(f"risk is {risk}, but the calibration shows no promise: {WAY_OUT} on more problems")
        nearest = min(shown, key=lambda r: abs(r - risk))
        what = "no setting was shown to keep it" if risk in self.promises else "it was not tested"
        raise CalibrationError(
            f"risk is {risk}, but {what}; the nearest promise is {nearest}. For others {WAY_OUT} with --risk {risk}"
        )

    def disagreement(self, risk: float) -> float:
        """Upper bound of the share of final answers under promise `risk` that differ from the target's greedy answer.
        `parse-infer serve --audit` monitors this share without a checker. Raise ValueError as `setting` does."""
        seen = self.setting(risk).disagreement
        return max(risk, seen) if self.loss == "disagreement" else seen

    def check(self, models: Mapping[str, Any]) -> None:
        """Raise ValueError unless the calibration was measured with these models (`describe` of an engine)."""
        known = {**models, "backend": models.get("backend", LOCAL)}
        for part in ("backend", "target", "draft", "adapter", "dtype", "cut_policy", "template_options"):
            mine, theirs = self.backend if part == "backend" else self.models.get(part), known.get(part)
            if _identity(mine) != _identity(theirs):
                raise CalibrationError(
                    f"the calibration was made with another {part} ({_name(mine)}) than is loaded ({_name(theirs)}), "
                    f"so its promises do not hold here: {WAY_OUT}"
                )


def risks(values: Sequence[float]) -> tuple[float, ...]:
    """Sort and deduplicate risk levels. Raise ValueError for none, or for one that is not between 0 and 1."""
    for value in values:
        check_share(value, "risk")
    if not values:
        raise CalibrationError("name at least one risk, such as 0.05")
    return tuple(sorted(set(map(float, values))))


def _identity(part: object) -> object:
    return (part["weights"], part.get("dtype")) if isinstance(part, dict) and "weights" in part else part


def _name(part: object) -> object:
    if not isinstance(part, dict) or "name" not in part:
        return part
    return f"{part['name']} in {part['dtype']}" if "dtype" in part else part["name"]
