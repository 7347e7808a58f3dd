"""A generation setting is one field: command line, HTTP and benchmark offer it without more code."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from parse_infer.cli.commands.bench import bench
from parse_infer.cli.commands.generate import generate
from parse_infer.cli.setting_options import DRAFT_TEMPERATURE, SAMPLING, with_settings
from parse_infer.errors import ParseError, SettingsError
from parse_infer.evaluation.excluded_settings import NOT_MEASURED
from parse_infer.evaluation.run import BenchSettings
from parse_infer.serve.protocol.fields import OUTSIDE_PARSE, AnswerBody, ParseOptions
from parse_infer.settings.fields import setting, setting_fields
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling

FIELDS = setting_fields(GenerationSettings)


@dataclass(frozen=True)
class More(GenerationSettings):
    new_limit: int = setting(3, "A new setting.", ge=1)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_offered_or_excluded_with_a_reason(name):
    options = inspect.signature(generate).parameters
    if name in SAMPLING:
        assert {*setting_fields(Sampling), DRAFT_TEMPERATURE} <= options.keys()
    else:
        assert name in options
    assert (name in inspect.signature(bench).parameters) == (name not in NOT_MEASURED or name == "risk")
    assert (name in ParseOptions.model_fields) == (name not in OUTSIDE_PARSE)


def test_exclusions_name_settings_and_their_substitutes():
    assert {*NOT_MEASURED, *OUTSIDE_PARSE} <= FIELDS.keys() and all(NOT_MEASURED.values())
    assert {name for names in OUTSIDE_PARSE.values() for name in names} <= AnswerBody.model_fields.keys()


def test_http_has_the_texts_bounds_and_choices_of_the_fields():
    schema = ParseOptions.model_json_schema()["properties"]
    for name in FIELDS.keys() - OUTSIDE_PARSE.keys():
        assert schema[name]["description"].startswith(FIELDS[name].help)
    risk, mode = (schema[name]["anyOf"][0] for name in ("risk", "mode"))
    assert (risk["exclusiveMinimum"], risk["exclusiveMaximum"]) == (0, 1)
    assert mode["enum"] == ["validity", "exact", "target"]
    assert [kind.get("type") for kind in schema["block_tokens"]["anyOf"]] == ["integer", "string", "null"]


def test_options_have_the_defaults_of_the_fields():
    found = []

    @with_settings(max_new_tokens=8)
    def command(settings: GenerationSettings) -> None:
        found.append(settings)

    parameters = inspect.signature(command).parameters
    command(**{name: parameter.default for name, parameter in parameters.items()})
    command(**{name: parameter.default for name, parameter in parameters.items()} | {"temperature": 0.5, "seed": 3})
    assert found[0] == GenerationSettings(8)
    assert (found[1].resume_sampling, found[1].draft_sampling) == (Sampling(0.5, seed=3), Sampling(0.5, seed=3))


def test_a_new_field_is_checked_by_its_bounds():
    assert setting_fields(More)["new_limit"].help == "A new setting."
    assert More(new_limit=2).override(new_limit=4).new_limit == 4
    for value in (0, True, "3"):
        with pytest.raises(SettingsError, match=r"new_limit is .*; it must be a whole number of at least 1"):
            More(new_limit=value)


def test_a_benchmark_refuses_the_settings_that_it_does_not_measure():
    for settings in ({"risk": 0.1}, {"mode": "exact"}, {"stop": ("x",)}, {"resume_sampling": Sampling(1.0)}):
        (name,) = settings
        with pytest.raises(ParseError, match=f"a benchmark does not take {name}: "):
            BenchSettings(generation=GenerationSettings(**settings))
