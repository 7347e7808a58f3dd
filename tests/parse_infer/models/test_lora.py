"""A LoRA loads as a language model: the base it names with peft's own merge, or one sentence why not."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from parse_infer.engine import ParseEngine
from parse_infer.models import names
from parse_infer.models.loading import load_language_model, load_tokenizer, load_weights, weights_folder
from parse_infer.models.lora import describe_base, write_base
from tests.conftest import randomise
from tests.parse_infer.language_models import refusal, word_tokenizer

PROMPT = "Tom has 5 apples."


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save_base(folder: Path, model, tokenizer) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_lora(folder: Path, base: Path | str, model=None, **options) -> Path:
    """A random LoRA on the model called `base`, whose weights are `model` (default: those in the folder `base`)."""
    model = AutoModelForCausalLM.from_pretrained(base) if model is None else model
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False} | options
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        wrapped.peft_config["default"].base_model_name_or_path = str(base)
        wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def base(make_model, tokenizer, tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "model", make_model("llama_gqa"), tokenizer)


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory) -> Path:
    return save_lora(tmp_path_factory.mktemp("lora") / "lora", base)


@pytest.fixture
def broken(lora, tmp_path) -> Path:
    """A copy of the LoRA, to be damaged."""
    return shutil.copytree(lora, tmp_path / "broken")


def merged_by_peft(base: Path, lora: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora).merge_and_unload()


def distance(one, other) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return max((ours[key] - theirs[key]).abs().max().item() for key in ours)


def test_other_programs_find_it_merged_in_a_folder_that_is_made_once(base, lora, broken, tmp_path, monkeypatch):
    monkeypatch.setenv("PARSE_CACHE", str(tmp_path / "cache"))
    folder = weights_folder(lora)
    assert folder == weights_folder(broken) and folder.is_relative_to(tmp_path / "cache")  # of the same content
    assert distance(load_weights(folder), load_weights(lora)) == 0
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(base).get_vocab()
    write_base(broken, describe_base(load_weights(base), str(base)))
    assert weights_folder(broken) != folder and weights_folder(base) == base


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {"target_modules": r"model\.layers\.1\..*_proj"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 1, "down_proj": 12}},
        {"layers_to_transform": [1], "target_modules": ["up_proj"]},
    ],
)
def test_the_merge_is_pefts(base, tmp_path, options):
    lora = save_lora(tmp_path / "lora", base, **options)
    ours = load_weights(lora)
    assert distance(ours, merged_by_peft(base, lora)) < 1e-6
    assert distance(ours, load_weights(base)) > 0.01
    assert not any("lora" in name for name, _ in ours.named_modules())


def test_layers_that_keep_their_weight_transposed(tokenizer, tmp_path):
    config = GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2, n_positions=64, tie_word_embeddings=True)
    base = save_base(tmp_path / "base", randomise(AutoModelForCausalLM.from_config(config), 0), tokenizer)
    lora = save_lora(tmp_path / "lora", base, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    assert distance(load_weights(lora), merged_by_peft(base, lora)) < 1e-6


def test_it_is_rounded_once_and_rotary_frequencies_are_not(base, lora):
    exact, half = load_weights(lora), load_weights(lora, torch.bfloat16)
    assert half.dtype == half.config.dtype == torch.bfloat16
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(half.parameters(), exact.parameters(), strict=True))
    assert torch.equal(half.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert half.lm_head.weight is half.model.embed_tokens.weight


def test_an_engine_whose_target_and_draft_are_loras(base, lora):
    engine = ParseEngine.from_pretrained(lora, str(lora), judge="zero_shot", device="cpu")
    alone = engine.generate_target(PROMPT, max_new_tokens=16)
    assert engine.generate(PROMPT, mode="exact", max_new_tokens=16).token_ids == alone.token_ids
    plain = ParseEngine.from_models(load_language_model(base, role="target", device="cpu"))
    assert plain.generate_target(PROMPT, max_new_tokens=16).token_ids != alone.token_ids
    assert engine.target.model.config._name_or_path == str(lora)


def test_a_lora_on_a_lora(base, lora, tmp_path):
    first = load_weights(lora)
    second = save_lora(tmp_path / "second", lora, load_weights(lora), target_modules=["up_proj"], r=2)
    write_base(second, describe_base(first, str(lora)))
    expected = merged_by_peft_into(load_weights(lora), second)
    assert distance(load_weights(second), expected) < 1e-6


def merged_by_peft_into(model, lora: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, lora).merge_and_unload()


def test_its_tokenizer_or_its_template_alone_wins_over_the_bases(base, broken, tokenizer):
    assert load_tokenizer(broken).chat_template == tokenizer.chat_template
    (broken / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    lm = load_language_model(broken, role="draft", device="cpu")
    assert lm.tokenizer.decode(lm.render("Hi")) == "Hi!"
    word_tokenizer().save_pretrained(broken)
    own = load_tokenizer(broken)
    assert own.get_vocab() == word_tokenizer().get_vocab() and own.chat_template == word_tokenizer().chat_template


def test_embedded_loras_go_by_name(base, lora, monkeypatch, tmp_path):
    monkeypatch.setattr(names, "_collections", lambda: {"zoo": tmp_path})
    shutil.copytree(lora, tmp_path / "smollm2")
    assert names.resolve("zoo:smollm2") == tmp_path / "smollm2"
    model = load_weights("zoo:smollm2")
    assert distance(model, load_weights(lora)) == 0 and model.config._name_or_path == "zoo:smollm2"


def change_config(folder: Path, **changes) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def change_tensors(folder: Path, change) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = {change(key): tensor for key, tensor in load_file(path).items()}
    save_file(tensors, path)
    return folder


def test_the_weights_it_was_trained_on_are_the_only_ones(base, broken, make_model, tokenizer, tmp_path):
    write_base(broken, describe_base(load_weights(base), "the-right-base"))
    assert load_weights(broken, "bfloat16").dtype == torch.bfloat16
    other = save_base(tmp_path / "other", make_model("llama_gqa", seed=3), tokenizer)
    change_config(broken, base_model_name_or_path=str(other))
    text = refusal(broken)
    assert str(broken) in text and "'the-right-base'" in text and str(other) in text
    (broken / "base_model.json").write_text('{"fingerprint": 3}')
    assert "base_model.json is damaged" in refusal(broken)


def test_a_base_of_another_shape_or_architecture(broken, make_model, tokenizer, tmp_path):
    wide = make_model("llama_gqa", hidden_size=64)
    change_config(broken, base_model_name_or_path=str(save_base(tmp_path / "wide", wide, tokenizer)))
    assert "does not fit its base" in (text := refusal(broken)) and "have shapes" in text
    shallow = make_model("llama_gqa", num_hidden_layers=1)
    change_config(broken, base_model_name_or_path=str(save_base(tmp_path / "shallow", shallow, tokenizer)))
    assert "no linear layer of LlamaForCausalLM" in refusal(broken)


def test_layers_that_the_base_does_not_have(broken):
    assert "no linear layer" in refusal(change_tensors(broken, lambda key: key.replace("q_proj", "query")))


def test_an_output_layer_that_is_the_embedding_too(base, tmp_path):
    tied = save_lora(tmp_path / "tied", base, target_modules=["lm_head"])
    assert "shares with its embedding" in refusal(tied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True, which is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"peft_type": "IA3"}, "IA3 adapter"),
        ({"base_model_name_or_path": None}, "does not name the LoRA's base model"),
        ({"base_model_name_or_path": "./gone"}, "no folder './gone'"),
        ({"base_model_name_or_path": "zoo:gone"}, "not an embedded model"),
    ],
)
def test_a_configuration_that_cannot_be_merged(broken, changes, message):
    assert message in refusal(change_config(broken, **changes))


def test_a_lora_that_names_itself(broken):
    assert "names itself" in refusal(change_config(broken, base_model_name_or_path=str(broken)))


def test_weights_that_are_missing_or_damaged(broken):
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:300])
    assert "damaged" in refusal(broken)
    weights.unlink()
    assert "adapter_model.safetensors is missing" in refusal(broken)


def test_a_validity_adapter_is_no_model_and_a_lora_no_validity_adapter(base, lora, random_adapter, tmp_path):
    target = load_language_model(base, role="target", device="cpu")
    adapter = random_adapter(target.model, stream=True).save_pretrained(tmp_path / "adapter")
    assert "is a validity adapter" in refusal(adapter)
    with pytest.raises(ValueError, match="is a validity adapter"):  # before the target is loaded
        ParseEngine.from_pretrained(base, adapter, device="cpu")
    with pytest.raises(FileNotFoundError, match="no complete validity adapter"):
        ParseEngine.from_pretrained(base, adapter=lora, device="cpu")
