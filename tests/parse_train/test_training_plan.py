"""A plan counts what a training really keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from data_tools.recipe_parser import read_recipe
from parse_train.__main__ import main
from parse_train.training_plan import load_config_of, plan_training
from tests.parse_train.qwen3_outlines import qwen3_outlines

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def recipe(training_folder: Path, tmp_path: Path) -> list[str]:
    return [str(training_folder / "recipe.yaml"), "--output_dir", str(tmp_path), "--max_length", "48"]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes" / "real").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_of_the_real_pair_state_their_memory_and_time(path: Path, tmp_path: Path) -> None:
    """The figures in the head of each recipe are the plan's."""
    names, recipe = qwen3_outlines(tmp_path), read_recipe(path)
    models = [key for key in ("target", "draft", "model") if key in recipe]
    overrides = [part for key in models for part in (f"--{key}", names[recipe[key]])]
    if "recipe" in recipe:
        overrides += ["--use_cpu", "true", "--report_to", "none"]
    stated = re.search(r"`--plan`: ([\d.]+) GB(?:, ([\d.]+) TFLOP a step)?", path.read_text())
    assert stated is not None, "the recipe does not say what memory it needs"
    found = plan_training(load_config_of(path, overrides))
    assert float(stated[1]) == pytest.approx(found.memory / 1e9, abs=0.06)
    if found.step is not None:
        assert float(stated[2]) == pytest.approx(found.step.flops / 1e12, rel=0.01)
    times = re.findall(r"[\d.]+ (?:seconds|minutes|hours)|less than a second", path.read_text())
    planned = "\n".join(found.lines())
    assert times and all(f"take {time}" in planned for time in times)


@pytest.mark.slow
def test_a_plan_is_printed_and_nothing_else_is_done(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parse_infer.models.loading.load_language_model", lambda *_, **__: pytest.fail("weights"))
    assert main([*recipe, "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "memory of one GPU" in printed and "4 drafts a step, 48 tokens" in printed and "48 rows take" in printed
    assert not any(tmp_path.iterdir())


def test_experts_are_not_planned(
    recipe: list[str], make_model: Any, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("mixtral").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    capsys.readouterr()
    options = ["--target", str(tmp_path / "target"), "--lora_target_modules", "q_proj", "v_proj", "--plan"]
    assert main([*recipe, *options]) == 2
    error = capsys.readouterr().err
    assert "the plan counts dense models only" in error and error.count("\n") == 1
