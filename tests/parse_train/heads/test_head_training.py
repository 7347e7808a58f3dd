"""Training of EAGLE heads sees what drafting does, learns, resumes, and writes a head that the drafter loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EvalPrediction

from data_tools.recipe_parser import read_recipe
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.medusa import MedusaDrafter
from parse_infer.token_drafters.registry import load_token_drafter
from parse_train.heads.train_eagle import EagleModel
from parse_train.heads.train_medusa import MedusaModel
from parse_train.heads.training import HeadTrainer, head_metrics, start_from_output
from parse_train.recipe import load_recipe
from parse_train.self_generated_data import collate
from parse_train.training_config import IGNORED
from tests.parse_infer.language_models import language_model
from tests.parse_infer.token_drafters.test_eagle import make_head
from tests.parse_infer.token_drafters.test_medusa import make_heads


@pytest.fixture
def lm(make_model, tokenizer):
    return language_model(make_model("llama_gqa"), tokenizer, "target")


def forced_chain(lm, head, ids: list[int], length: int, steps: int) -> list[torch.Tensor]:
    """Logits of the drafter's chain behind ids[:length], fed with the true tokens instead of its own guesses."""
    drafter, logits = EagleDrafter(head, lm, tokens=steps, top_k=1), []
    lm.decoder.seek(ids[: length - 1])
    lm.decoder.forward()
    lm.decoder.seek(ids[:length])
    read = head.logits

    def note(output: torch.Tensor) -> torch.Tensor:
        found = read(output)
        logits.append(found)
        if head.config.parallel_drafting:
            return found
        forced = torch.full_like(found, -1.0)
        token = ids[length + len(logits) - 1]
        forced[:, (torch.arange(len(head.d2t)) + head.d2t).tolist().index(token)] = 1.0
        return forced

    head.logits = note
    try:
        drafter.propose(lm.decoder.ids, steps, Sampling(), None)
    finally:
        head.logits = read
    return [row for block in logits for row in block]


@pytest.mark.parametrize("parallel", [False, True])
def test_training_sees_what_drafting_sees(lm, random_ids, parallel):
    head = make_head(lm, parallel, vocabulary=260)
    ids, steps = random_ids(18), 4
    ids = [i % 250 for i in ids]
    model = EagleModel(lm, head, steps, 0.9, 0.8).eval()
    with torch.no_grad():
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        embeddings = lm.model.get_input_embeddings()(torch.tensor([ids]))
        guesses = model.propose(states, embeddings)
    for length in (6, 11):
        expected = forced_chain(lm, head, ids, length, steps)
        anchor = length - 2  # the last place whose following token is known
        for step, (logits, anchors) in enumerate(guesses):
            row = anchors.tolist().index(anchor)
            torch.testing.assert_close(logits[0, row], expected[step], atol=1e-4, rtol=1e-4)


def test_medusa_training_sees_what_drafting_sees(lm, random_ids):
    head, ids = make_heads(lm), random_ids(18)
    drafter = MedusaDrafter(head, lm, top_k=1)
    with torch.no_grad():
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        guesses = MedusaModel(lm, head, 4, 0.9).propose(states, lm.model.get_input_embeddings()(torch.tensor([ids])))
    for length in (6, 11):
        lm.decoder.seek(ids[: length - 1])
        lm.decoder.forward()
        lm.decoder.seek(ids[:length])
        tokens = drafter.propose(lm.decoder.ids, 4, Sampling(), None).tokens
        found = [
            int(head.token_ids[logits[0, anchors.tolist().index(length - 2)].argmax()]) for logits, anchors in guesses
        ]
        assert found == list(tokens)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.slow
def test_a_head_learns_what_comes_next(lm, random_ids, parallel):
    torch.manual_seed(0)
    head = make_head(lm, parallel, vocabulary=260).train()
    rows = [{"input_ids": random_ids(6, seed) * 4, "start": 4} for seed in range(4)]
    model = EagleModel(lm, head, 3, 0.9, 0.8)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        output = model(**collate(rows))
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        losses.append(output["loss"].item())
    assert losses[-1] < losses[0] - 1, losses[::10]  # the floor is the entropy of what it imitates
    assert all(p.grad is None for p in lm.model.parameters())
    assert set(model.state_dict()) == {f"head.{name}" for name in head.state_dict()}


