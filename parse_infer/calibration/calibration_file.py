"""`calibration.json`: the calibrations of a judge, each of another backend or sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parse_infer.calibration.schema import WAY_OUT, Calibration, OperatingPoint, TestedPoint
from parse_infer.errors import CalibrationError
from parse_infer.files import locate, read_json, write_json
from parse_infer.settings.sampling import Sampling

FILE = "calibration.json"
SCHEMA_VERSION = 4
_ONE_CALIBRATION = 3  # the version of files with one calibration, at the top
_WAY_OUT = f"delete it, and {WAY_OUT}"


def save_calibrations(path: str | Path, calibrations: Sequence[Calibration]) -> None:
    """Write the file atomically."""
    rows = [
        asdict(each) | {"promises": {str(r): place for r, place in each.promises.items()}} for each in calibrations
    ]
    write_json(path, {"schema_version": SCHEMA_VERSION, "calibrations": rows})


def load_calibrations(path: str | Path, backend: str | None = None) -> tuple[Calibration, ...]:
    """Read the file.

    Args:
        backend: leave out the calibrations of others.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged, of another version, or has no calibration of the backend.
    """
    path = Path(path)
    if path.is_dir() and (path / FILE).is_file():
        raise FileNotFoundError(f"{path} is a folder: give the file in it, {path / FILE}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no calibration {path}: make one with `parse-infer calibrate`")
    content = read_json(path, _WAY_OUT)
    version = content.pop("schema_version", None)
    if version not in (SCHEMA_VERSION, _ONE_CALIBRATION):
        raise CalibrationError(f"{path} is of another version than this parse-engine reads: {_WAY_OUT}")
    try:
        rows = [content] if version == _ONE_CALIBRATION else content["calibrations"]
        found = tuple(map(_calibration, rows))
        first = found[0]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise CalibrationError(f"{path} is damaged ({error}): {_WAY_OUT}") from error
    own = tuple(each for each in found if backend in (None, each.backend))
    if not own:
        first.check({**first.models, "backend": backend})  # raises
    return own


def find_calibrations(file: str | Path | None, adapter: str | Path | None, backend: str) -> tuple[Calibration, ...]:
    """Load the backend's calibrations from `file`, or from the adapter's folder or Hub repository; () without any."""
    if file is not None:
        return load_calibrations(file, backend)
    path = None if adapter is None else locate(adapter, (FILE,), "adapter") / FILE
    if path is None or not path.is_file():
        return ()
    return tuple(each for each in load_calibrations(path) if each.backend == backend)


def add_calibration(path: str | Path, new: Calibration) -> tuple[Calibration, ...]:
    """Add a calibration to the file, and return the content.

    It takes the place of the one with its backend and sampling. Others of its backend stay if they were made with the
    same models. Raises ValueError for a damaged file.
    """
    known = load_calibrations(path) if Path(path).is_file() else ()
    kept = {each.key: each for each in known if each.backend != new.backend or _fits(each, new)}
    content = tuple((kept | {new.key: new}).values())
    save_calibrations(path, content)
    return content


def _fits(calibration: Calibration, other: Calibration) -> bool:
    """Whether both were made with the same models."""
    try:
        calibration.check(other.models)
    except CalibrationError:
        return False
    return True


def _calibration(row: dict[str, Any]) -> Calibration:
    row["tried"] = [TestedPoint(OperatingPoint(**point.pop("setting")), **point) for point in row["tried"]]
    row["sampling"] = Sampling(**row["sampling"])
    row["promises"] = {float(risk): place for risk, place in row["promises"].items()}
    calibration = Calibration(**row)
    if not isinstance(calibration.models, dict):
        raise CalibrationError(f"models {calibration.models!r}")
    for place in calibration.promises.values():
        if place is not None and not (type(place) is int and 0 <= place < len(calibration.tried)):
            raise CalibrationError(f"a promise at point {place!r} of {len(calibration.tried)}")
    return calibration
