"""Promises: per-request risk levels and the operating points that keep them (`calibration.json`).

A promise covers whole requests, not drafts or verification passes. On new problems like the calibration's, PARSE's
expected loss is at most `risk`, with the stated confidence. `LOSSES` says what a loss is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from parse_infer.errors import CalibrationError
from parse_infer.files import locate, read_json, write_json
from parse_infer.settings.acceptance import Acceptance, check_share
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import GREEDY, Sampling

FILE = "calibration.json"
SCHEMA_VERSION = 3
Loss = Literal["accuracy", "lost", "disagreement"]
LOSSES: dict[Loss, str] = {
    "accuracy": "accuracy of the target alone minus PARSE's",
    "lost": "the target alone is right and PARSE is wrong",
    "disagreement": "PARSE's final answer is not the target's own",
}
LOCAL = "local"
_WAY_OUT = "run `parse-infer calibrate` again"


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
    """Content of calibration.json.

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
            raise CalibrationError(
                f"risk is {risk}, but the calibration shows no promise: {_WAY_OUT} on more problems"
            )
        nearest = min(shown, key=lambda r: abs(r - risk))
        what = "no setting was shown to keep it" if risk in self.promises else "it was not tested"
        raise CalibrationError(
            f"risk is {risk}, but {what}; the nearest promise is {nearest}. For others {_WAY_OUT} with --risk {risk}"
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
                    f"so its promises do not hold here: {_WAY_OUT}"
                )

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        content = asdict(self) | {"promises": {str(risk): place for risk, place in self.promises.items()}}
        write_json(path, {"schema_version": SCHEMA_VERSION, **content})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read the file. Raise FileNotFoundError without a file, ValueError for a damaged one or another version."""
        path = Path(path)
        if path.is_dir() and (path / FILE).is_file():
            raise FileNotFoundError(f"{path} is a folder: give the file in it, {path / FILE}")
        if not path.is_file():
            raise FileNotFoundError(f"there is no calibration {path}: make one with `parse-infer calibrate`")
        content = read_json(path, _WAY_OUT)
        if content.pop("schema_version", None) != SCHEMA_VERSION:
            raise CalibrationError(f"{path} is of another version than this parse-engine reads: {_WAY_OUT}")
        try:
            content["tried"] = [TestedPoint(OperatingPoint(**row.pop("setting")), **row) for row in content["tried"]]
            content["sampling"] = Sampling(**content["sampling"])
            content["promises"] = {float(risk): place for risk, place in content["promises"].items()}
            calibration = cls(**content)
            for place in calibration.promises.values():
                assert place is None or calibration.tried[place]
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise CalibrationError(f"{path} is damaged ({error}): {_WAY_OUT}") from error
        return calibration


def shipped_calibration(adapter: str | Path | None) -> Calibration | None:
    """Load the calibration in an adapter's folder or Hub repository; None without a calibration."""
    if adapter is None:
        return None
    path = locate(adapter, (FILE,), "adapter") / FILE
    return Calibration.load(path) if path.is_file() else None


def resolve_risk(
    settings: GenerationSettings, calibration: Calibration | None, template_option: str | None = None
) -> GenerationSettings:
    """Apply the operating point that keeps the settings' `risk`; return settings without `risk` unchanged.

    Args:
        template_option: a chat template option that the prompt changes, if any; see `changed_option`.

    Raises:
        ValueError: no calibration, a risk without promise, or settings that the promise does not cover.
    """
    risk = settings.risk
    if risk is None:
        return settings
    if calibration is None:
        raise CalibrationError(
            f"risk is {risk}, but this engine has no calibration: run `parse-infer calibrate`, "
            "and name its calibration.json"
        )
    for name in (*(f.name for f in fields(OperatingPoint)), "mode", "keep_greedy_match"):
        if getattr(settings, name) != getattr(GenerationSettings(), name):
            raise CalibrationError(f"risk and {name} were both given: a promise chooses its own {name}")
    asked, covered = settings.resume_sampling, calibration.sampling
    if not asked.draws_like(covered):
        raise CalibrationError(
            f"risk is {risk}, but the calibration covers {covered} only, and this request has {asked}"
        )
    if not (settings.draft_sampling.greedy or settings.draft_sampling.draws_like(asked)):
        raise CalibrationError(
            f"risk is {risk}, but the calibration covers greedy drafts only: omit draft_temperature"
        )
    for given in ("ignore_eos", "min_tokens", "strict_tokens", "strict_answer"):
        if getattr(settings, given):
            raise CalibrationError(f"risk is {risk}, but the calibration does not cover {given}: omit {given}")
    if template_option is not None:
        raise CalibrationError(
            f"risk is {risk}, but the calibration was made with another {template_option[:60]!r} of the chat "
            "template: omit it"
        )
    if settings.max_new_tokens < calibration.max_new_tokens:
        raise CalibrationError(
            f"risk is {risk}, but the calibration covers answers of up to {calibration.max_new_tokens} tokens and "
            f"max_new_tokens is {settings.max_new_tokens}"
        )
    return settings.override(draft_temperature=0.0, **asdict(calibration.setting(risk).setting))


def promised(
    settings: GenerationSettings,
    risk: float | None,
    calibration: Calibration | None,
    template_option: str | None = None,
) -> tuple[GenerationSettings, str | None]:
    """Return `settings` with the promise `risk`, if the settings have no `risk` and the promise covers them. Otherwise
    return them unchanged; the second value says why the promise does not cover them."""
    if risk is None or settings.risk is not None:
        return settings, None
    try:
        resolve_risk(settings.override(risk=risk), calibration, template_option)
    except ValueError as error:
        return settings, str(error)
    return settings.override(risk=risk), None


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