def test_later_steps_weigh_less(lm, random_ids):
    rows = collate([{"input_ids": random_ids(16), "start": 3}])
    even, decaying, first = (
        MedusaModel(lm, make_heads(lm, heads=2), 2, decay)(**rows)["loss"].item() for decay in (1.0, 0.25, 1e-9)
    )
    second = 2 * even - first
    assert decaying == pytest.approx((first + 0.25 * second) / 1.25) and abs(first - second) > 1e-3


def test_accumulated_parts_weigh_by_their_tokens(lm, random_ids, tmp_path):
    """A step over a short and a long answer is the same at once and one after the other."""
    rows = [{"input_ids": random_ids(length, length), "start": 2} for length in (6, 30)]

    def gradient(at_once: int, parts: int) -> torch.Tensor:
        _, config = load_recipe(
            "recipes/medusa.yaml",
            [
                *("--output_dir", str(tmp_path), "--report_to", "none", "--max_steps", "1", "--save_strategy", "no"),
                *("--per_device_train_batch_size", str(at_once), "--gradient_accumulation_steps", str(parts)),
                *("--learning_rate", "0", "--max_grad_norm", "0", "--train_sampling_strategy", "sequential"),
            ],
        )
        torch.manual_seed(0)
        model, found = MedusaModel(lm, make_heads(lm, heads=1), 1, 0.9), {}

        class Noting(HeadTrainer):
            def training_step(self, *given, **named):
                loss = super().training_step(*given, **named)
                found.update({n: p.grad.flatten().clone() for n, p in model.named_parameters() if p.grad is not None})
                return loss

        Noting(model, config, train_dataset=Dataset.from_list(rows), data_collator=collate).train()
        return torch.cat([found[name] for name in sorted(found)])

    whole, parts = gradient(2, 1), gradient(1, 2)
    torch.testing.assert_close(parts, whole, rtol=0.05, atol=0.02 * whole.abs().max().item())


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "medusa"])
def test_a_head_of_another_dtype_than_the_models(lm, random_ids, kind):
    """As under DeepSpeed, which makes the head bfloat16 and leaves out autocast."""
    medusa = kind == "medusa"
    head = (make_heads(lm, heads=2) if medusa else make_head(lm, kind == "parallel")).bfloat16()
    model = MedusaModel(lm, head, 2, 0.9) if medusa else EagleModel(lm, head, 2, 0.9)
    loss = model(**collate([{"input_ids": random_ids(16), "start": 3}]))["loss"]
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in head.parameters())


def test_a_fresh_head_starts_from_the_models_output(lm):
    tokens = list(range(10, 210))
    for head in (make_heads(lm), make_head(lm)):
        start_from_output(head, lm, tokens)
        assert head.token_ids.tolist() == tokens
        for weight in head.output_weights:
            assert torch.equal(weight, lm.model.get_output_embeddings().weight[10:210])


def test_acceptance_length_is_that_of_chains():
    right = np.array([[[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1], [IGNORED, IGNORED, IGNORED], [1, 1, IGNORED]]])
    metrics = head_metrics(EvalPrediction(predictions=right, label_ids=None))
    assert metrics["accuracy_1"] == pytest.approx(4 / 5)
    assert metrics["accuracy_3"] == pytest.approx(3 / 4)
    assert metrics["acceptance_length"] == pytest.approx(1 + (2 + 1 + 0 + 3) / 4)


