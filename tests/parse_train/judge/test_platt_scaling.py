"""Validities become probabilities, and no decision changes."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.logprob_head import LogprobHeadConfig
from parse_infer.judge.verifier import Verifier
from parse_train.judge.figures import reliability_diagram
from parse_train.judge.metrics import ScoredDrafts, expected_calibration_error
from parse_train.judge.platt_scaling import Probabilities, fit_probabilities
from tests.parse_train.judge.accepted_prefixes import accept


def drafts(scale: float, shift: float, n: int = 400, seed: int = 0) -> tuple[ScoredDrafts, list[str]]:
    """A head whose logits would be right if they were multiplied by `scale` and moved by `shift`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2 / scale, (n, 6))
    labels = (rng.random((n, 6)) < 1 / (1 + np.exp(-(scale * logits + shift)))).astype(int)
    cuts = np.tile(np.arange(5, 35, 5), (n, 1))
    labels[::3, 4:], cuts[::3, 4:] = -100, -100  # shorter drafts
    real = labels != -100
    return ScoredDrafts(np.where(real, 1 / (1 + np.exp(-logits)), 0.0), labels, cuts), [f"p{i // 2}" for i in range(n)]


def test_what_is_wrong_with_the_logits_is_found():
    scored, problems = drafts(0.4, 1.0)
    fitted = fit_probabilities(scored, problems)
    assert fitted.scale == pytest.approx(0.4, rel=0.15) and fitted.shift == pytest.approx(1.0, abs=0.2)
    assert fitted.ece < fitted.ece_before / 3
    validity, labels = fitted.of_drafts(drafts(0.4, 1.0, seed=1)[0]).flat  # other drafts of the same head
    assert expected_calibration_error(validity, labels) < 0.05
    assert not fitted.of_drafts(scored).scores[~scored.real].any()


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_the_reliability_diagram_shows_the_cross_validated_error(scale):
    """The error on the drafts of the fit is smaller than the error on others."""
    scored, problems = drafts(scale, 1.0 if scale < 1 else 0.0, n=60)
    fitted = fit_probabilities(scored, problems)
    shown = fitted.left_out(scored)
    assert expected_calibration_error(*shown.flat) == pytest.approx(fitted.ece)
    assert reliability_diagram(shown).axes[0].get_title() == f"ECE {fitted.ece:.3f}"
    assert np.array_equal(shown.labels, scored.labels) and not shown.scores[~scored.real].any()
    in_sample = expected_calibration_error(*fitted.of_drafts(scored).flat)
    assert fitted.changes == (in_sample != fitted.ece)


def test_no_decision_changes():
    scored, problems = drafts(0.4, 1.0)
    fitted = fit_probabilities(scored, problems)
    for threshold in (0.0, 0.1, 0.5, 0.9, 1 + 2.0**-20):
        before = accept(scored, threshold)
        after = accept(fitted.of_drafts(scored), fitted.of_threshold(threshold) * (1 - 1e-12))
        assert np.array_equal(before.accepted, after.accepted), threshold


def test_good_validities_and_odd_ones_are_left_alone():
    scored, problems = drafts(1.0, 0.0, n=60)
    assert not fit_probabilities(scored, problems).changes or fit_probabilities(scored, problems).ece < 0.1
    upside_down = ScoredDrafts(np.where(scored.real, 1 - scored.scores, 0.0), scored.labels, scored.cuts)
    assert not fit_probabilities(upside_down, problems).changes, "a head that ranks the wrong way is no probability"
    one_class = ScoredDrafts(scored.scores, np.where(scored.real, 1, -100), scored.cuts)
    assert not fit_probabilities(one_class, problems).changes
    assert not fit_probabilities(scored, ["one problem"] * 60).changes
    assert Probabilities().to_dict() is None and Probabilities().of_threshold(0.3) == 0.3


def test_a_pass_gives_the_fitted_probabilities(make_model, tokenizer, random_adapter, random_ids):
    from parse_infer.models.decoder import Decoder
    from parse_infer.text.cuts import Segmenter

    found = []
    for fitted in (None, {"scale": 0.5, "shift": 1.0}):
        model = make_model("llama")
        adapter = random_adapter(model)
        adapter.config.probability = fitted
        verifier = Verifier(Decoder(model, {258}), adapter, Segmenter(tokenizer))
        verifier.decoder.seek(random_ids(12))
        found.append(np.array(verifier.verify(random_ids(20, seed=1), [4, 11, 20]).validity))
    raw, after = found
    np.testing.assert_allclose(np.log(after / (1 - after)), 0.5 * np.log(raw / (1 - raw)) + 1.0, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"scale": 0.0, "shift": 1.0}, {"scale": -1.0, "shift": 0.0}, {"shift": 1.0}])
def test_a_scale_that_would_turn_the_order_round_is_refused(wrong):
    known = {"head": asdict(LogprobHeadConfig()), "reference": {"ids": [1, 2], "logprobs": [-1.0]}}
    values = ValidityConfig({"name": "t"}, known).to_dict() | {"probability": wrong}
    with pytest.raises(ValueError, match="needs a scale above 0 and a shift"):
        ValidityConfig.from_dict(values)
