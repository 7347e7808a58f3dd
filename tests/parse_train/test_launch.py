"""Training as users start it: one process, two, DeepSpeed ZeRO-2, a recipe as a program, and after an interruption.

However it is started, the same recipe learns the same adapter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parse_infer.models.devices import multiplies_in_16_bits
from parse_infer.models.loading import load_language_model
from parse_infer.tracking import RUN_ID
from parse_train.self_generated_data import AnswerConfig, write_answers
from tests.wandb_runs import offline_runs

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "recipes" / "accelerate"


def run(arguments: Sequence[str | Path], timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python environment outside of any distributed run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "WANDB_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(REPOSITORY)
    environment["OMP_NUM_THREADS"] = "1"
    environment["WANDB_DATA_DIR"] = tempfile.gettempdir()  # copies of artifacts, else in the user's home
    return subprocess.run(
        [str(a) for a in arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def launch(config: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    port = str(29_600 + os.getpid() % 2_000)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / config]
    return run([*command, "--main_process_port", port, *arguments])


def weights(output: Path) -> dict[str, torch.Tensor]:
    adapter = output / "adapter"
    return load_file(adapter / "adapter_model.safetensors") | load_file(adapter / "validity_head.safetensors")


def assert_same_adapter(one: Path, other: Path, tolerance: float) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def losses(output: Path) -> list[float]:
    """Of every step, from the last checkpoint."""
    history = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def update(output: Path) -> torch.Tensor:
    """All that the adapter adds: zero before the training."""
    return torch.cat([value.flatten() for name, value in sorted(weights(output).items()) if "lora_B" in name])


@pytest.fixture(scope="module")
def uninterrupted(training_folder: Path) -> Path:
    """Output of the recipe in one process, with a threshold and a tracker that has no key."""
    output = training_folder / "uninterrupted"
    result = launch(
        "cpu.yaml",
        training_folder / "recipe.yaml",
        "--output_dir",
        output,
        "--report_to",
        "wandb",
    )
    assert result.returncode == 0, result.stderr
    (training_folder / "log").write_text(result.stdout)
    return output


def test_one_process(uninterrupted: Path, training_folder: Path) -> None:
    assert sorted(path.name for path in uninterrupted.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    state = load_file(uninterrupted / "checkpoint-2" / "model.safetensors")
    assert all("lora_" in name or name.startswith("head.") for name in state)
    b = [value for name, value in weights(uninterrupted).items() if "lora_B" in name]
    assert all(tensor.abs().max() > 0 for tensor in b)  # every update starts at zero
    log = (training_folder / "log").read_text()
    assert log.count("wandb has no API key") == 1
    for name in ("trained head: AUROC", "adapter exported to"):
        assert name in log
    assert (uninterrupted / "wandb").is_dir()


def test_two_processes_learn_what_one_learns(uninterrupted: Path, training_folder: Path) -> None:
    output = training_folder / "two"
    result = launch(
        "cpu-2.yaml",
        *(training_folder / "recipe.yaml", "--output_dir", output),
        *("--per_device_train_batch_size", "2"),
    )
    assert result.returncode == 0, result.stderr
    assert_same_adapter(output, uninterrupted, tolerance=2e-4)


def test_two_processes_train_the_first_judge_and_its_correction(training_folder: Path) -> None:
    """Though a recipe ends its processes' group, and keeps its number type, where it is alone."""
    first, output = training_folder / "first.yaml", training_folder / "both"
    first.write_text(f"recipe: logprob\ndata: {training_folder}/build\ncalibration_problems: 0\nmax_steps: 2\nk: 3\n")
    options = ("--start_from", first, "--output_dir", output, "--max_steps", "2", "--bf16", "true")
    result = launch("cpu-2.yaml", training_folder / "recipe.yaml", *options)
    assert result.returncode == 0, result.stderr
    assert (output / "logprob" / "adapter").is_dir() and (output / "adapter").is_dir()


def test_a_recipe_is_a_program_that_resumes_where_it_was_interrupted(
    uninterrupted: Path, training_folder: Path
) -> None:
    """What a kill leaves behind: a complete checkpoint, and one that was being written."""
    output = training_folder / "killed"
    output.mkdir()
    shutil.copytree(uninterrupted / "checkpoint-2", output / "checkpoint-2")
    shutil.copytree(uninterrupted / "checkpoint-4", output / "checkpoint-4")
    shutil.copy(uninterrupted / RUN_ID, output)
    half_written = output / "checkpoint-4" / "model.safetensors"
    half_written.write_bytes(half_written.read_bytes()[:1000])
    tracked = ("--output_dir", output, "--report_to", "wandb")
    result = launch("cpu.yaml", "--no_python", training_folder / "recipe.yaml", *tracked)
    assert result.returncode == 0, result.stderr
    assert re.search("resuming from .*checkpoint-2", result.stdout)
    assert_same_adapter(output, uninterrupted, tolerance=0)
    [(first, _)], [(second, _)] = offline_runs(uninterrupted), offline_runs(output)
    assert first == second, "W&B takes the rest of the training for another run"


