"""`calibration.json`: several calibrations of one judge, and which of them an engine and a request take."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from parse_infer.calibration.calibration_file import (
    FILE,
    add_calibration,
    find_calibrations,
    load_calibrations,
    save_calibrations,
)
from parse_infer.calibration.promises import check_default_risk, covering, promised, resolve_risk
from parse_infer.calibration.schema import Calibration, OperatingPoint
from parse_infer.calibration.schema import TestedPoint as Point
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling

WARM = Sampling(0.7, top_p=0.8)
TRIED = [Point(OperatingPoint(t), 1, 0.04, 2.0, 0.1) for t in (0.9, 0.8)]
GREEDY_ONE = Calibration("t", 300, "x", "lost", 0.9, 24, {"target": "a", "dtype": "float32"}, TRIED, {0.05: 0})
WARM_ONE = replace(GREEDY_ONE, loss="accuracy", promises={0.05: 1, 0.01: None}, sampling=WARM, samples=4)
SERVED = replace(GREEDY_ONE, models={"backend": "vllm", "target": "a"})


def test_what_is_saved_is_loaded(tmp_path: Path):
    save_calibrations(tmp_path / FILE, [GREEDY_ONE, SERVED, WARM_ONE])
    assert load_calibrations(tmp_path / FILE) == (GREEDY_ONE, SERVED, WARM_ONE)
    assert load_calibrations(tmp_path / FILE, "vllm") == find_calibrations(None, tmp_path, "vllm") == (SERVED,)
    assert find_calibrations(tmp_path / FILE, None, "local") == (GREEDY_ONE, WARM_ONE)
    assert find_calibrations(None, None, "local") == ()


def test_a_file_of_another_backend_is_refused_if_it_was_named(tmp_path: Path):
    """The one in an adapter's folder is of no concern."""
    save_calibrations(tmp_path / FILE, [SERVED])
    with pytest.raises(ValueError, match=r"made with another backend \(vllm\) than is loaded \(local\)"):
        find_calibrations(tmp_path / FILE, None, "local")
    assert find_calibrations(None, tmp_path, "local") == ()


def test_a_file_with_one_calibration_at_the_top_is_read(tmp_path: Path):
    """As version 3 wrote it, and as the embedded adapters have it."""
    old = {"schema_version": 3, **asdict(WARM_ONE), "promises": {"0.05": 1, "0.01": None}}
    (tmp_path / FILE).write_text(json.dumps(old))
    assert load_calibrations(tmp_path / FILE) == (WARM_ONE,)
    assert add_calibration(tmp_path / FILE, GREEDY_ONE) == (WARM_ONE, GREEDY_ONE)
    assert load_calibrations(tmp_path / FILE) == (WARM_ONE, GREEDY_ONE)


def test_a_calibration_replaces_the_one_of_its_backend_and_sampling(tmp_path: Path):
    path = tmp_path / "adapter" / FILE
    for each in (GREEDY_ONE, WARM_ONE, SERVED):
        add_calibration(path, each)
    again = replace(GREEDY_ONE, n_problems=500, loss="disagreement")
    assert add_calibration(path, again) == load_calibrations(path) == (again, WARM_ONE, SERVED)
    other = replace(WARM_ONE, models={"target": "a", "dtype": "bfloat16"})
    assert add_calibration(path, other) == (SERVED, other), "an engine in bfloat16 could not keep the greedy promise"


def test_a_damaged_calibration_is_one_sentence(tmp_path: Path):
    path = tmp_path / FILE
    with pytest.raises(FileNotFoundError, match="there is no calibration"):
        load_calibrations(path)
    save_calibrations(path, [GREEDY_ONE])
    whole = json.loads(path.read_text())
    (row,) = whole["calibrations"]
    for content, message in [
        ("{", "is damaged, it is no valid JSON"),
        (json.dumps(whole | {"schema_version": 7}), "is of another version"),
        (json.dumps({"schema_version": 4}), "is damaged"),
        (json.dumps(whole | {"calibrations": []}), "is damaged"),
        (json.dumps(whole | {"calibrations": ["x"]}), "is damaged"),
        (json.dumps(whole | {"calibrations": [{k: v for k, v in row.items() if k != "task"}]}), "is damaged"),
        (json.dumps(whole | {"calibrations": [row | {"promises": {"0.1": 3}}]}), "is damaged"),
        (json.dumps(whole | {"calibrations": [row | {"promises": {"0.1": -1}}]}), "a promise at point -1 of"),
        (json.dumps(whole | {"calibrations": [row | {"promises": {"0.1": True}}]}), "a promise at point True of"),
        (json.dumps(whole | {"calibrations": [row | {"models": None}]}), "is damaged"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{message}.*delete it, and run `parse-infer calibrate` again"):
            load_calibrations(path)


def test_a_request_takes_the_calibration_of_its_sampling():
    settings, both = GenerationSettings(24, risk=0.05), (GREEDY_ONE, WARM_ONE)
    assert covering(both, settings) is covering((WARM_ONE, GREEDY_ONE), settings) is GREEDY_ONE
    assert resolve_risk(settings, both).threshold == 0.9
    sampled = settings.override(temperature=0.7, top_p=0.8, seed=3)
    assert resolve_risk(sampled, both).threshold == 0.8
    with pytest.raises(ValueError, match=r"risk is 0.05, but this engine has no calibration: run"):
        resolve_risk(settings, ())
    message = (
        "risk is 0.05, but there is no promise for temperature 0.6; there are promises for greedy answers and "
        "temperature 0.7, top_p 0.8"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolve_risk(settings.override(temperature=0.6), both)
    plain = sampled.override(risk=None)
    assert promised(plain, 0.05, both) == (sampled, None)
    assert promised(plain, 0.05, (GREEDY_ONE,)) == (plain, message.replace("0.6", "0.7, top_p 0.8").split(" and ")[0])


def test_a_default_risk_needs_one_calibration_that_keeps_it():
    """Requests with the sampling of another say why they have no promise."""
    tenth = replace(GREEDY_ONE, promises={0.1: 0})
    check_default_risk(GenerationSettings(24), ())
    check_default_risk(GenerationSettings(24, risk=0.05), (tenth, WARM_ONE))
    with pytest.raises(ValueError, match=r"risk is 0.01, but it was not tested; the nearest promise is 0.1"):
        check_default_risk(GenerationSettings(24, risk=0.01), (tenth, WARM_ONE))
    with pytest.raises(ValueError, match="does not cover strict_tokens"):
        check_default_risk(GenerationSettings(24, risk=0.05, strict_tokens=2), (GREEDY_ONE, WARM_ONE))
    with pytest.raises(ValueError, match="this engine has no calibration"):
        check_default_risk(GenerationSettings(24, risk=0.05), ())
