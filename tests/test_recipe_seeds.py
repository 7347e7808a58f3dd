"""The stages of a pair learn from problems of different seeds, or what is held out from one is known to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).parents[1] / "recipes"
# Vocabularies are left out, as they learn no answers, and so are heads for token drafting, which change no answer and
# are evaluated on the validation split.
PAIRS = {
    "embedded": ["zoo/base.yaml", "zoo/target.yaml", "zoo/draft.yaml", "data.yaml"],
    "smollm2": ["smollm2/target.yaml", "smollm2/draft.yaml", "smollm2/data.yaml"],
}


def recipe(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((RECIPES / name).read_text())
    return values


@pytest.mark.parametrize("pair", PAIRS)
def test_the_stages_of_a_pair_have_seeds_of_their_own(pair: str) -> None:
    seeds = {name: recipe(name)["seed"] for name in PAIRS[pair]}
    assert {recipe(name)["task"] for name in PAIRS[pair]} == {"gsm_symbolic"}
    assert len(set(seeds.values())) == len(seeds), f"stages share problems: {seeds}"


def test_the_embedded_adapter_learns_from_no_prompt_of_its_models() -> None:
    excluded = recipe("data.yaml")["task_options"]["exclude_seeds"]
    tokens_of_a_problem = 100  # 107 on average
    for name in PAIRS["embedded"][:-1]:
        values = recipe(name)
        used = values["max_steps"] * values["per_device_train_batch_size"] * values["row_length"] / tokens_of_a_problem
        assert excluded[values["seed"]] > 0.8 * used, f"{name}: at most {used:.0f} problems, less its drills"
