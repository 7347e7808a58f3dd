"""Training of the embedded models: packed rows leak nothing, the optimizer resumes, a tiny run works end to end."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data_tools.tasks.registry import load_task
from parse_infer.models.loading import load_language_model, load_weights
from parse_train.muon import MuonWithAdamW
from parse_train.training_config import IGNORED
from parse_zoo.train import language_model
from parse_zoo.train.language_model import LanguageModelTrainer, loss_tokens, right_answers
from parse_zoo.train.language_model import main as train_model
from parse_zoo.train.language_model_config import LanguageModelConfig
from parse_zoo.train.packed_samples import PackedSamples, collate
from parse_zoo.train.starting_weights import start_from
from parse_zoo.train.tokenizer import TokenizerConfig, make_tokenizer

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(TokenizerConfig(output_dir=str(folder), vocab_size=600, n_problems=300))
    return str(folder)


def config(tokenizer_folder: str, output_dir: Path, **changes) -> LanguageModelConfig:
    fields = {"max_steps": 3, "per_device_train_batch_size": 2, "row_length": 256, "torch_compile_backbone": False}
    fields |= {"output_dir": str(output_dir), "tokenizer": tokenizer_folder, "model_config": ARCHITECTURE, **changes}
    return LanguageModelConfig(report_to="none", use_cpu=True, **fields)


def tiny_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    fields = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **fields)).eval()


def test_tokenizer_reads_numbers_digit_by_digit_and_loses_nothing(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = "There are 17 girls x 312 = 5,304.\n#### 5304 ünï"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([i]) for i in ids]
    assert all(sum(c.isdigit() for c in piece) <= 1 for piece in pieces), pieces
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>Q<|assistant|>A<|end|>"
    assert (
        tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == "<|user|>Q<|assistant|>"
    )


def test_a_packed_row_equals_its_samples_alone(tokenizer_folder, tmp_path):
    """No sample sees another one, and its positions start at zero."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = list(itertools.islice(PackedSamples(config(tokenizer_folder, tmp_path), tokenizer), 3))
    model = tiny_model(len(tokenizer))
    batch = collate(rows)
    with torch.no_grad():
        packed = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=batch["attention_mask"]
        ).logits
        documents = 0
        for i, row in enumerate(rows):
            for number in range(int(row["document"].max()) + 1):
                where = row["document"] == number
                alone = model(input_ids=row["input_ids"][where][None]).logits[0]
                torch.testing.assert_close(packed[i][where], alone, atol=1e-5, rtol=1e-4)
                assert row["labels"][where][0] == IGNORED
                documents += 1
    assert documents > 3, "rows hold one sample each: nothing was packed"
    answer = rows[0]["labels"] != IGNORED
    assert torch.equal(rows[0]["labels"][answer], rows[0]["input_ids"][answer])


def test_muon_takes_the_matrices_and_resumes():
    def run(steps: int, resume_at: int | None = None) -> torch.Tensor:
        model = tiny_model(64)
        optimizer = MuonWithAdamW(model, [model.get_output_embeddings().weight], lr=1e-2, weight_decay=0.1)
        for step in range(steps):
            if step == resume_at:
                state = optimizer.state_dict()
                optimizer = MuonWithAdamW(model, [model.get_output_embeddings().weight], lr=5.0)
                optimizer.load_state_dict(state)
            torch.manual_seed(step)
            model(input_ids=torch.randint(0, 64, (2, 8)), labels=torch.randint(0, 64, (2, 8))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.flatten() for p in model.parameters()])

    model = tiny_model(64)
    parts = MuonWithAdamW(model, [model.get_output_embeddings().weight], lr=1e-2).parts
    muon = {id(p) for group in parts["muon"].param_groups for p in group["params"]}
    assert muon == {id(p) for name, p in model.named_parameters() if name.endswith("proj.weight")}
    torch.testing.assert_close(run(4), run(4, resume_at=2), atol=0, rtol=0)


class _Products(TorchFunctionMode):
    """What number types are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.addmm:
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_muon_in_float32_takes_the_steps_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without bfloat16 one step of a small head took seconds."""
    found = {}
    for fast in (True, False):
        monkeypatch.setattr("parse_train.muon.multiplies_in_16_bits", lambda device: fast)  # noqa: B023
        torch.manual_seed(0)
        layer = torch.nn.Linear(60, 40)
        optimizer = MuonWithAdamW(layer, [], lr=1e-2)
        start = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(40, 60)
        with _Products() as products:
            optimizer.step()
        assert products.dtypes == {torch.bfloat16 if fast else torch.float32}
        found[fast] = layer.weight.detach() - start
    difference = (found[True] - found[False]).norm() / found[True].norm()
    assert 0 < difference < 0.02, difference


