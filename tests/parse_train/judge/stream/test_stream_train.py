"""Training of the second stream: it starts as its trunk, learns what log-probabilities do not say, and is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.labels.backends import LocalWriter
from data_tools.labels.logprobs import add_logprobs, read_drafts
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.judge.adapter import ValidityAdapter, describe_target
from parse_infer.judge.logprob_head import NO_DOUBT, LogprobHead, LogprobHeadConfig
from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import load_language_model
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_train.__main__ import main
from parse_train.judge.logprob.data import LogprobExample
from parse_train.judge.logprob.model import LogprobModel
from parse_train.judge.stream import train
from parse_train.judge.stream.data import StreamCollator
from parse_train.judge.stream.lora import LoraOptions
from parse_train.judge.stream.model import StreamModel
from parse_train.judge.stream.train import build_model, choose_floor, first_rung
from parse_train.judge.trainer import ValidityTrainer
from parse_train.outlines import PROMPT_TOKENS
from parse_train.recipe import load_recipe
from parse_train.training_plan import load_config_of, plan_training

OPTIONS = ["--report_to", "none", "--k", "3", "--eval_share", "0.5", "--per_device_train_batch_size", "8"]
REPOSITORY = Path(__file__).parents[4]
INPUTS = ("own", "top", "ids", "first", "cuts")


@pytest.fixture(scope="module")
def build(tmp_path_factory, tokenizer, make_model, build_rows, write_jsonl) -> Path:
    """A build with log-probabilities, its target's files, and an adapter on log-probabilities."""
    folder = tmp_path_factory.mktemp("stream")
    make_model("llama_gqa").save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_jsonl(folder / "build" / "data" / "train-000000-000016.jsonl", build_rows)
    model = load_language_model(folder / "target", role="target", dtype="float32")
    config = {"cut_policy": CutPolicy().to_dict(), "target": str(folder / "target")}
    facts = {"config": config, "models": {"target": describe_target(model.model)}}
    (folder / "build" / "build.json").write_text(json.dumps(facts))
    add_logprobs(folder / "build", lambda: LocalWriter(model, 5), 3)
    assert main([recipe(folder, folder / "first", "logprob"), *OPTIONS, "--max_steps", "2"]) == 0
    return folder


