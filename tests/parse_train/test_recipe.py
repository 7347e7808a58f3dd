"""Recipes: keys are fields, the command line overrides them, mistakes are one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from data_tools.recipe_parser import parse_recipe
from parse_train.__main__ import main
from parse_train.judge.config import NOT_SUPPORTED
from parse_train.judge.stream.config import StreamTrainingConfig
from parse_train.recipe import load_recipe
from parse_train.training_config import TrainingConfig

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(REPOSITORY.glob("recipes/**/train.yaml"))
TRAININGS = sorted(path for path in REPOSITORY.glob("recipes/**/*.yaml") if "\nrecipe: " in path.read_text())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe: stream\nstart_from: some/adapter\ndata: build\noutput_dir: out\nlearning_rate: 3e-4\n")
    return path


def parse(recipe: Path, *overrides: str) -> StreamTrainingConfig:
    (config,) = parse_recipe(recipe, ["--report_to", "none", *overrides], [StreamTrainingConfig], "parse_train")
    return config


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_for_machines_that_have_it(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fast: bool
) -> None:
    monkeypatch.setattr("parse_train.training_config.multiplies_in_16_bits", lambda device: fast)
    assert parse(recipe, "--bf16", "--use_cpu").bf16 == fast
    assert ("bf16: this CPU" in capsys.readouterr().out) != fast


def test_keys_are_fields_and_the_command_line_wins(recipe: Path) -> None:
    config = parse(
        recipe, "--lora-rank", "8", "--cut_policy", "{kind: sentence}", "--lora_target_modules", "q_proj", "o_proj"
    )
    assert config.learning_rate == 3e-4  # YAML reads 3e-4 as text; the field's type decides
    assert (config.lora_rank, config.cut_policy) == (8, {"kind": "sentence"})
    assert config.lora_target_modules == ["q_proj", "o_proj"]
    assert parse(recipe, "--learning_rate", "1e-2").learning_rate == 1e-2
    assert config.adapter_dir == "out/adapter"


def test_an_option_that_transformers_does_not_have_yet_stops_no_training(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NOT_SUPPORTED, "an_option_of_later_versions", "it breaks the training")
    parse(recipe)


def test_environment_variables_come_from_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSE_TEST_VARIABLE", "before")
    recipe.write_text(recipe.read_text() + "env: {PARSE_TEST_VARIABLE: 7}\n")
    parse(recipe)
    assert os.environ["PARSE_TEST_VARIABLE"] == "7"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("learning_rat: 1", "unknown key learning_rat; did you mean 'learning_rate'?"),
        ("lora_rank: many", "argument --lora_rank/--lora-rank: invalid int value: 'many'"),
        ("lora_rank: 1.5", "invalid int value: '1.5'"),
        ("lora_rank: -1", "lora_rank is -1; it must be at least 0"),
        ("eval_share: 1.5", "eval_share is 1.5; it must lie between 0 and 1"),
        ("cut_policy: {kind: word}", "unknown cut policy 'word'"),
        ("cut_policy:", "cut_policy is empty: give it a value, or leave the key out"),
        ("seed: [1, 2]", "seed is [1, 2]; it takes one value"),
        ("label_smoothing_factor: 0.1", "label_smoothing_factor is not supported here: the head learns yes or no"),
        ("fp16: true", "fp16 is not supported here: use bf16"),
        ("save_only_model: true", "save_only_model is not supported"),
        ("recipe: streem", "unknown recipe streem; did you mean 'stream'?"),
        ("start_from: ''", "the recipe needs the key start_from"),
        ("a: [", "is not valid YAML in line"),
        ("env: 3", "env must be a mapping"),
    ],
)
def test_a_mistake_is_one_sentence(recipe: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str) -> None:
    values = [text for text in recipe.read_text().splitlines() if text.split(":")[0] != line.split(":")[0]]
    recipe.write_text("\n".join([*values, line]) + "\n")
    assert main([str(recipe)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lora-rnk", "3"], "unknown key lora_rnk; did you mean 'lora_rank'?"),
        (["--lora_rnk=3"], "did you mean 'lora_rank'?"),
        (["stray"], "'stray' follows no option"),
        (["--start_from", "/nowhere/adapter"], "There is no folder '/nowhere/adapter'"),
        (["--start_from", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_on_the_command_line(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert main([str(recipe), "--report_to", "none", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--lora_rank", "3"], ["/nowhere.yaml"]])
def test_without_a_recipe(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert "recipe" in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "stream" in capsys.readouterr().out


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_recipe_says_how_it_is_run(path: Path) -> None:
    command = next(line for line in path.read_text().splitlines() if line.startswith("#   accelerate launch "))
    assert command.endswith(f" {path.relative_to(REPOSITORY)}")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_recipes_of_the_repository_are_programs(path: Path) -> None:
    assert path.stat().st_mode & stat.S_IXUSR
    assert path.read_text().splitlines()[0] == "#!/usr/bin/env -S python -m parse_train"
    _, config = load_recipe(path, ["--report_to", "none"])
    given: dict[str, Any] = yaml.safe_load(path.read_text())
    assert config.learning_rate == float(given["learning_rate"])
    sizes = given.keys() & {"lora_rank", "max_length"}
    assert sizes and all(getattr(config, key) == given[key] for key in sizes)


ZERO_3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("name", "environment", "options"),
    [
        ("ZeRO-3", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {}),
        ("ZeRO-3", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "FILE"}, {}),
        ("ZeRO-3", {}, {"deepspeed": "FILE"}),
        ("ZeRO-3", {}, {"deepspeed": json.dumps(ZERO_3)}),
        ("ZeRO-3", {}, {"deepspeed": ZERO_3}),
        ("FSDP", {"ACCELERATE_USE_FSDP": "true"}, {}),
        ("FSDP", {}, {"fsdp": "full_shard"}),
    ],
    ids=["accelerate", "accelerate, file", "file", "text", "mapping", "accelerate, FSDP", "FSDP"],
)
def test_what_shards_the_target_is_refused_before_any_work(
    name: str, environment: dict[str, str], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the processes meet, whether `accelerate launch` or a key of the recipe asks for it."""
    (tmp_path / "zero.json").write_text(json.dumps(ZERO_3))
    for key, value in environment.items():
        monkeypatch.setenv(key, value.replace("FILE", str(tmp_path / "zero.json")))
    options = {k: str(tmp_path / "zero.json") if v == "FILE" else v for k, v in options.items()}
    monkeypatch.setattr(StreamTrainingConfig, "device", property(lambda config: pytest.fail("the processes meet")))
    with pytest.raises(ValueError, match=f"{name} shards .*recipes/accelerate/gpu-ddp.yaml") as refused:
        StreamTrainingConfig(start_from="a", data="d", output_dir="o", report_to="none", use_cpu=True, **options)
    assert "\n" not in str(refused.value)