@pytest.mark.parametrize("recipe", ["eagle3", "parallel", "medusa"])
@pytest.mark.slow
def test_the_recipe_runs_resumes_and_writes_a_head(recipe, tmp_path: Path, capsys):
    from parse_infer.models.loading import load_language_model
    from parse_train.__main__ import main

    arguments = [f"recipes/{recipe}.yaml", "--output_dir", str(tmp_path), "--report_to", "none"]
    arguments += ["--n_problems", "6", "--n_eval_problems", "3", "--num_train_epochs", "1", "--save_steps", "1"]
    arguments += [
        "--answers",
        str(tmp_path / "answers"),
        "--per_device_train_batch_size",
        "3",
        "--max_answer_tokens",
        "24",
        "--steps",
        "3",
    ]
    assert main(arguments) == 0, capsys.readouterr().err
    answers = tmp_path / "answers" / "train" / "data" / "train-000000-000006.jsonl"
    written = answers.read_text()
    assert len(written.splitlines()) == 6
    answers.rename(answers.with_name(".killed.partial"))  # the group not yet finished, as by a kill
    for folder in ("checkpoint-2", "head"):  # killed after the first of two steps
        shutil.rmtree(tmp_path / folder)
    capsys.readouterr()
    assert main(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert f"resuming from {tmp_path}/checkpoint-1" in printed and "accuracy_1" in printed
    assert answers.read_text() == written
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    guided = load_language_model(str(read_recipe(f"recipes/{recipe}.yaml")["model"]), role="target", device="cpu")
    drafter = load_token_drafter(str(tmp_path / "head"), guided)
    if recipe == "medusa":
        assert drafter.head.config.num_heads == 3
    else:
        assert drafter.head.config.parallel_drafting == ("parallel" in recipe)
    assert main([*arguments, "--seed", "5"]) == 2
    assert "was begun with seed 0, not 5" in capsys.readouterr().err
    answers.write_text(written.replace('"input_ids": [', '"input_ids": [5, ', 1))
    assert main(arguments) == 2, "other answers, as of other weights"
    assert "holds checkpoints of a training with examples" in capsys.readouterr().err


def test_held_out_problems_are_no_training_problems(tmp_path: Path, capsys):
    from parse_train.__main__ import main

    rows = [{"prompt": f"{i} and 1?", "reference": str(i + 1)} for i in range(8)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["--task", "jsonl", "--task_options", json.dumps({"path": str(tmp_path / "own.jsonl")})]
    arguments = ["recipes/medusa.yaml", *task, "--output_dir", str(tmp_path / "run"), "--report_to", "none"]
    assert main(arguments) == 2
    assert "8 of 8 validation problems of task jsonl are training problems: assign" in capsys.readouterr().err
    rows = [row | {"split": "train"} for row in rows]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(arguments) == 2
    assert "task jsonl has no problem in its split validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--feature_layers", "2", "8", "40"], "feature_layers has 40; 'zoo:target' has features 0 to 16"),
        (
            ["--num_attention_heads", "3", "--num_key_value_heads", "2"],
            "num_attention_heads is 3, which is not a multiple of",
        ),
        (["--num_attention_heads", "-4"], "num_attention_heads of an EAGLE head is -4; it must be at least 1"),
        (["--ptd_token", "nosuch"], "ptd_token is 'nosuch', but 'zoo:target' has no such token"),
        (["--draft_vocab_size", "0"], "draft_vocab_size is 0; it must be at least 1"),
        (["--task", "nosuch"], "nosuch"),
        (["--steps", "0"], "steps is 0"),
        (
            ["--activation_checkpointing", "true"],
            "the model runs without gradient, and only the head keeps activations",
        ),
    ],
)
def test_a_wrong_key_is_refused_before_anything_is_answered(change, message, tmp_path: Path, capsys):
    from parse_train.__main__ import main

    arguments = ["recipes/parallel.yaml", "--output_dir", str(tmp_path), "--answers", str(tmp_path / "answers")]
    arguments += ["--n_problems", "8", "--n_eval_problems", "4"]
    assert main([*arguments, "--report_to", "none", *change]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "answers").exists()


@pytest.mark.slow
def test_the_real_recipe_trains_a_head_on_a_tiny_model_of_its_kind(make_model, tokenizer, tmp_path: Path, capsys):
    from parse_infer.models.loading import load_language_model
    from parse_train.__main__ import main

    model = tmp_path / "model"
    make_model("qwen3").save_pretrained(model)
    tokenizer.save_pretrained(model)
    splits = {0: "validation"}
    problems = [
        {"prompt": f"{a} and {b}?", "reference": str(a + b), "split": splits.get(b, "train")}
        for a in range(3)
        for b in range(3)
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    arguments = ["recipes/real/parallel.yaml", "--model", str(model), "--output_dir", str(tmp_path / "run")]
    arguments += ["--answers", str(tmp_path / "answers"), "--task", "jsonl", "--max_answer_tokens", "12"]
    arguments += ["--task_options", json.dumps({"path": str(tmp_path / "problems.jsonl")}), "--max_steps", "1"]
    arguments += ["--ptd_token", "<|end|>", "--draft_vocab_size", "100", "--report_to", "none", "--use_cpu"]
    assert main(arguments) == 0, capsys.readouterr().err
    lm = load_language_model(str(model), role="target", device="cpu", dtype="bfloat16")
    drafter = load_token_drafter(str(tmp_path / "run" / "head"), lm)
    assert drafter.head.config.parallel_drafting and drafter.head.mask_hidden.dtype == torch.bfloat16
