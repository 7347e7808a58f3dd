"""Loading by name: what is accepted, and one clear sentence for what is not."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import Phi3Config, PreTrainedTokenizerFast
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from parse_infer.engine import ParseEngine
from parse_infer.models import loading, names
from parse_infer.models.attention import SPLIT_ATTENTION
from parse_infer.models.cpu import prepacked_linear
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import (
    LanguageModel,
    context_window,
    end_tokens,
    load_language_model,
    load_served_model,
    same_tokenizer,
)
from parse_infer.models.names import resolve
from tests.parse_infer.language_models import language_model, resembling, word_tokenizer

PROMPT = "Tom has 5 apples."


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may reach for the network: an id that is not on disk is an error at once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(make_model, tokenizer, tmp_path_factory) -> Path:
    """A folder with a target, a draft model and an adapter for the target."""
    folder = tmp_path_factory.mktemp("models")
    target = make_model("llama")
    for name, model in (("target", target), ("draft", resembling(make_model, target))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def broken(saved, tmp_path) -> Path:
    """A copy of the target's folder, to be damaged."""
    return shutil.copytree(saved / "target", tmp_path / "broken")


def test_an_engine_from_folders(saved, random_adapter, tmp_path):
    target = load_language_model(saved / "target", role="target", device="cpu")
    assert target.model.config._attn_implementation == SPLIT_ATTENTION
    adapter = random_adapter(target.model).save_pretrained(tmp_path / "adapter")
    engine = ParseEngine.from_pretrained(str(saved / "target"), saved / "draft", str(adapter), device="cpu")
    assert engine.threshold == engine.backend.judge.config.threshold == 0.5
    assert engine.draft.model.config._attn_implementation != SPLIT_ATTENTION
    alone = engine.generate_target(PROMPT, max_new_tokens=12)
    assert engine.generate(PROMPT, max_new_tokens=12, threshold=1.5).token_ids == alone.token_ids
    assert engine.generate(PROMPT, max_new_tokens=12, threshold=0.0).stats.acceptance_rate == 1.0
    with pytest.raises(ValueError, match="other weights"):  # same shape, but not the target it was trained for
        ParseEngine.from_pretrained(saved / "draft", adapter=adapter, device="cpu")


def test_zero_shot_or_an_adapter_but_not_both(saved):
    engine = ParseEngine.from_pretrained(saved / "target", saved / "draft", judge="zero_shot", device="cpu")
    assert 0 < engine.score(PROMPT, "So it is 5.").validity < 1
    with pytest.raises(ValueError, match="both given: choose one"):
        ParseEngine.from_pretrained(saved / "target", adapter="zoo:adapter", judge="zero_shot")


@pytest.mark.parametrize("fast", [True, False])
def test_the_dtype_is_that_of_the_files_unless_given_or_slow(saved, tmp_path, monkeypatch, fast):
    monkeypatch.setattr("parse_infer.models.loading.multiplies_in_16_bits", lambda device: fast)
    assert load_language_model(saved / "draft", role="draft", device="cpu").model.dtype == torch.float32
    half = load_language_model(saved / "draft", role="draft", device="cpu", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    half.model.save_pretrained(tmp_path)
    half.tokenizer.save_pretrained(tmp_path)
    again = load_language_model(tmp_path, role="draft", device="cpu")
    assert again.model.dtype == (torch.bfloat16 if fast else torch.float32)


class Asked(Exception):
    """Carries what transformers is asked for."""


@pytest.mark.parametrize(
    ("device", "accelerate", "expected"),
    [("cuda:0", True, {"": torch.device("cuda:0")}), ("cuda:0", False, None), ("cpu", True, None)],
)
def test_weights_for_a_gpu_are_read_to_it(saved, monkeypatch, device, accelerate, expected):
    """Not through a copy in the host's memory, where accelerate, which this takes, is installed."""

    def ask(folder, **options):
        raise Asked(options)

    monkeypatch.setattr(loading, "_device", lambda device: torch.device(device))
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: accelerate)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", ask)
    with pytest.raises(Asked) as asked:
        load_language_model(saved / "target", role="target", device=device)
    assert asked.value.args[0]["device_map"] == expected


