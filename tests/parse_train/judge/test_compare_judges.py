"""The table of judges: figures by hand, and the command from trainings of every form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parse_infer.models.decoder import Decoder
from parse_train.__main__ import main as train
from parse_train.judge.metrics import ScoredDrafts
from tests.parse_train.judge.accepted_prefixes import accept
from tools.compare_judges import main, score
from tools.comparison_table import compare_judges, false_accepts_at, oracle_acceptance

LABELS = [[True, True], [True, False, False], [False]]
CUTS = [[4, 10], [5, 10, 15], [5]]
DRAFTS = ScoredDrafts.from_rows([[0.9, 0.8], [0.9, 0.6, 0.2], [0.3]], LABELS, CUTS)
PROBLEMS = ["a", "a", "b"]


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.comparison_table.RESAMPLES", 100)


def test_a_perfect_judge_keeps_what_stands_before_the_first_error() -> None:
    assert oracle_acceptance(DRAFTS) == pytest.approx((10 + 5 + 0) / 30)


def test_false_accepts_are_compared_at_the_same_share_of_kept_tokens() -> None:
    # Kept and wrong: at 0.9 9 of 30 and none, at 0.8 15 and none, at 0.6 20 and one of three drafts.
    thresholds = np.array([0.2, 0.3, 0.6, 0.8, 0.9, 1.0])
    assert false_accepts_at(DRAFTS, 0.5, thresholds) == pytest.approx(0)
    assert false_accepts_at(DRAFTS, 20 / 30, thresholds) == pytest.approx(1 / 3)
    assert false_accepts_at(DRAFTS, 17.5 / 30, thresholds) == pytest.approx(1 / 6)
    exact = accept(DRAFTS, 0.6)
    assert exact.tokens.sum() == 20 and exact.wrong.sum() == 1


@pytest.mark.slow
def test_judges_on_any_scale_are_compared_with_intervals_over_problems() -> None:
    rng = np.random.default_rng(0)
    labels = [[bool(x) for x in np.arange(3) < rng.integers(0, 5)] for _ in range(80)]
    noise = rng.standard_normal((80, 3))
    good = [[2.0 * ok + e for ok, e in zip(row, es, strict=True)] for row, es in zip(labels, noise, strict=True)]
    bad = noise.tolist()
    cuts = [[5, 10, 15]] * 80
    problems = [f"p{i // 4}" for i in range(80)]
    judges = {
        "good": ScoredDrafts.from_rows(good, labels, cuts),
        "the same in hundreds": ScoredDrafts.from_rows([[100 * x for x in row] for row in good], labels, cuts),
        "bad": ScoredDrafts.from_rows(bad, labels, cuts),
    }
    found = compare_judges(judges, problems, acceptance=0.4)
    assert found["good"] == found["the same in hundreds"] == compare_judges(judges, problems, 0.4)["good"]
    assert found["good"]["auroc"] > 0.85 > 0.6 > found["bad"]["auroc"]
    assert found["good"]["false_accepts"] < found["bad"]["false_accepts"]
    for figures in found.values():
        for name in ("auroc", "auprc", "first_error_f1", "false_accepts"):
            low, high = figures[f"{name}_ci"]
            assert low < figures[name] < high
    wide = figures["auroc_ci"]
    alone = compare_judges({"bad": judges["bad"]}, [str(i) for i in range(80)], 0.4)["bad"]["auroc_ci"]
    assert alone != wide  # drafts of one problem stay together


def test_a_figure_that_has_no_value_is_none() -> None:
    right = ScoredDrafts.from_rows([[0.9], [0.8]], [[True], [True]], [[3], [4]])
    figures = compare_judges({"j": right}, ["a", "b"], 0.5)["j"]
    assert figures["auroc"] is figures["auroc_ci"] is figures["first_error_f1"] is None
    assert figures["false_accepts"] == 0
    assert compare_judges({"j": DRAFTS}, ["a"] * 3, 0.5)["j"]["auroc_ci"] is None


def test_a_judge_is_compared_on_drafts_outside_its_range(make_model, random_adapter, tokenizer) -> None:
    model = make_model("llama")
    judge = random_adapter(model, logprobs=True)
    lm = SimpleNamespace(decoder=Decoder(model, [1]), tokenizer=tokenizer)
    example = SimpleNamespace(context_ids=[5, 6], draft_ids=[*range(20, 36)], cuts=[8, 16], labels=[True, True])
    inside = score(judge, lm, SimpleNamespace(examples=[example]), "").scores
    judge.config.logprobs["usual"] = {"8": [[0.0] * 7, [0.0] * 7]}  # no draft is like that
    assert np.array_equal(inside, score(judge, lm, SimpleNamespace(examples=[example]), "").scores)


@pytest.mark.slow
def test_every_form_is_trained_and_compared(training_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Probe alone, token doubt alone and both, with the rivals that this data allows."""
    recipe = str(training_folder / "recipe.yaml")
    forms = {"both": [], "probe": ["--token_rank", "0"], "doubt": ["--probe_text", ""]}
    folders = []
    for name, options in forms.items():
        output = training_folder / "forms" / name
        few = ["--max_steps", "1", "--save_steps", "1"]
        assert train([recipe, "--output_dir", str(output), *few, *options]) == 0
        folders.append(str(output / "adapter"))
    out = training_folder / "judges.json"
    command = [recipe, "--adapters", *folders, "--out", str(out), "--cost_drafts", "2", "--cost_rounds", "1"]
    assert main([*command, "--acceptance", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "no KL judge among the baselines" in printed  # rows without a build
    result = json.loads(out.read_text())
    assert list(result["judges"]) == [
        "probe and token doubt, LoRA rank 4, token rank 64",
        "probe alone, LoRA rank 4",
        "token doubt alone, rank 64",
        "zero-shot judge",
        "log-probability of the segment",
        "lowest log-probability so far",
    ]
    assert all(figures["cost"] > 0 and 0 <= figures["auroc"] <= 1 for figures in result["judges"].values())
    assert all(name in printed for name in result["judges"])
    assert result["acceptance"] == 0.5 and 0 < result["oracle_acceptance"] < 1
    assert result["environment"]["problems"] == 4 and "compare" in result["environment"]["command"]

    served = [*command, "--acceptance", "0.5", "--risk_temperature", "0.3", "--baselines", "false"]
    assert main(served) == 2
    assert "risk_temperature is 0.3, but the held-out drafts were sampled at" in capsys.readouterr().err
    assert main([*served, "--all_drafts", "true"]) == 0
    assert json.loads(out.read_text())["environment"]["drafts"] == result["environment"]["drafts"]

    assert main([*command, "--acceptance", "0.5", "--seed", "1"]) == 2
    assert "was trained with seed 3, but this recipe gives 1" in capsys.readouterr().err
    assert main([recipe]) == 2
    assert "name at least one exported adapter" in capsys.readouterr().err