@pytest.mark.slow
def test_a_tiny_run_from_the_recipe_saves_a_model_that_loads(tokenizer_folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    fields = yaml.safe_load(Path("recipes/zoo/draft.yaml").read_text())
    fields |= {"tokenizer": tokenizer_folder, "output_dir": str(tmp_path / "run"), "model_config": ARCHITECTURE}
    fields |= {"max_steps": 3, "per_device_train_batch_size": 2, "row_length": 192, "torch_compile_backbone": False}
    fields |= {"initial_model": None, "initial_layers": None}
    recipe.write_text(yaml.safe_dump(fields | {"bf16": False, "save_steps": 2}))
    run = subprocess.run(
        [sys.executable, "-m", "parse_train", str(recipe)], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-2000:]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.dtype == torch.float32, "the embedded models run in float32 unless asked otherwise"
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path / "run" / "final").eos_token_id


def test_only_the_tokens_of_loss_tokenizer_compete(tokenizer_folder, tmp_path):
    """The loss is that of logits without the other tokens, but for those that occur in the batch."""
    few = str(tmp_path / "few")
    make_tokenizer(TokenizerConfig(output_dir=few, base_tokenizer=tokenizer_folder, vocab_size=450, n_problems=300))
    wanted = config(tokenizer_folder, tmp_path / "run", loss_tokenizer=few)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokens = loss_tokens(wanted, tokenizer)
    assert len(tokens) == 450 == len(tokens.unique())
    model, stream = tiny_model(len(tokenizer)), PackedSamples(wanted, tokenizer)
    trainer = LanguageModelTrainer(loss_tokens=tokens, model=model, args=wanted, train_dataset=stream)
    batch = collate([next(iter(stream))])
    labels = batch["labels"][:, 1:]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    left_out = torch.ones(len(tokenizer), dtype=torch.bool).index_fill(0, tokens, False)
    place = int((labels[0] != IGNORED).nonzero()[0])
    with torch.no_grad():
        for label in (tokens[7], left_out.nonzero()[-1, 0]):
            labels[0, place] = label
            left_out[labels[labels != IGNORED]] = False
            logits = model(**inputs).logits[:, :-1].masked_fill(left_out, -torch.inf)
            expected = torch.nn.functional.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED])
            assert trainer.compute_loss(model, dict(batch)) == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ValueError, match="has tokens that"):
        loss_tokens(config(few, tmp_path / "run", loss_tokenizer=tokenizer_folder), AutoTokenizer.from_pretrained(few))


def test_a_draft_model_starts_from_layers_of_its_target(tmp_path):
    target = tiny_model(64)
    target.save_pretrained(tmp_path)
    fields = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"} | {"num_hidden_layers": 1}
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=64, **fields))
    start_from(draft, str(tmp_path), [1])
    torch.testing.assert_close(draft.model.layers[0].mlp.up_proj.weight, target.model.layers[1].mlp.up_proj.weight)
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.weight)
    with pytest.raises(ValueError, match="name one source layer per layer"):
        start_from(draft, str(tmp_path), [0, 1])
    deeper = LlamaForCausalLM(LlamaConfig(vocab_size=64, **fields | {"num_hidden_layers": 4})).eval()
    start_from(deeper, str(tmp_path), [0, 0, 1, 1])
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(deeper(ids).logits, target.eval()(ids).logits)
    other = LlamaForCausalLM(LlamaConfig(vocab_size=65, **fields))
    with pytest.raises(ValueError, match="do not fit model_config"):
        start_from(other, str(tmp_path), [0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": ""}, "key tokenizer"),
        ({"model_config": {}}, "model_type"),
        ({"max_steps": -1}, "max_steps is -1"),
        ({"drill_max_number": 10}, "drill_max_number is 10; it must be at least 20"),
        ({"drill_share": 1.5}, "drill_share is 1.5; it must be from 0 to 1"),
        ({"drill_until": 0}, "drill_until is 0; it must be above 0"),
    ],
)
def test_mistakes_in_the_recipe_are_one_sentence(tokenizer_folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        config(tokenizer_folder, tmp_path, **change)


def test_tokens_of_the_same_text_keep_their_embedding(tmp_path, tokenizer_folder):
    """A model with another tokenizer still starts from the layers, and from what it shares."""
    source = tiny_model(AutoTokenizer.from_pretrained("zoo/parse_zoo/models/target").vocab_size)
    source.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained("zoo/parse_zoo/models/target").save_pretrained(tmp_path)
    mine, theirs = AutoTokenizer.from_pretrained(tokenizer_folder), AutoTokenizer.from_pretrained(tmp_path)
    fields = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=len(mine), **fields))
    start_from(draft, str(tmp_path), None, mine)
    shared = mine.get_vocab().keys() & theirs.get_vocab().keys()
    assert 256 < len(shared) < len(mine)
    rows = {text: (mine.get_vocab()[text], theirs.get_vocab()[text]) for text in shared}
    for weight, before in (
        (draft.lm_head.weight, source.lm_head.weight),
        (draft.model.embed_tokens.weight, source.model.embed_tokens.weight),
    ):
        to, of = (torch.tensor(ids) for ids in zip(*rows.values(), strict=True))
        torch.testing.assert_close(weight[to], before[of])
        assert 0.5 < float(weight.detach().std() / before.detach().std()) < 2
    torch.testing.assert_close(draft.model.layers[1].mlp.up_proj.weight, source.model.layers[1].mlp.up_proj.weight)