def test_a_model_read_to_its_device_has_no_hooks(saved, monkeypatch):
    """A device map with several entries would leave some, and the decoder its fast forward."""
    whole, read = loading.AutoModelForCausalLM.from_pretrained, []

    def to_the_device(folder, **options):
        read.append(folder)
        return whole(folder, **options | {"device_map": {"": torch.device("cpu")}})

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", to_the_device)
    model = load_language_model(saved / "target", role="target", device="cpu")
    assert read and model.decoder.fast is not None
    assert not any(hasattr(module, "_hf_hook") for module in model.model.modules())


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_missing_device(saved, device):
    with pytest.raises(ValueError, match=f"'{device}'"):
        load_language_model(saved / "draft", role="draft", device=device)


def test_compiling_is_for_a_gpu(saved):
    with pytest.raises(ValueError, match="torch_compile is for decoding on a GPU, not on cpu"):
        load_language_model(saved / "draft", role="draft", device="cpu", torch_compile=True)


def test_a_dtype_that_does_not_exist(saved):
    for dtype in ("float7", "float8_e4m3fn", "int32"):
        with pytest.raises(ValueError, match=f"dtype is '{dtype}'; it must be 'auto'"):
            load_language_model(saved / "draft", role="draft", dtype=dtype)


def test_what_is_no_option_is_named(saved):
    for options, message in (
        ({"device": "meta"}, "The device 'meta' holds no weights"),
        ({"quantization_config": "bitsandbytes"}, "quantization_config is 'bitsandbytes'; give"),
        ({"template_options": ["enable_thinking"]}, r"template_options are \['enable_thinking'\]; give names"),
    ):
        with pytest.raises(ValueError, match=message):
            load_language_model(saved / "target", role="target", **options)


def test_what_is_no_model_is_named(make_model, tokenizer, random_adapter, tmp_path):
    model = make_model("llama")
    wrapped = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"'own' is a PeftModel.*: of a peft model pass model.merge_and_unload"):
        LanguageModel("own", wrapped.eval(), tokenizer)
    with pytest.raises(ValueError, match="the tokenizer of 'own' is a NoneType"):
        LanguageModel("own", model, None)
    with pytest.raises(ValueError, match=r"'own' is in training mode, .* call model.eval"):
        LanguageModel("own", copy.deepcopy(model).train(), tokenizer)
    adapter = random_adapter(model).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is a validity adapter, not a language model: pass it as"):
        load_language_model(adapter, role="draft")


def test_names(tmp_path, monkeypatch):
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    monkeypatch.setattr(names, "_collections", lambda: {"zoo": tmp_path, "own": tmp_path})
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    assert resolve("zoo:target") == resolve("own:target") == tmp_path / "target"
    with pytest.raises(ValueError, match="did you mean 'zoo:target'"):
        resolve("zoo:targt")
    with pytest.raises(ValueError, match="known: zoo:draft, zoo:target"):
        resolve("zoo:x")
    monkeypatch.setattr(names, "_collections", dict)
    with pytest.raises(FileNotFoundError, match=r"'zoo:target' is an embedded model.* pip install ./zoo"):
        resolve("zoo:target")
    for name in (tmp_path / "gone", "./gone", str(tmp_path / "gone"), ""):
        with pytest.raises(FileNotFoundError, match="no folder"):
            resolve(name)


