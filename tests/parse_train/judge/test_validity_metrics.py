"""Metrics and the threshold against values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from parse_infer.calibration.risk import exact_bound
from parse_infer.settings.acceptance import ACCEPT_NOTHING, maximal_valid_prefix
from parse_train.judge.data import ValidityDataset, problem_names
from parse_train.judge.figures import acceptance_figure, reliability_diagram
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.metrics import (
    ScoredDrafts,
    acceptance_at_risk,
    acceptance_curve,
    domain_metrics,
    expected_calibration_error,
    first_error_f1,
    headline_metrics,
    score_thresholds,
)
from parse_train.judge.pass_risk import choose_threshold, one_of_each
from parse_train.judge.training import served_drafts
from tests.parse_train.judge.accepted_prefixes import accept

# Three drafts: right throughout; first error at cut 1; wrong from the start.
DRAFTS = ScoredDrafts.from_rows(
    scores=[[0.9, 0.8], [0.9, 0.6, 0.2], [0.3]],
    labels=[[True, True], [True, False, False], [False]],
    cuts=[[4, 10], [5, 10, 15], [5]],
)


def random_drafts(seed: int, n: int = 200) -> ScoredDrafts:
    rng = np.random.default_rng(seed)
    scores, labels, cuts = [], [], []
    for _ in range(n):
        k = int(rng.integers(1, 6))
        wrong = int(rng.integers(0, 8))
        labels.append([i < wrong for i in range(k)])
        scores.append([float(np.clip((0.75 if ok else 0.3) + 0.2 * rng.standard_normal(), 0, 1)) for ok in labels[-1]])
        cuts.append(np.cumsum(rng.integers(1, 9, k)).tolist())
    return ScoredDrafts.from_rows(scores, labels, cuts)


def test_padding_counts_nowhere() -> None:
    scores, labels = DRAFTS.flat
    assert scores.tolist() == [0.9, 0.8, 0.9, 0.6, 0.2, 0.3]
    assert labels.tolist() == [1, 1, 1, 0, 0, 0]
    logits = np.array([[0.0, -100.0]])
    drafts = ScoredDrafts.from_prediction(logits, (np.array([[1, -100]]), np.array([[3, -100]])))
    assert drafts.flat[0].tolist() == [0.5]


def test_acceptance_by_hand() -> None:
    at_half = accept(DRAFTS, 0.5)
    assert at_half.accepted.tolist() == [2, 2, 0]
    assert at_half.tokens.tolist() == [10, 10, 0]
    assert at_half.wrong.tolist() == [False, True, False]
    wrong, acceptance = acceptance_curve(DRAFTS, [0.0, 0.5, 0.7, 0.95])
    assert wrong.tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert acceptance.tolist() == pytest.approx([1, 20 / 30, 15 / 30, 0])
    assert acceptance_at_risk(DRAFTS, 0.05) == pytest.approx(0.5)
    assert acceptance_at_risk(DRAFTS, 0.4) == pytest.approx(20 / 30)


def test_acceptance_is_the_policy_of_inference() -> None:
    drafts = random_drafts(0)
    for threshold in (0.0, 0.31, 0.5, 0.77, 1.01):
        expected = [
            maximal_valid_prefix(row[real].tolist(), threshold)
            for row, real in zip(drafts.scores, drafts.real, strict=True)
        ]
        found = accept(drafts, threshold)
        assert found.accepted.tolist() == expected
        wrong, acceptance = acceptance_curve(drafts, [2.0, threshold])  # in any order
        assert wrong[1] == pytest.approx(found.wrong.mean())
        assert acceptance[1] == pytest.approx(found.tokens.sum() / drafts.cuts.max(axis=1).sum())


def test_first_error_f1_by_hand() -> None:
    # At 0.5: draft 0 "no error" (right), draft 1 predicted 2 instead of 1 (wrong), draft 2 predicted 0 (right).
    result = first_error_f1(DRAFTS, 0.5)
    assert result == pytest.approx({"accuracy_erroneous": 0.5, "accuracy_correct": 1.0, "f1": 2 * 0.5 / 1.5})
    assert first_error_f1(DRAFTS, 0.7)["f1"] == pytest.approx(1.0)
    assert first_error_f1(DRAFTS, 0.95)["f1"] == 0.0
    only_right = ScoredDrafts.from_rows([[0.9]], [[True]], [[3]])
    assert first_error_f1(only_right, 0.5) == {"accuracy_correct": 1.0}


def test_headline_figures_by_hand() -> None:
    result = headline_metrics(DRAFTS, 0.5)
    # Of 9 pairs (valid, not valid) all are in order: 0.9, 0.8, 0.9 against 0.6, 0.2, 0.3.
    assert result["auroc"] == 1.0
    assert result["auprc"] == result["auprc_error"] == pytest.approx(1.0)
    squares = [0.1, 0.2, 0.1, 0.6, 0.2, 0.3]
    assert result["brier"] == pytest.approx(sum(x * x for x in squares) / 6)
    assert result["best_first_error_f1"] == pytest.approx(1.0)
    assert result["valid_share"] == 0.5


def test_figures_of_one_class_alone_are_left_out() -> None:
    result = headline_metrics(ScoredDrafts.from_rows([[0.9, 0.4]], [[True, True]], [[3, 5]]))
    assert "auroc" not in result
    assert result["brier"] == pytest.approx((0.01 + 0.36) / 2)


def test_calibration_error_by_hand() -> None:
    probabilities = np.array([0.1, 0.2, 0.9, 0.8])
    labels = np.array([0, 1, 1, 1])
    # Two bins: [0.1, 0.2] has mean 0.15 and frequency 0.5; [0.8, 0.9] has 0.85 and 1.
    assert expected_calibration_error(probabilities, labels, n_bins=2) == pytest.approx(0.5 * 0.35 + 0.5 * 0.15)
    assert expected_calibration_error(np.array([1.0]), np.array([1])) == 0.0


def test_clopper_pearson() -> None:
    # No error in n trials: 1 - delta^(1/n). All errors: 1. A textbook value: 5 of 50 at 95 % one-sided.
    assert exact_bound(0, 45, 0.1) == pytest.approx(1 - 0.1 ** (1 / 45))
    assert exact_bound(3, 3, 0.1) == 1.0
    bound = exact_bound(5, 50, 0.05)
    tail = sum(math.comb(50, i) * bound**i * (1 - bound) ** (50 - i) for i in range(6))
    assert tail == pytest.approx(0.05)


def test_the_threshold_is_the_laxest_that_is_shown_to_be_safe() -> None:
    drafts = random_drafts(1, n=800)
    risk = choose_threshold(drafts, alpha=0.1, delta=0.1)
    assert risk.accepts and risk.warning() is None
    assert risk.bound is not None and risk.false_accept_rate < risk.bound <= 0.1
    assert risk.acceptance_rate > 0.2
    stricter = choose_threshold(drafts, alpha=0.05, delta=0.1)
    assert stricter.threshold > risk.threshold
    assert choose_threshold(drafts, alpha=0.1, delta=0.01).threshold >= risk.threshold


def test_labels_of_whole_drafts_bound_no_pass() -> None:
    """A pass may accept beyond an error and stop before the end, where such labels would count it as right."""
    whole = ScoredDrafts.from_rows([[0.9], [0.1]] * 200, [[True], [False]] * 200, [[7], [9]] * 200)
    risk = choose_threshold(whole, alpha=0.1, delta=0.1)
    assert risk.threshold > 1 and not risk.accepts and "parse-infer calibrate" in str(risk.warning())


@pytest.mark.slow
def test_the_threshold_keeps_its_promise() -> None:
    """Over many validation sets, the share whose true false-accept rate exceeds alpha is at most delta."""
    everything = random_drafts(2, n=20_000)
    alpha, delta, broken, trials = 0.1, 0.2, 0, 100
    for seed in range(trials):
        rows = np.random.default_rng(seed).choice(len(everything.labels), 300, replace=False)
        sample = ScoredDrafts(everything.scores[rows], everything.labels[rows], everything.cuts[rows])
        risk = choose_threshold(sample, alpha, delta)
        broken += bool(accept(everything, risk.threshold).wrong.mean() > alpha)
    assert broken <= trials * delta + 3 * (trials * delta * (1 - delta)) ** 0.5  # three standard deviations
    assert broken > 0  # the bound is not idle either


def drafts_of_problems(rng: np.random.Generator, n_problems: int, n_drafts: int) -> tuple[ScoredDrafts, list[str]]:
    """Drafts whose errors the judge sees in most problems, and misses in all drafts of the others."""
    scores, labels, owners = [], [], []
    for problem in range(n_problems):
        hard, blind = rng.random() < 0.4, rng.random()
        for _ in range(n_drafts):
            wrong = hard and rng.random() < 0.95
            labels.append([True, not wrong])
            scores.append([0.99, float(np.clip(blind + 0.02 * rng.standard_normal(), 0.01, 0.98)) if wrong else 0.985])
            owners.append(f"p{problem}")
    return ScoredDrafts.from_rows(scores, labels, [[4, 8]] * len(labels)), owners


@pytest.mark.slow
def test_several_drafts_of_a_problem_do_not_break_the_bound() -> None:
    """Calibrations with a known truth: one draft per problem keeps the confidence, all drafts would not."""
    truth, _ = drafts_of_problems(np.random.default_rng(99), 4_000, 1)
    alpha, delta, trials = 0.1, 0.1, 80
    broken = {"one": 0, "all": 0}
    for seed in range(trials):
        drafts, owners = drafts_of_problems(np.random.default_rng(seed), 100, 6)
        for name, sample in (("one", drafts.select(one_of_each(owners, seed))), ("all", drafts)):
            risk = choose_threshold(sample, alpha, delta)
            broken[name] += bool(acceptance_curve(truth, [risk.threshold])[0][0] > alpha)
    limit = trials * delta + 3 * (trials * delta * (1 - delta)) ** 0.5  # three standard deviations
    assert 0 < broken["one"] <= limit < broken["all"], broken


def test_one_draft_of_each_problem_is_chosen_without_a_look_at_it() -> None:
    owners = [f"p{i % 7}" for i in range(70)]
    chosen = [one_of_each(owners, seed) for seed in range(300)]
    assert all(
        sorted(owner for owner, one in zip(owners, row, strict=True) if one) == sorted(set(owners)) for row in chosen
    )
    share = np.mean(chosen, axis=0)
    assert chosen[0] == one_of_each(owners, 0) and share.min() > 0.02 and share.max() < 0.2
    assert problem_names([("a", "x"), ("b", "y"), ("c", "x"), ("b", "z")]) == ["a", "b", "a", "b"]


def test_the_drafts_of_the_bound_choose_no_checkpoint() -> None:
    with pytest.raises(ValueError, match="load_best_model_at_end is not supported here: the held-out drafts would"):
        LogprobTrainingConfig(
            data="d", output_dir="o", use_cpu=True, load_best_model_at_end=True, save_strategy="epoch"
        )


def test_without_a_safe_threshold_nothing_is_accepted() -> None:
    risk = choose_threshold(DRAFTS, alpha=0.05, delta=0.1)
    assert risk.threshold == ACCEPT_NOTHING and np.float32(risk.threshold) > 1
    assert risk.bound is None and not risk.accepts
    assert "at least 45 are necessary" in str(risk.warning())
    assert accept(DRAFTS, risk.threshold).accepted.tolist() == [0, 0, 0]


def test_the_threshold_comes_from_the_drafts_that_will_be_served() -> None:
    examples = [SimpleNamespace(length=1, temperature=t) for t in (0.0, 0.7, 0.0, None)]
    data = ValidityDataset(examples)
    config = LogprobTrainingConfig(data="d", output_dir="o", use_cpu=True)
    assert served_drafts(config, data) == [True] * 4
    config.risk_temperature = 0.0
    served = served_drafts(config, data)
    assert served == [True, False, True, False]
    drafts = ScoredDrafts.from_rows([[0.1], [0.2], [0.3], [0.4]], [[True]] * 4, [[1]] * 4)
    assert drafts.select(served).scores.tolist() == [[0.1], [0.3]]
    config.risk_temperature = 0.3
    with pytest.raises(ValueError, match=r"risk_temperature is 0.3, but the held-out drafts were sampled at 0.0, 0.7"):
        served_drafts(config, data)


def test_each_domain_has_an_auroc_of_its_own() -> None:
    scores, labels = [[0.9, 0.8], [0.7], [0.2, 0.1], [0.3]], [[True, False], [True], [True, False], [False]]
    drafts = ScoredDrafts.from_rows(scores, labels, [[1, 2], [1], [1, 2], [1]])
    assert domain_metrics(drafts, ["a", "a", "b", "b"]) == {"auroc_a": 0.5, "auroc_b": 0.5}
    assert domain_metrics(drafts, ["a", "c", "a", None]) == {"auroc_a": 0.75}, "all of c are valid"
    assert domain_metrics(drafts, ["a"] * 4) == domain_metrics(drafts, [None] * 4) == {}


def test_thresholds_cover_every_decision() -> None:
    thresholds = score_thresholds(DRAFTS)
    assert thresholds[0] == 0.2 and thresholds[-1] > 0.9
    assert acceptance_curve(DRAFTS, thresholds[-1:])[1] == 0


def test_figures_are_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    reliability_diagram(DRAFTS).savefig(tmp_path / "a.png")
    acceptance_figure({"trained": DRAFTS, "other": DRAFTS}, 0.05, (0.1, 0.5)).savefig(tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 1000 and (tmp_path / "b.png").stat().st_size > 1000
