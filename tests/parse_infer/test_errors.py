"""What PARSE refuses it refuses with its own errors, which people can catch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from parse_infer import GenerationSettings, ParseEngine, ParseError, errors

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("parse_infer", "parse_train", "data_tools", "zoo/parse_zoo")
# Python imports it to look at any YAML file that it is asked to run.
PLAIN = {"parse_train/recipe.py"}


def test_each_kind_of_refusal_has_a_class_of_its_own(make_engine):
    engine = make_engine()
    with pytest.raises(errors.SettingsError, match="max_new_tokens is 0"):
        GenerationSettings(0)
    with pytest.raises(errors.PromptError):
        engine.generate("")
    with pytest.raises(errors.ModelError, match="is not an embedded model"):
        ParseEngine.from_pretrained("zoo:targte")
    with pytest.raises(errors.CalibrationError):
        engine.generate("Hi", risk=0.01)
    assert issubclass(errors.ServerError, ParseError) and issubclass(ParseError, ValueError)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_raises_a_plain_value_error(package):
    for path in (REPOSITORY / package).rglob("*.py"):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Raise)]
        plain = [exc.lineno for exc in raised if isinstance(exc, ast.Call) and ast.unparse(exc.func) == "ValueError"]
        assert not plain or str(path.relative_to(REPOSITORY)) in PLAIN, f"{path}: lines {plain}"
