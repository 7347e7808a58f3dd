"""Keep a promise: the calibration that covers a request's sampling, and the operating point for the request's `risk`.

An engine has one calibration for each sampling; the first is the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from parse_infer.calibration.schema import Calibration, OperatingPoint
from parse_infer.errors import CalibrationError
from parse_infer.settings.generation import GenerationSettings


def covering(calibrations: Sequence[Calibration], settings: GenerationSettings) -> Calibration:
    """Return the calibration of the target's sampling. Raise ValueError without one, and name those that there are."""
    asked = settings.resume_sampling
    found = next((each for each in calibrations if asked.draws_like(each.sampling)), None)
    if found is not None:
        return found
    if not calibrations:
        raise CalibrationError(
            f"risk is {settings.risk}, but this engine has no calibration: run `parse-infer calibrate`, "
            "and name its calibration.json"
        )
    raise CalibrationError(
        f"risk is {settings.risk}, but there is no promise for {asked}; there are promises for "
        f"{' and '.join(str(each.sampling) for each in calibrations)}"
    )


def resolve_risk(
    settings: GenerationSettings, calibrations: Sequence[Calibration], template_option: str | None = None
) -> GenerationSettings:
    """Apply the operating point that keeps the settings' `risk`; return settings without `risk` unchanged.

    Args:
        template_option: a chat template option that the prompt changes, if any; see `changed_option`.

    Raises:
        ValueError: no calibration for this sampling, a risk without promise, or settings that the promise does not
            cover.
    """
    risk = settings.risk
    if risk is None:
        return settings
    for name in (*(f.name for f in fields(OperatingPoint)), "mode", "keep_greedy_match"):
        if getattr(settings, name) != getattr(GenerationSettings(), name):
            raise CalibrationError(f"risk and {name} were both given: a promise chooses its own {name}")
    calibration = covering(calibrations, settings)
    if not (settings.draft_sampling.greedy or settings.draft_sampling.draws_like(settings.resume_sampling)):
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
    calibrations: Sequence[Calibration],
    template_option: str | None = None,
) -> tuple[GenerationSettings, str | None]:
    """Return `settings` with the promise `risk`, if the settings have no `risk` and the promise covers them. Otherwise
    return them unchanged; the second value says why the promise does not cover them."""
    if risk is None or settings.risk is not None:
        return settings, None
    try:
        resolve_risk(settings.override(risk=risk), calibrations, template_option)
    except ValueError as error:
        return settings, str(error)
    return settings.override(risk=risk), None


def check_default_risk(settings: GenerationSettings, calibrations: Sequence[Calibration]) -> None:
    """Raise ValueError if the settings have a `risk` that no calibration keeps at its own sampling."""
    if settings.risk is None:
        return
    own = [settings.override(risk=None, resume_sampling=each.sampling) for each in calibrations]
    reasons = [promised(each, settings.risk, calibrations)[1] for each in own]
    if not reasons:
        covering(calibrations, settings)  # raises
    if None not in reasons:
        raise CalibrationError(str(reasons[0]))