@pytest.mark.slow
def test_a_draft_model_learns_what_its_target_answers(tokenizer_folder, tmp_path, capsys):
    """Right answers only, drawn at the wanted share, and written once."""
    model = {"answers_of": "zoo:draft", "n_answers": 24, "answer_temperature": 0.0}
    wanted = config(tokenizer_folder, tmp_path, **model)
    answers = right_answers(wanted)
    assert "of 24 answers of zoo:draft are right" in capsys.readouterr().out
    assert 8 < len(answers) < 24, "the embedded draft model is right more often than not, and not always"
    task = load_task("gsm_symbolic")
    assert all(task.check(problem, text) and text != problem.solution for problem, text in answers)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = {text for _, text in answers}
    for share, least, most in ((1.0, 1.0, 1.0), (0.5, 0.3, 0.7), (0.0, 0.0, 0.0)):
        rows = PackedSamples(
            config(tokenizer_folder, tmp_path, **model, answer_share=share, drill_share=0.0), tokenizer, answers
        )
        samples = [
            tokenizer.decode([i for i in labels if i != IGNORED][:-1])
            for _, labels in itertools.islice(rows._samples(Random(0), [0.0]), 100)
        ]
        found = sum(sample in texts for sample in samples) / len(samples)
        assert least <= found <= most, f"share {share}: {found}"
    before = sorted(tmp_path.rglob("*.jsonl"))
    stamps = [path.stat().st_mtime_ns for path in before]
    right_answers(wanted)
    assert [path.stat().st_mtime_ns for path in before] == stamps


@pytest.mark.slow
def test_a_lora_run_saves_an_adapter_that_peft_loads_and_resumes(tokenizer_folder, tmp_path):
    """The base stays as it is; a checkpoint is as small as the LoRA; a finished run is exported again, not trained."""
    base = tmp_path / "base"
    tiny_model(len(AutoTokenizer.from_pretrained(tokenizer_folder))).save_pretrained(base)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(base)
    fields = {"model_config": {}, "initial_model": str(base), "lora_rank": 4, "save_steps": 2}
    train_model(config(str(base), tmp_path / "run", **fields, max_steps=2))
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    exported = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert exported and all(t.dtype == torch.bfloat16 for t in exported.values())
    assert any(t.any() for key, t in exported.items() if "lora_B" in key), "nothing was learnt"
    shutil.rmtree(tmp_path / "run" / "final")
    train_model(config(str(base), tmp_path / "run", **fields, max_steps=2))
    again = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert all(torch.equal(again[key], exported[key]) for key in exported)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(model, tmp_path / "run" / "final").merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)