def test_gpus_are_started_as_cpus_are_in_the_tests() -> None:
    """What cannot be run here differs from what is run in device, number type and number of processes alone."""
    folder = REPOSITORY / "recipes" / "accelerate"
    for gpu, cpu in (("gpu-ddp", "cpu-2"), ("gpu-deepspeed-zero2", "deepspeed-zero2")):
        ours, tested = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in (gpu, cpu))
        assert (ours.pop("use_cpu"), ours.pop("mixed_precision"), ours.pop("num_processes")) == (False, "bf16", 8)
        assert (tested.pop("use_cpu"), tested.pop("mixed_precision"), tested.pop("num_processes")) == (True, "no", 2)
        assert ours == tested, gpu


def test_pages_and_recipes_name_plain_ddp_before_deepspeed() -> None:
    guide = REPOSITORY / "docs" / "guide" / "train-a-judge.md"
    for path in [guide, *(REPOSITORY / "recipes" / "real").glob("*.yaml")]:
        text = path.read_text()
        ddp, zero = text.find("gpu-ddp.yaml"), text.find("gpu-deepspeed-zero2.yaml")
        assert zero < 0 or 0 <= ddp < zero, path
    assert "gpu-ddp.yaml" in (REPOSITORY / "recipes" / "real" / "train.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "4"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"ACCELERATE_MIXED_PRECISION": ""}, False),
    ],
)
def test_the_single_thread_that_accelerate_gives_a_cpu_is_noted(change, noted, monkeypatch, capsys):
    names = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"} | change
    for name, value in names.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 0)
    TrainingConfig(output_dir="runs/x", use_cpu=True)
    assert ("OMP_NUM_THREADS=4 before the command" in capsys.readouterr().out) is noted
