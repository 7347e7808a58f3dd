"""`parse-data plan`: its arithmetic against simulations and values by hand, and the command on a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml

from data_tools.cli import main
from data_tools.labels import plan_run
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.build_plan import (
    Estimate,
    best_block,
    make_plan,
    predict,
    share,
    tokens_to_first_error,
)
from data_tools.labels.plan_run import lowest_temperature
from data_tools.labels.rows import LabelledDraft, check_row, read_rows
from data_tools.labels.summary import summarise_labels
from parse_infer.decoding.block_length import Costs, costs_of
from parse_infer.models.loading import load_language_model


def draft(labels: list[bool], cuts: list[int], **more: Any) -> LabelledDraft:
    row = {"prompt": "How many?", "completions": ["step"] * len(cuts), "labels": labels, "cuts": cuts}
    return check_row(row | {"draft_ids": [1] * cuts[-1], "target_value": 1.0, "temperature": 0.0} | more, "here")


def test_a_share_weighs_problems_by_their_tokens_and_keeps_a_width_at_its_ends() -> None:
    found = share([1, 30, 8], [10, 40, 10])
    assert found.value == 39 / 60 and found.interval[0] < 0.5 < 0.7 < found.interval[1]
    assert share([0, 0], [10, 20]) == Estimate(0.0, (0.0, 0.1))
    assert share([10, 20], [10, 20]) == Estimate(1.0, (0.9, 1.0))


def test_the_hazard_of_drafts_with_and_without_error_is_that_of_a_simulation() -> None:
    assert tokens_to_first_error(draft([True, True], [3, 8])) == 8
    assert tokens_to_first_error(draft([True, False, False], [3, 8, 9])) == 6  # one of tokens 4 to 8
    assert tokens_to_first_error(draft([False], [1])) == 1
    random, hazard, cuts = Random(0), 0.02, list(range(7, 64, 7))
    errors, tokens = 0, 0.0
    for _ in range(5000):
        wrong = next((i for i in range(1, cuts[-1] + 1) if random.random() < hazard), None)
        errors += wrong is not None
        tokens += tokens_to_first_error(draft([wrong is None or cut < wrong for cut in cuts], cuts))
    assert errors / tokens == pytest.approx(hazard, rel=0.05)


def test_the_best_block_is_that_of_a_simulated_loop() -> None:
    costs, survival, random = Costs(0.05, 0.9, 0.02), 0.9, Random(1)

    def simulated(block: int) -> float:
        seconds, tokens = 0.0, 0
        for _ in range(4000):
            accepted = next((i for i in range(block) if random.random() > survival), block)
            tokens += min(accepted + 1, block)  # the target replaces a rejected token
            seconds += costs.forward_s + block * costs.per_token
        return tokens * (costs.forward_s + costs.read_s) / seconds

    block, speedup = best_block(survival, costs)
    assert simulated(block) == pytest.approx(speedup, rel=0.03)
    assert max(simulated(block // 3), simulated(3 * block)) < 0.95 * speedup


def test_predictions_by_hand() -> None:
    gpu = Costs(0.1, 1.0, 0.0)
    assert best_block(1.0, gpu, longest=40) == (40, pytest.approx(40 / (1 + 4)))
    assert best_block(0.0, gpu) == (1, pytest.approx(1 / 1.1))
    found = predict(Estimate(0.9, (0.8, 0.95)), gpu)
    low, high = found.speedup.interval
    assert low == best_block(0.8, gpu)[1] < found.speedup.value < high == best_block(0.95, gpu)[1]
    assert costs_of(1.0, 5.0, 21.0, 16) == Costs(1.0, 4.0, 1.0)
    assert costs_of(1.0, 5.0, 4.9, 16) == Costs(1.0, 5.0, 0.0)  # noise


def test_a_plan_reads_greedy_drafts_and_warns_of_a_weak_target(make_config: Callable[..., BuildConfig]) -> None:
    rows = [
        draft([True, True], [5, 10], problem_id="a", draft_correct=True),
        draft([True, False], [5, 10], problem_id="b", temperature=1.0),
        draft([False, False], [4, 10], problem_id="b", draft_correct=False),
    ]
    rows = [replace(row, where=str(i)) for i, row in enumerate(rows)]
    chosen = lowest_temperature(rows)
    assert [row.where for row in chosen] == ["0", "2"]
    config = make_config(limit=400)
    plan = make_plan(config, summarise_labels(rows), 4, chosen, {"0": 9, "2": 3}, Costs(1e-3, 1e-2, 0.0), 9.0)
    assert plan.target_right.value == 1.0 and plan.draft_right is not None and plan.draft_right.value == 0.5
    assert plan.kept.value == 10 / 20 and plan.greedy_match.value == 12 / 20 and plan.hazard.value == 1 / 12.5
    assert (plan.first_segment_errors, plan.build_hours, plan.build_drafts_with_error) == (0.5, 1.0, 200)
    assert next(iter(plan.speedups)) == "this machine" and not plan.notes
    judge = plan.speedups["this machine"]["perfect_judge"]
    assert judge.speedup.value == pytest.approx(best_block(1 - 1 / 12.5, Costs(1e-3, 1e-2, 0.0), 10)[1])
    same_ratio = plan.speedups["GPU, draft token 1/10 of a forward"]["perfect_judge"]
    assert same_ratio.speedup.value == pytest.approx(judge.speedup.value)

    unsolved = make_plan(
        replace(config, drop_unsolved=True), summarise_labels(rows), 4, chosen, {"0": 9, "2": 3}, None, None
    )
    assert unsolved.target_right.value == 0.5 and unsolved.draft_right is None and unsolved.both_right.value == 0.25
    assert "right in only 50%" in unsolved.notes[0] and unsolved.costs is unsolved.build_hours is None
    assert len(unsolved.speedups) == 3
    sampled = make_config(rollouts=4, rollout_temperature=0.7, margin=0.25, drop_unsolved=True)
    notes = make_plan(sampled, summarise_labels(rows), 4, chosen, {"0": 9, "2": 3}, None, None).notes
    assert len(notes) == 1 and "drop_unsolved" in notes[0]


@pytest.mark.slow
def test_the_command_builds_once_and_a_build_continues(
    make_config: Callable[..., BuildConfig],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan_run, "_TIMING_S", 0.05)
    config = make_config(problems_per_group=6)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({key: value for key, value in asdict(config).items() if value not in (None, [])}))
    assert main(["plan", str(recipe), "--limit", "6"]) == 0
    assert "perfect judge" in capsys.readouterr().out
    folder = Path(config.output_dir)
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["problems"] == 6 and plan["seconds_per_problem"] > 0 and plan["build_problems"] == 12
    assert all(cost >= 0 for cost in plan["costs"].values()) and plan["costs"]["draft_s"] > 0

    target = load_language_model(config.target, role="target")
    same = total = 0
    for row in lowest_temperature(read_rows(folder)):
        context, ids = target.render(row.prompt), row.draft_ids or []
        logits = target.model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
        same, total = (
            same + sum(a == b for a, b in zip(logits.argmax(-1).tolist(), ids, strict=True)),
            total + len(ids),
        )
    assert plan["greedy_match"]["value"] == pytest.approx(same / total)

    assert main(["plan", str(recipe), "--backend", "openai", "--target_url", "http://x", "--wire", "text"]) == 2
    assert "a plan reads log-probabilities, but wire text sends texts" in capsys.readouterr().err
    first = next((folder / "data").iterdir()).read_bytes()
    assert main(["plan", str(recipe), "--limit", "3"]) == 0  # all that is there
    again = json.loads((folder / "plan.json").read_text())
    unmeasured = plan.keys() - {"costs", "speedups"}
    assert {key: again[key] for key in unmeasured} == {key: plan[key] for key in unmeasured}
    assert main(["build", str(recipe)]) == 0
    files = sorted((folder / "data").iterdir())
    assert len(files) == 2 and files[0].read_bytes() == first
    capsys.readouterr()
    assert main(["plan", str(recipe), "--prefix_labels", "false"]) == 2
    assert "add --prefix_labels true" in capsys.readouterr().err
