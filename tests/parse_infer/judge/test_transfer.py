"""A judge on log-probabilities for another target, without training."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from parse_infer.cli.app import main
from parse_infer.engine import ParseEngine
from parse_infer.evaluation.modes import make_modes, timed
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.settings.generation import GenerationSettings


@pytest.fixture
def qwen3(make_model, tokenizer, tmp_path: Path) -> Path:
    make_model("qwen3", seed=3).save_pretrained(tmp_path / "qwen3")
    tokenizer.save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def test_a_judge_serves_another_target_and_accepts_nothing_before_a_calibration(
    make_model, random_adapter, qwen3: Path, tmp_path: Path, capsys
):
    model = make_model("llama")
    judge = random_adapter(model)
    judge.config.logprobs["usual"] = {"8": [[0.0] * 7, [0.0] * 7]}  # no draft is like that
    own = judge.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="was trained for the target"):
        ParseEngine.from_pretrained(qwen3, qwen3, own)
    assert main(["transfer", str(own), "--target", str(qwen3), "--out", str(tmp_path / "new")]) == 0
    assert "It accepts no draft yet. Next: parse-infer calibrate" in capsys.readouterr().out
    assert main(["transfer", str(own), "--target", str(qwen3), "--out", str(tmp_path / "new")]) == 2
    assert "holds an adapter already: choose another folder" in capsys.readouterr().err
    engine = ParseEngine.from_pretrained(qwen3, qwen3, tmp_path / "new", device="cpu", dtype="float32")
    moved = engine.backend.judge
    for name, weight in moved.head.state_dict().items():
        assert torch.equal(weight, judge.head.state_dict()[name]), name
    prompt = "Tom has 5 apples."
    for mode in make_modes(engine, ["parse"], GenerationSettings(4)):  # a benchmark says so too
        with pytest.warns(UserWarning, match="accepts no draft"):
            timed(engine, mode, prompt)
    assert engine.threshold > 1 and moved.config.usual_drafts is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = engine.generate_target(prompt, max_new_tokens=20)
        kept = engine.generate(prompt, max_new_tokens=20, threshold=0.0, block_tokens="whole")
    with pytest.warns(UserWarning, match="the adapter's own threshold accepts no draft: run `parse-infer calibrate`"):
        assert engine.generate(prompt, max_new_tokens=20).token_ids == alone.token_ids
    assert kept.stats.accepted_tokens == 20 and kept.fallback is None
    with pytest.raises(ValueError, match="was trained for the target"):
        ValidityAdapter.from_pretrained(tmp_path / "new", model)
