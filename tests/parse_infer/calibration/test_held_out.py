"""Training problems of judge and models are known by their prompts, and kept out of measurements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.build_config import BuildConfig
from data_tools.recipe_parser import parse_recipe
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import prompt_id
from parse_infer.calibration.held_out import leave_out_learnt, prompt_hash
from parse_infer.cli.model_options import ModelOptions
from parse_infer.engine import ParseEngine
from parse_infer.models.names import collection_folder
from parse_infer.models.train_problems import TRAIN_PROBLEMS, write_train_problems

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: Any


PROBLEM_LIST = [Problem(f"p{i}", f"What is {i} and {i}?") for i in range(10)]


def test_a_prompt_is_known_in_every_form_that_it_is_written_in() -> None:
    text = "What is 1 and 1?"
    message = {"role": "user", "content": text}
    assert prompt_hash(text) == prompt_hash([message]) == prompt_hash([dict(reversed(message.items()))])
    assert prompt_id(text) == f"prompt-{prompt_hash(text)}", "tasks and adapters must not disagree"
    system = {"role": "system", "content": "Be brief."}
    others = [f"{text} ", [system, message], [message, message], [{**message, "role": "assistant"}]]
    assert len({prompt_hash(text), *map(prompt_hash, others)}) == 5


def test_training_problems_are_found_under_other_ids() -> None:
    """`Mixture` puts a number before each id; the prompts stay."""
    options: dict[str, Any] = {"names": ["chain_sum"]}
    learnt = {prompt_hash(p.prompt) for p in load_task("reasoning_gym", **options).problems("train", limit=20)}
    mixture = load_task("mixture", parts=[{"task": "reasoning_gym", **options}])
    with pytest.raises(ValueError, match="20 of the 20 problems are among those that the adapter, target or"):
        leave_out_learnt(list(mixture.problems("train", limit=20)), learnt)


def test_a_prompt_that_comes_again_now_and_then_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    learnt = {prompt_hash(PROBLEM_LIST[3].prompt)}
    assert leave_out_learnt(PROBLEM_LIST, learnt) == PROBLEM_LIST[:3] + PROBLEM_LIST[4:]
    said = capsys.readouterr()
    assert "1 of the 10 problems" in said.err and "p3" in said.err and not said.out
    assert leave_out_learnt(PROBLEM_LIST, set()) == PROBLEM_LIST and not capsys.readouterr().err


@pytest.mark.slow
def test_what_the_models_learnt_is_left_out_too(make_model, tokenizer, tmp_path):
    """An aligned draft model agrees with its target on the prompts of its training more than on others."""
    for seed, name in enumerate(("target", "draft")):
        make_model("llama", seed=seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        write_train_problems(tmp_path / name, [name[0] * 16])
    target, draft = tmp_path / "target", tmp_path / "draft"
    learnt = {"t" * 16, "d" * 16}
    assert ParseEngine.from_pretrained(target, draft, judge="min_p:ratio=0.3").train_problems == learnt
    assert ModelOptions(target=str(target), draft=str(draft), judge="min_p:ratio=0.3").train_problems == learnt
    adapter = ModelOptions().train_problems
    assert ParseEngine.from_pretrained("zoo:target", draft, "zoo:adapter").train_problems == adapter | {"d" * 16}


def test_an_adapter_that_lists_ids_is_still_protected_as_far_as_ids_go() -> None:
    assert leave_out_learnt(PROBLEM_LIST, {"p3"}) == PROBLEM_LIST[:3] + PROBLEM_LIST[4:]


@pytest.mark.parametrize(("adapter", "recipe"), [("adapter", "data"), ("smollm2-adapter", "smollm2/data")])
def test_the_embedded_adapters_know_the_prompts_of_their_recipe(adapter: str, recipe: str) -> None:
    learnt = frozenset((collection_folder() / adapter / TRAIN_PROBLEMS).read_text().split())
    assert all(len(line) == 16 and int(line, 16) >= 0 for line in learnt)
    (config,) = parse_recipe(ROOT / "recipes" / f"{recipe}.yaml", [], [BuildConfig], "build")
    # To leave out what other seeds give takes minutes; without that most of these problems are known all the same.
    options = {key: value for key, value in config.task_options.items() if key != "exclude_seeds"}
    task = load_task("mixture", parts=[{"task": config.task, **options}])
    problems = list(islice(task.problems("train", config.seed), 60))
    with pytest.raises(ValueError, match=r"\d\d of the 60 problems are among those"):
        leave_out_learnt(problems, learnt)
    held_out = list(islice(task.problems("validation", config.seed), 60))
    assert leave_out_learnt(held_out, learnt) == held_out