@pytest.mark.slow
def test_a_lora_on_a_pretrained_model_loads_by_its_folder_and_knows_its_base(tokenizer_folder, tmp_path):
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tiny_model(len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    fields = {"model_config": {}, "initial_model": str(base), "lora_rank": 2, "max_steps": 1, "save_strategy": "no"}
    language_model.main(config(str(base), tmp_path / "run", **fields))
    final = tmp_path / "run" / "final"
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = load_language_model(final, role="draft", device="cpu").model
    moved = [n for n, p in load_weights(base).state_dict().items() if not torch.equal(p, model.state_dict()[n])]
    assert moved and all("_proj" in name for name in moved)
    torch.manual_seed(1)
    LlamaForCausalLM(model.config).save_pretrained(base)
    with pytest.raises(ValueError, match=f"was trained on {str(base)!r}, and .* has other weights"):
        load_weights(final)


@pytest.mark.slow
def test_a_lora_keeps_most_of_its_energy_in_fewer_bytes(tokenizer_folder, tmp_path):
    """The same training exported twice: with all of its update, and with the ranks that 95 % of it need."""
    base = tmp_path / "base"
    tiny_model(len(AutoTokenizer.from_pretrained(tokenizer_folder))).save_pretrained(base)
    fields = {"model_config": {}, "initial_model": str(base), "lora_rank": 8, "max_steps": 3}
    changes, sizes = [], []
    for energy in (1.0, 0.95):
        run = tmp_path / f"run-{energy}"
        language_model.main(config(str(tokenizer_folder), run, **fields, lora_energy=energy))
        sizes.append((run / "final" / "adapter_model.safetensors").stat().st_size)
        before = load_weights(base).state_dict()
        after = load_weights(run / "final").state_dict()
        changes.append(
            {n: after[n].float() - before[n].float() for n in before if not torch.equal(after[n], before[n])}
        )
    full, reduced = changes
    assert full.keys() == reduced.keys() and sizes[1] < 0.9 * sizes[0]
    lost = [float((full[n] - reduced[n]).square().sum() / full[n].square().sum()) for n in full]
    assert 0.005 < max(lost) < 0.06, f"at most 5 % was to be lost, and a little by rounding: {max(lost):.3f}"
    with pytest.raises(ValueError, match=r"lora_energy is 1.5; it must be above 0 and at most 1"):
        config(str(tokenizer_folder), tmp_path, **fields, lora_energy=1.5)


@pytest.mark.slow
def test_a_lora_continues_only_one_of_the_same_kind(tokenizer_folder, tmp_path):
    base = tmp_path / "base"
    tiny_model(len(AutoTokenizer.from_pretrained(tokenizer_folder))).save_pretrained(base)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(base)
    fields = {"model_config": {}, "initial_model": str(base), "lora_rank": 4, "max_steps": 1}
    train_model(config(str(base), tmp_path / "first", **fields))
    first = str(tmp_path / "first" / "final")
    on = {**fields, "initial_lora": first}
    train_model(config(str(base), tmp_path / "second", **on, learning_rate=0.0))
    before, after = (load_file(tmp_path / run / "final" / "adapter_model.safetensors") for run in ("first", "second"))
    assert all(torch.equal(before[key], after[key]) for key in before), "it did not start from the first LoRA"
    for change, message in (
        ({"lora_rank": 8}, "has r 4, but the recipe has 8"),
        ({"lora_alpha": 8}, "has lora_alpha 32, but the recipe has 8"),
        ({"initial_lora": str(base)}, "is not a LoRA folder"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            train_model(config(str(base), tmp_path / "third", **on | change))
    other = tmp_path / "other"
    model = tiny_model(len(AutoTokenizer.from_pretrained(tokenizer_folder)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    model.save_pretrained(other)
    with pytest.raises(ValueError, match="has other weights"):
        train_model(config(str(base), tmp_path / "third", **on | {"initial_model": str(other)}))


def test_a_task_with_an_end_begins_again(tokenizer_folder, tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"question": f"What is 1 + {i}?", "answer": f"1 + {i} = {1 + i}.\n#### {1 + i}"} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "gsm8k", "task_options": {"path": str(path)}, "drill_share": 0.0}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    samples = PackedSamples(config(tokenizer_folder, tmp_path, **task), tokenizer)._samples(Random(0), [0.0])
    found = [tuple(ids) for ids, _ in itertools.islice(samples, 7)]
    assert len(set(found)) == 3 and found[:3] == found[3:6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataloader_num_workers": 2}, "trains in one process without dataloader workers"),
        ({"row_length": 4}, "row_length is 4, but 1000 successive samples were longer: raise row_length"),
    ],
)
@pytest.mark.slow
def test_data_without_rows_is_reported(change, message, tokenizer_folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_model(config(tokenizer_folder, tmp_path / "run", **change))