def sentence(error: pytest.ExceptionInfo) -> str:
    """The error's text, which must be one line (the command line prints it as it is)."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text


def load_broken(folder: Path | str) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        load_language_model(folder, role="target", device="cpu")
    return sentence(error)


def test_an_id_that_is_not_there():
    assert "'nobody/no-such-model-here'" in load_broken("nobody/no-such-model-here")


def test_a_folder_without_a_config(broken):
    (broken / "config.json").unlink()
    assert "config.json is missing" in load_broken(broken)


def test_a_half_written_config(broken):
    (broken / "config.json").write_text('{"model_type": "lla')
    assert "config.json" in (text := load_broken(broken)) and "not valid JSON" in text


@pytest.mark.parametrize("content", ['{"eos_token_id": [1, ', "[]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_configuration_drops_no_end_token(broken, name, content):
    (broken / name).write_text(content)
    text = load_broken(broken)
    assert f"/{name}'" in text and ("not valid JSON" in text or "holds no JSON object" in text)
    with pytest.raises(ValueError, match=name):
        load_served_model(broken)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_weights_of_torch_are_one_sentence(broken, content):
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(content)
    assert "damaged or incomplete" in load_broken(broken)


def test_the_reason_is_named_and_not_the_tokenizer(broken):
    config = json.loads((broken / "config.json").read_text())
    for key, value, reason in (
        ("hidden_size", "64", r"The configuration of .*'hidden_size'"),
        ("hidden_act", "silu2", r"The model .* cannot be loaded: KeyError 'silu2'"),
        ("intermediate_size", 2 * config["intermediate_size"], "the shapes of its tensors are not those of"),
    ):
        (broken / "config.json").write_text(json.dumps(config | {key: value}))
        assert re.search(reason, load_broken(broken)), key


def test_a_folder_without_weights(broken):
    (broken / "model.safetensors").unlink()
    assert str(broken) in load_broken(broken)


def test_half_written_weights(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "damaged or incomplete" in load_broken(broken)


def test_weights_that_lack_tensors_are_never_run(broken):
    config = json.loads((broken / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (broken / "config.json").write_text(json.dumps(config))
    assert "tensors are missing" in (text := load_broken(broken)) and "model.layers.2." in text


def add_tensors(folder: Path, **shapes: tuple[int, ...]) -> None:
    tensors = load_file(folder / "model.safetensors")
    added = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file({**tensors, **added}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # the configuration lost attention_bias
        "model.layers.1.mlp.down_proj.weight_scale",  # scales of FP8
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.bias",
        "lm_head.bias",
        "lm_head.weight_scale",
    ],
)
def test_tensors_of_the_language_model_are_never_dropped(broken, name):
    add_tensors(broken, **{name: (32,)})
    text = load_broken(broken)
    assert f"has 1 tensors that its configuration has no place for, the first is {name!r}" in text


def test_layers_are_never_dropped(broken):
    config = json.loads((broken / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (broken / "config.json").write_text(json.dumps(config))
    assert "no place for, the first is 'model.layers.1." in load_broken(broken)


def test_towers_other_heads_and_layers_for_mtp_may_stay_unused(broken):
    mtp = ["self_attn.q_proj.weight", "eh_proj.weight", "enorm.weight"]
    names = ["vision_tower.layers.0.mlp.weight", "model.visual.proj.bias", "score.weight", "mtp.fc.weight"]
    add_tensors(broken, **{name: (32,) for name in [*names, *(f"model.layers.2.{each}" for each in mtp)]})
    load_language_model(broken, role="target", device="cpu")


@pytest.mark.parametrize("method", ["modelopt", "my_fp8", None])
def test_an_unknown_quantisation_is_refused(broken, method):
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 8}
    (broken / "config.json").write_text(json.dumps(config))
    assert f"is quantised by {method!r}, which transformers does not know" in load_broken(broken)


def test_weights_of_another_shape(broken):
    config = json.loads((broken / "config.json").read_text())
    config["intermediate_size"] *= 2
    (broken / "config.json").write_text(json.dumps(config))
    assert str(broken) in load_broken(broken)


def test_a_folder_without_a_tokenizer(broken):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in load_broken(broken)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds(broken):
    word_tokenizer().save_pretrained(broken)
    assert "embeds only 260 tokens" in load_broken(broken)


def test_a_model_that_cannot_be_cropped_is_refused(make_model, tokenizer, tmp_path):
    model = make_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        language_model(model, tokenizer)


def test_same_tokenizer(tokenizer):
    again = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|user|>")
    assert same_tokenizer(tokenizer, again)  # a chat template or a choice of end token makes no other tokens
    assert not same_tokenizer(tokenizer, word_tokenizer())


def test_every_end_token_ends_an_answer(make_model, tokenizer):
    model = make_model("llama")
    model.generation_config.eos_token_id = [3, 258]
    assert end_tokens(model.generation_config, tokenizer) == {3, 258}
    assert language_model(model, tokenizer).end_token == 258
    model.generation_config.eos_token_id = 3
    assert end_tokens(model.generation_config, tokenizer) == {3, 258}
    model.generation_config.eos_token_id = None
    assert end_tokens(model.generation_config, tokenizer) == {258}


def test_an_answer_ends_as_the_chat_template_ends_a_turn(make_model, tokenizer):
    """Gemma's `<end_of_turn>` is not the tokenizer's end token."""
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    own.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|assistant|>{% endfor %}"
    model = make_model("llama")
    model.generation_config.eos_token_id = [257, 258]
    assert language_model(model, own).end_token == 257
    model.generation_config.eos_token_id = 258
    assert language_model(model, own).end_token == 258
    own.chat_template = "{{ raise_exception('no') }}"
    assert language_model(model, own).end_token == 258


def test_a_cache_cannot_outgrow_the_first_window_of_longrope():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "pad_token_id": 0}
    window = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    assert context_window(Phi3Config(**shape, **window, rope_parameters=rope)) == 64
    assert context_window(Phi3Config(**shape, **window)) == 256


def test_prompts_are_rendered_by_the_chat_template_where_there_is_one(make_model, tokenizer):
    chat = language_model(make_model("llama"), tokenizer)
    user, assistant, end = 256, 257, 258

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text)

    assert chat.render("Hi") == [user, *ids("Hi"), assistant]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert chat.render([*turns, turns[0]])[-4:] == [user, *ids("Hi"), assistant]
    assert chat.render(turns) == [user, *ids("Hi"), assistant, *ids("Yes")]  # an answer that is to be continued
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    base = language_model(make_model("llama"), plain)
    assert base.render("Hi") == ids("Hi") and end not in base.render("Hi")
    with pytest.raises(ValueError, match="no chat template"):
        base.render(turns)


def test_a_beginning_token_stands_once(make_model, tokenizer):
    """Tokenizers that put a token in front of every text do so for plain prompts; a chat template writes its own."""
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 256)])
    own = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    model = language_model(make_model("llama"), own)
    assert model.render("Hi") == [256, *tokenizer.encode("Hi")]
    own.chat_template = tokenizer.chat_template
    assert model.render("Hi") == [256, *tokenizer.encode("Hi"), 257]


def test_the_template_gets_its_switches_and_may_refuse(make_model, tokenizer):
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    own.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}{% if not think %}[short]{% endif %}"
    )
    model = loading.LanguageModel("own", make_model("llama"), own, {"think": True})
    assert own.decode(model.render("Hi")) == "Hi"
    assert own.decode(language_model(model.model, own).render("Hi")) == "Hi[short]"
    with pytest.raises(ValueError, match="no system role"):
        model.render([{"role": "system", "content": "Be brief."}])


def test_what_is_known_without_the_weights_is_what_the_loaded_model_knows(make_model, tokenizer, tmp_path):
    model = make_model("qwen3", vocab_size=272)  # padding
    model.generation_config.eos_token_id = [3, 258]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for name in (tmp_path, "zoo:draft"):
        whole, text = load_language_model(name, role="draft"), load_served_model(name)
        for what in ("name", "eos_ids", "window", "n_embeddings", "end_token"):
            assert getattr(text, what) == getattr(whole, what), what
        assert text.render("What is 3 + 4?") == whole.render("What is 3 + 4?")
        assert not hasattr(text, "model")
    (tmp_path / "generation_config.json").unlink()
    assert load_served_model(tmp_path).eos_ids == load_language_model(tmp_path, role="draft").eos_ids
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_served_model(tmp_path)


# Arguments of transformers' from_pretrained


def on_the_hub(monkeypatch, cache: Path, repository: str, revisions: dict[str, Path]) -> None:
    """Put folders into the Hub's cache, each as a revision of `repository`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = cache / f"models--{repository.replace('/', '--')}"
    for number, (revision, folder) in enumerate(revisions.items()):
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit := str(number) * 40)
        shutil.copytree(folder, place / "snapshots" / commit)


