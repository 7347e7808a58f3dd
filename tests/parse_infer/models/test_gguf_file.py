"""Models from GGUF files: what transformers makes of them, kept whole or not at all, converted once."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from parse_infer.engine import ParseEngine
from parse_infer.models import gguf_file
from parse_infer.models.gguf_file import dequantised
from parse_infer.models.loading import load_config, load_language_model, load_tokenizer, load_weights
from parse_infer.models.names import cache_folder, resolve
from tests.parse_infer.language_models import refusal

gguf = pytest.importorskip("gguf")

from tests.parse_infer.models.gguf_files import write_gguf  # noqa: E402  (it needs the package)

PROMPT = "Tom has 5 apples."


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """A cache of its own for every test, and no network."""
    monkeypatch.setenv("PARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def source(make_model):
    return make_model("llama_gqa", intermediate_size=64)


@pytest.fixture(scope="module")
def file(source, tokenizer, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", source, tokenizer)


def no_conversion(monkeypatch) -> None:
    def read(file):
        raise AssertionError(f"{file} was converted again")

    monkeypatch.setattr(gguf_file, "_read", read)


def left_in(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if path.name != ".lock"] if cache.is_dir() else []


def test_weights_and_tokenizer_are_those_that_transformers_reads(file, source, tokenizer):
    lm = load_language_model(file, role="target", device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = lm.model.state_dict()
    assert lm.model.dtype == torch.float32 and ours.keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.state_dict().items())
    assert all((ours[key] - value).abs().max() < 0.02 for key, value in source.state_dict().items())  # 8 bits
    expected = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    known = {token: index for token, index in expected.get_vocab().items() if index < 260}
    assert lm.tokenizer.get_vocab() == known and lm.eos_ids == {tokenizer.eos_token_id}
    assert lm.render("Hi, 12!") == expected.apply_chat_template(
        [{"role": "user", "content": "Hi, 12!"}], add_generation_prompt=True, return_dict=False
    )
    ids = lm.render(PROMPT)
    greedy = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert ParseEngine.from_models(lm).generate_target(PROMPT, max_new_tokens=20).token_ids == greedy


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def logits_of(model, length=60):
    with torch.inference_mode():
        return model(torch.arange(3, 3 + length)[None] * 3 % 250).logits


def llama3_factors(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """The tensor as llama.cpp's converter computes it."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelengths - 1) / 3
    return torch.where(
        wavelengths < 2048, 1, torch.where(wavelengths > 8192, factor, 1 / ((1 - smooth) / factor + smooth))
    ).float()


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 32.0}),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, None),
        ({"rope_type": "default"}, {"type": "none", "factor": 4.0}),
        ({"rope_type": "default"}, {"type": "linear", "factor": 1.0}),
    ],
)
def test_the_scaling_of_rope_is_taken_over(make_model, tokenizer, tmp_path, parameters, scaling):
    theta = 500_000.0
    options = {"intermediate_size": 64, "attention_bias": True, "mlp_bias": True}  # and biases
    source = make_model("llama_gqa", rope_parameters={"rope_theta": theta, **parameters}, **options)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    llama3 = parameters["rope_type"] == "llama3"
    factors = llama3_factors(source.config.head_dim, theta, parameters.get("factor", 1.0))
    file = tmp_path / "scaled.gguf"
    write_gguf(file, source, tokenizer, scaling=scaling, added={"rope_freqs.weight": factors} if llama3 else None)
    model = load_weights(file)
    found = model.config.rope_parameters
    assert {key: found[key] for key in parameters} == parameters and found["rope_theta"] == theta
    expected = make_model("llama_gqa", rope_parameters={"rope_theta": theta, **parameters}, **options)
    expected.load_state_dict(model.state_dict())
    assert torch.allclose(logits_of(model), logits_of(expected), atol=1e-5)
    assert all((model.state_dict()[key] - value).abs().max() < 0.02 for key, value in source.state_dict().items())


