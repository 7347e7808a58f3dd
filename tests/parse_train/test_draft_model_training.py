"""A draft model learns its target's own answers, and becomes a plain model that agrees with it more often."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import EvalPrediction

from parse_infer.calibration.held_out import prompt_hash
from parse_infer.engine import ParseEngine
from parse_infer.models.loading import load_language_model
from parse_infer.models.train_problems import train_problems_of
from parse_infer.token_drafters.registry import load_token_drafter
from parse_train.__main__ import main
from parse_train.train_draft_model import agreement, right_tokens
from tests.parse_infer.language_models import cycling, word_tokenizer


@pytest.fixture
def recipe(make_model, tokenizer, tmp_path: Path) -> list[str]:
    """Arguments that align a tiny draft model with a tiny target."""
    target = cycling(make_model("llama"), tokenizer, "Sum: 1+2=3;", "1 and 2?")
    for name, model in (("target", target), ("draft", make_model("llama", seed=1))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = [
        {"prompt": f"{a} and {b}?", "reference": str(a + b), "split": "train" if b else "validation"}
        for a in range(4)
        for b in range(4)
    ]
    rows.append({"prompt": "1 and 2?", "reference": "3", "split": "validation"})  # a training prompt, too
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["recipes/real/draft.yaml", "--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    arguments += ["--answers", str(tmp_path / "answers"), "--output_dir", str(tmp_path / "run"), "--task", "jsonl"]
    arguments += [
        "--task_options",
        json.dumps({"path": str(tmp_path / "problems.jsonl")}),
        "--max_answer_tokens",
        "16",
    ]
    arguments += [
        "--answer_temperature",
        "0",
        "--model_dtype",
        "float32",
        "--draft_dtype",
        "float32",
        "--bf16",
        "false",
    ]
    arguments += ["--num_train_epochs", "20", "--learning_rate", "1e-2", "--save_steps", "20", "--use_cpu"]
    return [*arguments, "--report_to", "none"]


@pytest.mark.slow
def test_an_aligned_draft_model_agrees_and_is_not_trained_twice(recipe, tmp_path: Path, capsys):
    assert main([*recipe, "--max_steps", "20"]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    assert "note: 1 of 5 validation prompts are training prompts; they are left out" in lines
    printed = [line for line in lines if "before" in line]
    before, after = (float(word) for word in printed[0].replace(",", "").split() if word[0].isdigit())
    assert printed[0].startswith("agrees with the target") and after > before + 0.3, printed

    folder = tmp_path / "run" / "draft"
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None, "a folder is no base model"
    assert f"| {before:.3f} | {after:.3f} |" in card.text and str(tmp_path) not in card.content
    learnt = {prompt_hash(f"{a} and {b}?") for a in range(4) for b in range(1, 4)}
    assert train_problems_of(folder) == learnt
    assert not list(folder.glob("adapter*")) and (folder / "model.safetensors").is_file(), "the LoRA is merged"
    target, published, aligned = (
        load_language_model(path, role=role, device="cpu", dtype="float32")
        for role, path in (("target", tmp_path / "target"), ("draft", tmp_path / "draft"), ("draft", folder))
    )
    assert aligned.model.config.use_cache == published.model.config.use_cache
    forwards = {}
    for name, draft in (("published", published), ("aligned", aligned)):
        engine = ParseEngine.from_models(target, draft)
        engine.backend.target_drafter = load_token_drafter("draft:tokens=4", target, draft)
        found = [engine.generate_target(f"{a} and 0?", max_new_tokens=16, speculate=True) for a in range(4)]
        forwards[name] = sum(each.stats.target_forwards for each in found)
    assert forwards["aligned"] < 0.8 * forwards["published"], forwards

    assert main([*recipe, "--max_steps", "20"]) == 0
    assert "is the end of the training" in capsys.readouterr().out
    # Answers of another dtype are other answers.
    again = [*recipe, "--max_steps", "1", "--output_dir", str(tmp_path / "again"), "--model_dtype", "bfloat16"]
    assert main(again) == 2
    assert "was begun with model_dtype 'float32', not 'bfloat16'" in capsys.readouterr().err


def test_a_draft_model_with_other_tokens_is_refused_before_the_target_answers(recipe, make_model, tmp_path, capsys):
    make_model("llama", vocab_size=300, eos_token_id=0).save_pretrained(tmp_path / "draft")
    word_tokenizer().save_pretrained(tmp_path / "draft")
    assert main(recipe) == 2
    assert "has other tokens than" in capsys.readouterr().err and not (tmp_path / "answers").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--draft", ""], "the recipe needs the key draft"),
        (["--lora_rank", "0"], "lora_rank is 0; it must be at least 1"),
        (["--lora_target_modules", "nosuch"], "Target modules {'nosuch'} not found"),
    ],
)
def test_a_wrong_key_is_refused_before_the_target_answers(recipe, change, message, tmp_path, capsys):
    assert main([*recipe, *change]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "answers").exists()


def test_agreement_counts_the_targets_tokens_alone():
    labels = torch.tensor([[-100, -100, 5, 6, 7], [-100, 8, 9, -100, -100]])
    logits = torch.full((2, 5, 10), -1.0)
    for row, place, token in ((0, 1, 5), (0, 2, 4), (0, 3, 7), (1, 0, 8), (1, 1, 9), (1, 2, 3)):
        logits[row, place, token] = 1.0
    right = right_tokens((logits, None), labels)
    assert right.tolist() == [[-100, 1, 0, 1], [1, 1, -100, -100]]  # forwards: 5 6|7 and 8 9
    metrics = agreement(EvalPrediction(predictions=np.asarray(right), label_ids=labels.numpy()))
    assert metrics == {"agreement": pytest.approx(0.8), "tokens_per_forward": pytest.approx(5 / 3)}
