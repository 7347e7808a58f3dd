"""Every kind of training goes on where it was interrupted, and only there: the same recipe, complete checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parse_train.__main__ import main
from parse_zoo.train.tokenizer import TokenizerConfig, make_tokenizer

_LANGUAGE_MODEL = """recipe: language_model
model_config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 2, max_position_embeddings: 512, tie_word_embeddings: true}
row_length: 192
torch_compile_backbone: false
"""


@dataclass(frozen=True)
class Training:
    """Six steps, with a checkpoint after every second, of a recipe that writes `exported`."""

    arguments: tuple[str, ...]
    output: Path
    exported: str

    def run(self, *overrides: str) -> int:
        steps = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "10"]
        fixed = ["--logging_steps", "1", "--report_to", "none", "--use_cpu", "--eval_strategy", "no"]
        return main([*self.arguments, *steps, *fixed, "--output_dir", str(self.output), *overrides])

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.output / self.exported)

    def checkpoints(self) -> dict[str, bytes]:
        return {str(p.parent.name): p.read_bytes() for p in self.output.glob("checkpoint-*/model.safetensors")}


@pytest.fixture(scope="module", params=["stream", "medusa", "language_model"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, training_folder: Path
) -> Training:
    """A training that was not interrupted."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "stream":
        arguments = [str(training_folder / "recipe.yaml")]
        training = Training(tuple(arguments), folder / "out", "adapter/adapter_model.safetensors")
    elif request.param == "medusa":
        splits = ["train"] * 3 + ["validation"]
        problems = [
            {"prompt": f"{a} and {b}?", "reference": str(a + b), "split": splits[a]}
            for a in range(4)
            for b in range(4)
        ]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
        arguments = ["recipes/medusa.yaml", "--model", str(training_folder / "target"), "--task", "jsonl"]
        arguments += ["--task_options", json.dumps({"path": str(folder / "problems.jsonl")}), "--bf16", "false"]
        arguments += ["--n_problems", "12", "--n_eval_problems", "2", "--max_answer_tokens", "12", "--steps", "2"]
        arguments += ["--per_device_train_batch_size", "4", "--draft_vocab_size", "100"]
        arguments += ["--answers", str(folder / "answers")]
        training = Training(tuple(arguments), folder / "out", "head/model.safetensors")
    else:
        make_tokenizer(TokenizerConfig(output_dir=str(folder / "tokenizer"), vocab_size=600, n_problems=100))
        (folder / "recipe.yaml").write_text(_LANGUAGE_MODEL)
        arguments = [str(folder / "recipe.yaml"), "--tokenizer", str(folder / "tokenizer")]
        arguments += ["--per_device_train_batch_size", "2"]
        training = Training(tuple(arguments), folder / "out", "final/model.safetensors")
    assert training.run() == 0
    assert sorted(training.checkpoints()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    return training


@pytest.fixture
def copied(finished: Training, tmp_path: Path) -> Training:
    """The same, to be played with."""
    shutil.copytree(finished.output, tmp_path / "out")
    return replace(finished, output=tmp_path / "out")


def assert_same_weights(one: Training, other: Training) -> None:
    ours, theirs = one.weights(), other.weights()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


Damage = Callable[[Path], None]


def _cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:300])


def _without_state(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


@pytest.mark.parametrize("damage", [_cut_weights, _without_state])
@pytest.mark.slow
def test_a_half_written_checkpoint_is_passed_over(
    finished: Training, copied: Training, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copied.output / "checkpoint-6")
    shutil.rmtree((copied.output / copied.exported).parent)
    assert copied.run() == 0, capsys.readouterr().err
    assert f"resuming from {copied.output}/checkpoint-4" in capsys.readouterr().out
    assert_same_weights(copied, finished)
    assert sorted(copied.checkpoints()) == sorted(finished.checkpoints())


def test_a_finished_training_is_not_trained_on(
    finished: Training, copied: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the last step and the export."""
    shutil.rmtree((copied.output / copied.exported).parent)
    for _ in range(2):
        assert copied.run() == 0, capsys.readouterr().err
        assert copied.checkpoints() == finished.checkpoints()
        for name, value in copied.weights().items():
            assert torch.equal(value, finished.weights()[name]), name


def test_another_recipe_does_not_continue_a_training(
    finished: Training, copied: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copied.run("--learning_rate", "0.25") == 2
    error = capsys.readouterr().err
    assert "instead of 0.25: choose another output_dir, or --resume_from_checkpoint restart to delete them" in error
    assert_same_weights(copied, finished)
    # Where things go and what is shown makes no other recipe.
    assert copied.run("--logging_steps", "3", "--save_steps", "5", "--run_name", "again") == 0
    assert copied.checkpoints() == finished.checkpoints()
    state = copied.output / "checkpoint-6" / "trainer_state.json"
    state.write_text(state.read_text().replace("RecipeNote", "SomethingElse"))
    assert copied.run() == 2
    assert "checkpoints of an unknown training" in capsys.readouterr().err


@pytest.mark.slow
def test_restart_and_a_named_checkpoint(
    finished: Training, copied: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copied.run("--learning_rate", "0.25", "--resume_from_checkpoint", "restart") == 0
    capsys.readouterr()
    assert sorted(copied.checkpoints()) == sorted(finished.checkpoints())
    assert not any(copied.checkpoints()[name] == old for name, old in finished.checkpoints().items())
    named = finished.output / "checkpoint-2"
    assert copied.run("--resume_from_checkpoint", str(named)) == 0, capsys.readouterr().err
    assert f"resuming from {named}" in capsys.readouterr().out
    assert_same_weights(copied, finished)
    # A finished one is trained on where more steps are asked for by name.
    assert copied.run("--resume_from_checkpoint", str(finished.output / "checkpoint-6"), "--max_steps", "7") == 0
    assert "checkpoint-7" in copied.checkpoints()
    assert copied.run("--resume_from_checkpoint", "nowhere") == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_whose_gradient_is_nan_ends(
    finished: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replace(finished, output=tmp_path / "out").run("--learning_rate", "1e37", "--warmup_steps", "0") == 2
    assert "the gradient is NaN at step" in capsys.readouterr().err
    unlogged = (
        "--logging_steps",
        "1000",
        "--logging_first_step",
        "false",
        "--learning_rate",
        "1e37",
        "--warmup_steps",
        "0",
    )
    assert replace(finished, output=tmp_path / "unlogged").run(*unlogged) == 2
    assert "are NaN at step" in capsys.readouterr().err
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "its gradient can be NaN"
    assert not (tmp_path / "out" / finished.exported).exists()