@pytest.mark.parametrize(
    ("scaling", "added", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, {}, "RoPE scaling of type longrope"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, {}, "rope.scaling.yarn_log_multiplier 0.1"),
        (
            None,
            {"rope_freqs.weight": torch.tensor([1.0, 3.0, 3.0, 8.0])},
            "RoPE factors that are not those of Llama 3",
        ),
        (None, {"rope_factors_long.weight": torch.ones(4)}, "'rope_factors_long.weight'"),
        (
            None,
            {"blk.0.attn_q_norm.weight": torch.ones(8)},
            "1 tensors that .* 'blk.0.attn_q_norm.weight'",
        ),
        (None, {"blk.0.attn_output.scale": torch.ones(1)}, "'blk.0.attn_output.scale'"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(source, tokenizer, cache, tmp_path, scaling, added, message):
    file = write_gguf(tmp_path / "other.gguf", source, tokenizer, scaling=scaling, added=added)
    assert re.search(message, refusal(file)) and not left_in(cache)


def test_an_engine_with_target_and_draft_from_gguf_files(file, tmp_path):
    draft = shutil.copy(file, tmp_path / "draft.gguf")
    engine = ParseEngine.from_pretrained(file.parent, str(draft), gguf_file=file.name, judge="zero_shot", device="cpu")
    alone = engine.generate_target(PROMPT, max_new_tokens=24)
    assert engine.generate(PROMPT, mode="exact", max_new_tokens=24).token_ids == alone.token_ids
    assert engine.generate(PROMPT, threshold=1.5, max_new_tokens=24).token_ids == alone.token_ids


def test_the_second_start_finds_the_copy_and_needs_no_package(file, cache, monkeypatch, tmp_path):
    first = load_weights(file)
    no_conversion(monkeypatch)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert torch.equal(load_weights(file).lm_head.weight, first.lm_head.weight)
    moved = tmp_path / "elsewhere" / file.name
    moved.parent.mkdir()
    shutil.copy(file, moved)
    assert dequantised(moved) == dequantised(file) and len(left_in(cache)) == 1
    assert load_weights(file, "bfloat16").dtype == torch.bfloat16
    assert load_config(file).vocab_size == 260 and load_tokenizer(str(file)).eos_token == "<|end|>"


def test_an_older_transformers_is_refused(file, cache, monkeypatch):
    monkeypatch.setattr("parse_infer.models.gguf_file.transformers.__version__", "5.17.2")
    with pytest.raises(ValueError, match=r"transformers 5.17.2 reads .* use 5.18 or later: .*\[gguf\]"):
        dequantised(file)
    assert not list(cache.rglob("*.safetensors"))


def test_another_content_is_another_model(file, source, tokenizer, tmp_path, make_model):
    here = shutil.copy(file, tmp_path / file.name)
    first = load_weights(here)
    write_gguf(Path(here), make_model("llama_gqa", seed=1, intermediate_size=64), tokenizer)  # of the same size
    assert Path(here).stat().st_size == file.stat().st_size
    assert not torch.equal(load_weights(here).lm_head.weight, first.lm_head.weight)


def test_what_is_written_about_the_model_names_the_file(file):
    assert load_weights(file).config._name_or_path == str(file)


def test_the_cache_goes_where_the_user_says(monkeypatch, tmp_path):
    assert cache_folder("gguf") == tmp_path / "cache" / "gguf"
    monkeypatch.delenv("PARSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("gguf") == tmp_path / "xdg" / "parse-engine" / "gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("gguf") == tmp_path / ".cache" / "parse-engine" / "gguf"


# What cannot be loaded: one sentence each, and nothing is left in the cache.


@pytest.mark.parametrize("kept", [0, 3, 600, 0.5, 0.98])
def test_a_file_that_is_cut_off(file, cache, tmp_path, kept):
    """Empty, in the magic number, in the header, in the tensors, and in the last of them."""
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    text = refusal(cut)
    assert str(cut) in text and "download it again" in text and not left_in(cache)


def test_a_file_that_is_no_gguf(cache, tmp_path):
    (tmp_path / "notes.gguf").write_text("Once upon a time")
    assert "is no GGUF file" in refusal(tmp_path / "notes.gguf") and not left_in(cache)


def test_an_architecture_that_transformers_does_not_know(source, tokenizer, cache, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", source, tokenizer, architecture="rwkv6")
    text = refusal(other)
    assert str(other) in text and "rwkv6" in text and "not supported" in text and not left_in(cache)


def test_a_file_that_lacks_tensors(source, tokenizer, cache, tmp_path):
    lacking = write_gguf(tmp_path / "lacking.gguf", source, tokenizer, without="blk.1.ffn_up.weight")
    text = refusal(lacking)
    assert "1 tensors are missing" in text and "layers.1.mlp.up_proj" in text and not left_in(cache)


def test_a_lora_in_a_gguf_file(source, tokenizer, tmp_path):
    assert "holds a GGUF adapter" in refusal(write_gguf(tmp_path / "lora.gguf", source, tokenizer, kind="adapter"))


def test_without_the_package_the_sentence_names_the_extra(file, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    text = refusal(file)
    assert 'pip install -c constraints.txt ".[gguf]"' in text and not left_in(cache)


def test_a_missing_file(tmp_path):
    for name in (tmp_path / "gone.gguf", "gone.gguf", "./a/b/c/gone.gguf", "folder/gone.gguf"):
        assert "There is no file" in refusal(name)
    assert resolve("owner/repository/sub/model.gguf") == "owner/repository/sub/model.gguf"
    assert "neither a local file nor available on the Hugging Face Hub" in refusal("nobody/none-such/model.gguf")


def test_a_folder_of_gguf_files_names_one(file):
    assert str(file) in refusal(file.parent)


def test_a_gguf_file_is_no_adapter(file):
    with pytest.raises(ValueError, match="give the folder of the adapter"):
        ParseEngine.from_pretrained(file, adapter=file, device="cpu")


@pytest.mark.parametrize("place", ["file", "/proc/none"])
def test_a_cache_that_cannot_be_written(file, monkeypatch, tmp_path, place):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / place)
    monkeypatch.setenv("PARSE_CACHE", place)
    no_conversion(monkeypatch)  # it is found before any work
    text = refusal(file)
    assert place in text and "PARSE_CACHE" in text


def test_a_disk_that_is_full_before_or_in_the_middle(file, cache, monkeypatch):
    usage = shutil.disk_usage(file)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        no_conversion(patch)
        assert "0.0 GB are free there" in refusal(file)

    def save_pretrained(self, folder):
        (Path(folder) / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", save_pretrained)
        assert "No space left on device" in refusal(file)
    assert not left_in(cache)
    load_weights(file)
    assert len(left_in(cache)) == 1


def in_a_process(work) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.slow
def test_a_conversion_that_was_killed_leaves_nothing_that_is_trusted_or_stays(file, cache, monkeypatch):
    def save_pretrained(self, folder):
        (Path(folder) / "config.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", save_pretrained)
        process = in_a_process(lambda: dequantised(file))
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [name.endswith(".partial") for name in left_in(cache)] == [True]
    assert load_language_model(file, role="target", device="cpu").model.dtype == torch.float32
    assert left_in(cache) == [dequantised(file).name]


def test_two_processes_at_once_make_one_copy(file, cache):
    both = [in_a_process(lambda: dequantised(file)) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert left_in(cache) == [dequantised(file).name]