def recipe(folder: Path, out: Path, kind: str = "stream", **keys: Any) -> str:
    lines = {"recipe": kind, "data": folder / "build", "output_dir": out, "calibration_problems": 0, **keys}
    if kind == "stream":
        lines = {
            "start_from": folder / "first" / "adapter",
            "lora_rank": 4,
            "sure_share": 0,
            "min_wrong_drafts": 1,
        } | lines
    path = out.with_suffix(".yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return str(path)


def batch(model, build, n: int = 8) -> dict[str, torch.Tensor]:
    drafts = list(read_drafts(build / "build"))[:n]
    return StreamCollator(model.render, 0)([LogprobExample.of(draft, 3) for draft in drafts])


@pytest.mark.parametrize(("hidden_layers", "lora_rank"), [(0, 4), (2, 0), (2, 4)])
@pytest.mark.slow
def test_the_recipe_trains_a_judge_that_scores_as_in_training(
    build, tokenizer, tmp_path, capsys, monkeypatch, hidden_layers, lora_rank
):
    of_floor: list[str] = []

    def floor_of(trunk, drafts, *others):
        of_floor.extend(prompt_hash(draft.prompt) for draft in drafts)
        return choose_floor(trunk, drafts, *others)

    monkeypatch.setattr(train, "choose_floor", floor_of)
    reads = ["--hidden_layers", str(hidden_layers), "--lora_rank", str(lora_rank)]
    options = [*OPTIONS, *reads, "--max_steps", "6", "--learning_rate", "1e-2"]
    assert main([recipe(build, tmp_path / "out"), *options]) == 0, capsys.readouterr().err
    loaded = load_language_model(build / "target", role="target", dtype="float32")
    judge = ValidityAdapter.from_pretrained(tmp_path / "out" / "adapter", loaded.model)
    first = ValidityAdapter.from_pretrained(build / "first" / "adapter", loaded.model)
    for name, weight in first.head.state_dict().items():  # the trunk is the first judge
        assert torch.equal(weight, judge.head.trunk.state_dict()[name]), name
    assert judge.config.stream["start_from"] == str(build / "first" / "adapter")
    assert of_floor and judge.train_problems >= set(of_floor), "held-out drafts have no part in the floor"
    assert judge.train_problems >= first.train_problems and judge.config.threshold is not None
    learnt = [tensor for name, tensor in judge.tensors.items() if "lora_B" in name]
    assert any(tensor.abs().max() > 0 for tensor in learnt) == (lora_rank > 0)
    assert len(judge.head.stream.layers) == hidden_layers and judge.head.out.weight.abs().max() > 0

    base = load_language_model(build / "target", role="target", dtype="float32", trainable=True)
    texts = TokenTexts(tokenizer, loaded.eos_ids, judge.head.config.buckets)
    model = StreamModel(base.model, judge.head, texts, LoraOptions(4, 32)).eval()
    trained = {f"{name.removesuffix('.weight')}.default.weight": tensor for name, tensor in judge.tensors.items()}
    parameters = dict(model.target.named_parameters())
    with torch.no_grad():
        for name, tensor in trained.items():
            parameters[name].copy_(tensor)
    verifier = Verifier(Decoder(loaded.model, loaded.eos_ids), judge, Segmenter(loaded.tokenizer))
    together = batch(loaded, build)
    with torch.inference_mode():
        logits = model(**{key: together[key] for key in (*INPUTS, "context", "visible")})["logits"]
    for one_pass in (True, False):
        verifier.scorer.one_pass = one_pass
        for row, draft in zip(logits, list(read_drafts(build / "build"))[:8], strict=True):
            verifier.decoder.seek(loaded.render(draft.row.prompt))
            found = verifier.verify(draft.row.draft_ids, draft.row.cuts).validity
            expected = judge.config.validity(row[: len(found)])
            assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_first_judge_has_a_number_type_of_its_own(build, tmp_path, capsys, monkeypatch):
    """As the recipes for public weights have: the head in float32, its correction in bfloat16."""
    seen, real = [], ValidityTrainer.train
    monkeypatch.setattr(
        ValidityTrainer,
        "train",
        lambda self, *a, **k: seen.append(self.accelerator.mixed_precision) or real(self, *a, **k),
    )
    first = recipe(build, tmp_path / "elsewhere", "logprob", max_steps=1, k=3)
    options = [*OPTIONS, "--max_steps", "1", "--bf16", "true", "--lora_rank", "0", "--hidden_layers", "2"]
    assert main([recipe(build, tmp_path / "out", start_from=first), *options]) == 0, capsys.readouterr().err
    assert seen == ["no", "bf16"]


@pytest.mark.slow
def test_the_first_judge_is_trained_before_it(build, tmp_path, capsys):
    """With the sizes and the settings of its own recipe, on the drafts of this one."""
    first = recipe(build, tmp_path / "elsewhere", "logprob", width=16, max_steps=2, k=3)
    options = [*OPTIONS, "--max_steps", "2", "--k", "5"]
    assert main([recipe(build, tmp_path / "out", start_from=first), *options]) == 0, capsys.readouterr().err
    target = load_language_model(build / "target", role="target", dtype="float32").model
    trunk = ValidityAdapter.from_pretrained(tmp_path / "out" / "logprob" / "adapter", target)
    judge = ValidityAdapter.from_pretrained(tmp_path / "out" / "adapter", target)
    assert judge.config.stream["start_from"] == str(tmp_path / "out" / "logprob" / "adapter")
    assert judge.head.config == trunk.head.config and trunk.head.config.width == 16 and trunk.head.config.k == 3
    assert judge.train_problems == trunk.train_problems
    assert not (tmp_path / "elsewhere").exists()
    for kind in ("stream", "logprob"):  # of the same sizes, but corrected
        again = recipe(build, tmp_path / "again", kind, start_from=str(tmp_path / "out" / "adapter"), width=16, k=3)
        assert main([again, *OPTIONS]) == 2
        assert "is no judge on log-probabilities alone: name" in capsys.readouterr().err
    restart = ["--resume_from_checkpoint", "restart"]
    narrow = recipe(build, tmp_path / "elsewhere", "logprob", width=8, max_steps=2, k=3)
    more = [recipe(build, tmp_path / "out", start_from=narrow)]
    assert main([*more, *options]) == 2 and "--resume_from_checkpoint restart" in capsys.readouterr().err
    assert main([*more, *options, *restart]) == 0, capsys.readouterr().err
    other = recipe(build, tmp_path / "other")
    assert main([recipe(build, tmp_path / "again", start_from=other), *options]) == 2
    assert "is a recipe of kind stream, not logprob" in capsys.readouterr().err


@pytest.mark.slow
def test_a_correction_is_not_taken_to_another_trunk(build, tmp_path, capsys):
    def trunk(rate: str) -> None:
        steps = ["--max_steps", "2", "--learning_rate", rate, "--resume_from_checkpoint", "restart"]
        assert main([recipe(build, tmp_path / "trunk", "logprob", k=3), *OPTIONS, *steps]) == 0

    trunk("1e-3")
    own = recipe(build, tmp_path / "out", start_from=str(tmp_path / "trunk" / "adapter"))
    assert main([own, *OPTIONS, "--max_steps", "2"]) == 0, capsys.readouterr().err
    trunk("3e-2")
    assert main([own, *OPTIONS, "--max_steps", "2"]) == 2
    assert "holds checkpoints of a training with examples" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_training_continues_as_if_it_had_not_been(build, tmp_path):
    options = [*OPTIONS, "--save_steps", "2"]
    assert main([recipe(build, tmp_path / "whole"), *options, "--max_steps", "4"]) == 0
    (tmp_path / "part").mkdir()
    for name in ("checkpoint-2", "parse_run.json"):
        source = tmp_path / "whole" / name
        if source.exists():
            source.rename(tmp_path / "part" / name)
    assert main([recipe(build, tmp_path / "part"), *options, "--max_steps", "4"]) == 0
    target = load_language_model(build / "target", role="target", dtype="float32").model
    one, two = (ValidityAdapter.from_pretrained(tmp_path / name / "adapter", target) for name in ("whole", "part"))
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, two.tensors[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_untrained_it_is_its_trunk_and_every_trained_weight_has_a_gradient(build, tokenizer, checkpointing):
    base = load_language_model(build / "target", role="target", dtype="float32", trainable=True)
    trunk, texts = LogprobHead(LogprobHeadConfig(k=3, width=8, buckets=64)), TokenTexts(tokenizer, (), 64)
    size = base.model.config.hidden_size
    model = StreamModel(base.model, StreamHead(trunk, StreamHeadConfig(size, floor=-30.0)), texts)
    if checkpointing:
        model.activation_checkpointing_enable()
    inputs = batch(base, build)
    streamed = {key: inputs[key] for key in (*INPUTS, "context", "visible")}
    alone = LogprobModel(trunk, texts)(**{key: inputs[key] for key in INPUTS})["logits"]
    assert torch.equal(model(**streamed)["logits"], alone)
    torch.nn.init.normal_(model.head.out.weight)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.train()(**streamed)["logits"][inputs["labels"] >= 0].sum().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("lora" in name for name in trained) and not any("trunk" in name for name in trained)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained.values())
    kept = set(model.state_dict())
    assert kept == set(trained)


def test_gradients_are_those_of_finite_differences(build, tokenizer):
    """Layers prepacked for inference would pass a wrong gradient without an error."""
    torch.manual_seed(0)
    base = load_language_model(build / "target", role="target", dtype="float32", trainable=True)
    trunk, texts = LogprobHead(LogprobHeadConfig(k=3, width=8, buckets=64)), TokenTexts(tokenizer, (), 64)
    model = StreamModel(base.model, StreamHead(trunk, StreamHeadConfig(base.model.config.hidden_size)), texts).double()
    torch.nn.init.normal_(model.head.out.weight)
    chosen = next(p for name, p in model.named_parameters() if "layers.0" in name and "lora_B" in name)
    inputs = {key: batch(base, build, 2)[key] for key in (*INPUTS, "context", "visible")}
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    found = model.states(inputs["context"], inputs["visible"], inputs["ids"]).square().sum()
    (gradient,) = torch.autograd.grad(found, chosen)
    step = torch.randn_like(chosen) * 3e-3  # norms compute in float32
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            chosen.add_(sign * step)
            values.append(model.states(inputs["context"], inputs["visible"], inputs["ids"]).square().sum())
            chosen.sub_(sign * step)
    assert float(values[0] - values[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start_from", ""], "the recipe needs the key start_from: an adapter on log-probabilities"),
        (["--start_from", "nowhere/at/all"], "There is no folder 'nowhere/at/all'"),
        (["--start_from", str(REPOSITORY / "recipes/eagle3.yaml")], "is a recipe of kind eagle, not logprob"),
        (["--sure_share", "0.5"], "sure_share is 0.5; it must be at least 0 and below 0.5"),
        (["--lora_rank", "-1"], "lora_rank is -1; it must be at least 0"),
        (["--lora_rank", "0"], "lora_rank and hidden_layers are 0, so nothing would be corrected: set one of them"),
        (["--stream_dropout", "1"], "stream_dropout is 1.0; it must be at least 0 and below 1"),
        (["--min_wrong_drafts", "99"], "for training, fewer than min_wrong_drafts 99: build more"),
        (["--lora_target_modules", "qproj"], "qproj"),
    ],
)
def test_mistakes_are_one_sentence(build, tmp_path, capsys, options, message):
    assert main([recipe(build, tmp_path / "out"), *OPTIONS, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("error: ")


def test_too_few_errors_are_found_before_the_head_is_trained(build, tmp_path, capsys):
    first = recipe(build, tmp_path / "first", "logprob", k=3)
    path = recipe(build, tmp_path / "out", start_from=first)
    assert main([path, *OPTIONS, "--min_wrong_drafts", "99"]) == 2
    assert "fewer than min_wrong_drafts 99: build more problems" in capsys.readouterr().err
    assert not (tmp_path / "out" / "logprob").exists()


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.slow
def test_the_plan_counts_what_a_step_keeps(build, tokenizer, tmp_path, checkpointing):
    options = [*OPTIONS, "--max_length", "48", "--activation_checkpointing", checkpointing]
    config = load_config_of(recipe(build, tmp_path / "out"), options)
    counted = plan_training(config).step
    base = load_language_model(build / "target", role="target", dtype="float32", trainable=True)
    model = build_model(
        config, base.model, LogprobHead(config.head), TokenTexts(tokenizer, (), config.buckets)
    ).train()
    if config.activation_checkpointing:
        model.activation_checkpointing_enable()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its address
        return tensor

    b, t, visible = 8, 48, torch.full((8, 1), PROMPT_TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.states(torch.ones(b, PROMPT_TOKENS, dtype=torch.long), visible, torch.ones(b, t).long())
        model.head.correct(torch.zeros(b, t), torch.zeros(b, t, config.width), states, torch.ones(b, t).bool()).sum()
    assert counted.saved == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.2)


def test_its_sizes_and_verdicts_are_those_of_the_adapter_that_it_corrects():
    _, config = load_recipe(REPOSITORY / "recipes/train.yaml", ["--start_from", "zoo:adapter", "--width", "8"])
    assert (config.width, config.sharpness) == (8, 8.0)
    first_rung(config)
    assert (config.width, config.sharpness) == (64, 1.0), "the adapters that ship add doubt up"


def test_sizes_and_verdicts_that_are_asked_for_are_those_of_the_head_that_it_trains_first(build, tmp_path):
    first = recipe(build, tmp_path / "first", "logprob", text_size=6, width=12, max_steps=1)
    _, config = load_recipe(
        recipe(build, tmp_path / "out", start_from=first), [*OPTIONS, "--width", "8", "--sharpness", "2"]
    )
    first_rung(config)
    assert (config.text_size, config.width, config.sharpness) == (6, 8, 2.0), "text_size is the recipe's own"


def test_the_real_recipe_builds_on_a_tiny_model_of_its_kind(build, make_model, tokenizer, tmp_path):
    """Qwen3's configuration end to end: load, wrap, one step in bfloat16 with checkpointing."""
    make_model("qwen3").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    overrides = ["--target", str(tmp_path / "target"), "--output_dir", str(tmp_path / "out"), "--report_to", "none"]
    _, config = load_recipe(REPOSITORY / "recipes/real/train.yaml", [*overrides, "--use_cpu", "--k", "3"])
    assert (config.lora_rank, config.start_from) == (32, "recipes/real/train-logprob.yaml")
    lm = load_language_model(config.target, role="target", dtype=config.target_dtype, trainable=True)
    assert lm.model.dtype == torch.bfloat16
    texts = TokenTexts(tokenizer, (), config.buckets)
    model = build_model(config, lm.model, LogprobHead(config.head), texts).train()
    if config.activation_checkpointing:
        model.activation_checkpointing_enable()
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    inputs = batch(lm, build)
    torch.nn.init.normal_(model.head.out.weight)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**{key: inputs[key] for key in (*INPUTS, "context", "visible")})["logits"]
    loss = logits[inputs["labels"] >= 0].float().mean()
    loss.backward()
    assert torch.isfinite(loss)


def test_the_floor_leaves_out_the_surest_of_the_wrong_drafts(build, tokenizer):
    trunk, texts = LogprobHead(LogprobHeadConfig(k=3, width=8, buckets=64)), TokenTexts(tokenizer, (), 64)
    drafts = [LogprobExample.of(draft, 3) for draft in read_drafts(build / "build")]
    most = []
    for example in drafts:
        read = example.logprobs
        with torch.no_grad():
            each, _ = trunk(read.features[None], read.ids[None], read.top_ids[None, :, 0], texts)
        most.append(float(each[0].masked_fill(read.is_greedy_choice, NO_DOUBT).max()))
    floor, share = choose_floor(trunk, drafts, texts, 0.25)
    below = [doubt <= floor for doubt, example in zip(most, drafts, strict=True) if not all(example.labels)]
    assert 0.15 < sum(below) / len(below) < 0.35
    assert share == pytest.approx(sum(doubt > floor for doubt in most) / len(most))
    assert choose_floor(trunk, drafts, texts, 0) == (NO_DOUBT, 1.0)