def test_a_revision_of_a_model_on_the_hub(make_model, tokenizer, tmp_path, monkeypatch):
    folders = {revision: tmp_path / revision for revision in ("main", "older")}
    for seed, folder in enumerate(folders.values()):
        make_model("llama", seed=seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    on_the_hub(monkeypatch, tmp_path / "hub", "owner/model", folders)
    for options, folder in (({}, "main"), ({"revision": "older"}, "older")):
        found = load_language_model("owner/model", role="target", **options).model
        own = load_language_model(folders[folder], role="target").model
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), own.parameters(), strict=True))
    engine = ParseEngine.from_pretrained("owner/model", "owner/model", revision="older", draft_revision="main")
    weights = [model.model.lm_head.weight for model in (engine.target, engine.draft)]
    assert not torch.equal(*weights)
    with pytest.raises(OSError, match=r"^The configuration of 'owner/model' cannot be loaded: "):
        load_language_model("owner/model", role="target", revision="unknown")
    with pytest.raises(ValueError, match=r"^revision is 'older', but '.*' is on this machine"):
        load_language_model(folders["main"], role="target", revision="older")


PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk"}])
@pytest.mark.slow
def test_the_layers_of_a_target_may_be_in_several_places(make_model, tokenizer, tmp_path, device_map):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own, mapped = (
        ParseEngine.from_pretrained(
            tmp_path / "model", "zoo:draft", judge="min_p:ratio=0.2", target_drafter=None, **options
        )
        for options in ({}, {"device_map": device_map})
    )
    assert (mapped.target.decoder.fast is None) == ("disk" in str(device_map))
    for settings in ({}, {"mode": "exact"}, {"block_tokens": 4, "threshold": 0.01}):
        found = [engine.generate("Tom has 5 apples.", max_new_tokens=12, **settings) for engine in (own, mapped)]
        assert found[0].token_ids == found[1].token_ids
    with pytest.raises(ValueError, match=r"^device is 'cpu' and device_map 'auto': give one of them"):
        ParseEngine.from_pretrained(tmp_path / "model", device="cpu", device_map="auto")


