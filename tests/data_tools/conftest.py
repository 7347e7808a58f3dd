"""A tiny pair of models in folders, a task they can get right or wrong, and configurations of builds over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data_tools.labels.build_config import BuildConfig

ENDS = "!?;:.,-+*/=HyuZ"  # besides the end token, these end an answer, or random models would never come to an end


@pytest.fixture(scope="session")
def pair(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: Any
) -> Path:
    """A folder with target/, draft/ and problems.jsonl, where an answer is right if it has certain characters."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_model("llama", seed=3)
    draft = make_model("llama", seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * parameter.std() * noise)
    ends = [tokenizer.eos_token_id, *tokenizer(ENDS, add_special_tokens=False).input_ids]
    for name, model in (("target", target), ("draft", draft)):
        _write_letters_only(model, tokenizer)
        model.generation_config.eos_token_id = ends
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    random = Random(0)
    with (folder / "problems.jsonl").open("w") as file:
        for i in range(60):
            prompt = "".join(random.choices("abcdefgh 123", k=random.randint(4, 14))) + "x"
            reference = ("7", "[a-z].*[0-9]", "[A-Z]")[i % 3]
            file.write(json.dumps({"id": f"p{i}", "prompt": prompt, "reference": reference}) + "\n")
    return folder


@pytest.fixture
def make_config(pair: Path, tmp_path: Path) -> Callable[..., BuildConfig]:
    """`make_config(output_dir="data", **overrides)`: a build that takes a second or two."""

    def make(output_dir: str = "data", **overrides: Any) -> BuildConfig:
        values = {
            "target": str(pair / "target"),
            "draft": str(pair / "draft"),
            "task": "jsonl",
            "task_options": {"path": str(pair / "problems.jsonl"), "check_with": "regex"},
            "limit": 12,
            "temperatures": [0.0, 1.0],
            "cut_policy": {"kind": "tokens", "every": 3},
            "max_draft_tokens": 24,
            "max_rollout_tokens": 24,
            "problems_per_group": 5,
            "batch_size": 8,
        }
        return BuildConfig(output_dir=str(tmp_path / output_dir), **values | overrides)

    return make


def _write_letters_only(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Logits of everything but printable ASCII become 0, which is never the highest of them."""
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        for token in range(weight.shape[0]):
            text = tokenizer.decode([token])
            if not (len(text) == 1 and text.isascii() and text.isprintable()):
                weight[token] = 0