def test_another_recipe_does_not_continue_a_training(uninterrupted: Path, training_folder: Path) -> None:
    recipe = training_folder / "recipe.yaml"  # itself a program
    result = run([recipe, "--output_dir", uninterrupted, "--lora_rank", "2"])
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "lora_rank 4 instead of 2: choose another output_dir" in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU communication with g++")
def test_deepspeed_in_bfloat16_learns_the_same_and_resumes(uninterrupted: Path, training_folder: Path) -> None:
    """As the recipe for GPUs runs it: DeepSpeed keeps all parameters in bfloat16, and what is learnt differs by
    rounding. (On a CPU without instructions for bfloat16 the training itself falls back to float32.)"""
    output = training_folder / "zero2"
    arguments = (training_folder / "recipe.yaml", "--output_dir", output)
    options = ("--per_device_train_batch_size", "2", "--bf16", "true")
    result = launch("deepspeed-zero2.yaml", *arguments, *options)
    assert result.returncode == 0, result.stderr
    assert losses(output) == pytest.approx(losses(uninterrupted), rel=0.03)
    ours, exact = update(output), update(uninterrupted)
    assert (ours - exact).norm() / exact.norm() < 0.1, "other gradients than those of one process"
    frozen = sum(path.stat().st_size for path in (training_folder / "target").glob("*.safetensors"))
    saved = torch.load(output / "checkpoint-4" / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)
    assert sum(t.numel() * 4 for t in saved["module"].values()) < frozen
    kind = torch.bfloat16 if multiplies_in_16_bits(torch.device("cpu")) else torch.float32
    assert {tensor.dtype for tensor in saved["module"].values()} == {kind}

    before = weights(output)
    shutil.rmtree(output / "checkpoint-6")
    shutil.rmtree(output / "adapter")
    result = launch("deepspeed-zero2.yaml", *arguments, *options)
    assert result.returncode == 0, result.stderr
    assert re.search("resuming from .*checkpoint-4", result.stdout)
    for name, value in weights(output).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-5)

    # Killed between the last step and the export: nothing is trained on.
    before, saved = weights(output), sorted(path.name for path in output.glob("checkpoint-*"))
    shutil.rmtree(output / "adapter")
    result = launch("deepspeed-zero2.yaml", *arguments, *options)
    assert result.returncode == 0, result.stderr
    assert "checkpoint-6 is the end of the training" in result.stdout
    assert sorted(path.name for path in output.glob("checkpoint-*")) == saved
    assert all(torch.equal(value, before[name]) for name, value in weights(output).items())


_SAYS_WHO_WRITES = """
import sys
import time
from pathlib import Path
from accelerate import PartialState
from data_tools.labels.shards import GroupFolder
from parse_train.__main__ import main

write = GroupFolder.write

def name_of(task):
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""

def said(self, group, rows):
    print(f"process {PartialState().process_index} wrote {self.split} {group.start}", flush=True)
    write(self, group, rows)

GroupFolder.write = said
code = main(sys.argv[1:])
for _ in range(50):  # the system lists a thread for an instant after it has been joined
    names = "".join(map(name_of, Path("/proc/self/task").iterdir()))
    if "gloo" not in names:
        break
    time.sleep(0.1)
sys.exit(code or (f"threads left of the process group: {names}" if "gloo" in names else 0))
"""


def test_processes_share_the_answers_that_a_head_learns_from(training_folder: Path, tmp_path: Path) -> None:
    """Group by group, and the answers are those of one process."""
    problems = [
        {"prompt": f"{a}+{b}?", "reference": str(a + b), "split": "train" if a < 24 else "validation"}
        for a in range(25)
        for b in range(24)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (tmp_path / "says.py").write_text(_SAYS_WHO_WRITES)
    target, task_options = str(training_folder / "target"), {"path": str(tmp_path / "sums.jsonl")}
    arguments = [
        "recipes/medusa.yaml",
        "--model",
        target,
        "--task",
        "jsonl",
        "--task_options",
        json.dumps(task_options),
    ]
    arguments += ["--n_problems", "576", "--n_eval_problems", "9", "--max_answer_tokens", "6", "--max_steps", "1"]
    arguments += ["--draft_vocab_size", "100", "--report_to", "none", "--steps", "2"]
    arguments += ["--output_dir", str(tmp_path / "run"), "--answers", str(tmp_path / "two")]
    result = launch("cpu-2.yaml", tmp_path / "says.py", *arguments)
    # A thread of the group that outlives Python may end the process with an abort: this is about every run's.
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"process (\d) wrote (\w+) (\d+)", result.stdout)) == [
        ("0", "train", "0"),
        ("0", "train", "512"),
        ("0", "validation", "0"),
        ("1", "train", "256"),
    ]
    config = AnswerConfig(target, task="jsonl", task_options=task_options, max_answer_tokens=6)
    lm = load_language_model(target, role="target", device="cpu")
    for split, limit in (("train", 576), ("validation", 9)):
        write_answers(lm, config, 0, split, limit, tmp_path / "one" / split)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*/data/*")} for name in ("one", "two")
    )
    assert one == two and len(one) == 4