@register_quantization_config("eighths")
class Eighths(QuantizationConfigMixin):
    """A method of quantisation that rounds the weights of linear layers to eighths."""

    def __init__(self, **_) -> None:
        self.quant_method = "eighths"


@register_quantizer("eighths")
class EighthsQuantizer(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_after_weight_loading(self, model, **_):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = (module.weight.data * 8).round() / 8
        return model


def test_weights_may_be_quantised_at_loading(make_model, tokenizer, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    how = {"quantization_config": Eighths()}
    engine = ParseEngine.from_pretrained(
        tmp_path, tmp_path, judge="min_p:ratio=0.2", **how, draft_quantization_config=Eighths()
    )
    for model in (engine.target.model, engine.draft.model):
        eighths = model.lm_head.weight * 8
        assert torch.equal(eighths, eighths.round())
    own = load_language_model(tmp_path, role="target").model
    assert not torch.equal(own.lm_head.weight, engine.target.model.lm_head.weight)
    assert len(engine.generate("Tom", max_new_tokens=8).token_ids) == 8
    with pytest.raises(ValueError, match="dtype is 'int8' and quantization_config was given too"):
        load_language_model(tmp_path, role="draft", dtype="int8", **how)


class Packed(torch.Tensor):
    """As the weights of torchao: an ordinary linear layer, whose weight only its own operators can read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.cat, torch.mul):
            raise NotImplementedError(function.__name__)
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if function is torch.nn.functional.linear else found


def test_quantised_weights_of_ordinary_layers_are_neither_fused_nor_packed(make_model, monkeypatch):
    model = make_model("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.data.as_subclass(Packed), requires_grad=False)
    monkeypatch.setattr(prepacked_linear, "SMALL", 0)
    assert not prepacked_linear.pack_linears(model)
    decoder = Decoder(model, ())
    decoder.seek([5, 6, 7])
    assert len(list(decoder.decode(4))) == 4


@pytest.mark.slow
def test_the_verification_pass_has_its_own_attention():
    with pytest.raises(ValueError, match="attn_implementation is 'flash_attention_2', but the verification pass"):
        ParseEngine.from_pretrained("zoo:target", attn_implementation="flash_attention_2")
    assert ParseEngine.from_pretrained("zoo:target", attn_implementation="sdpa").target
