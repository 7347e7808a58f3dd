"""The fast forward computes what transformers' own computes, and is used wherever it may be."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from parse_infer.models.attention import enable_split_attention
from parse_infer.models.cpu import fused_step, prepacked_linear
from parse_infer.models.cpu.fast_backbone import FastBackbone
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import load_language_model
from parse_infer.token_drafters.tree import branches
from tests.conftest import randomise

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, biases": LlamaConfig(**SHAPE, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama 3.1": LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "original_max_position_embeddings": 64}),
    "llama, yarn": LlamaConfig(**SHAPE, num_key_value_heads=1, rope_parameters=YARN),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2, rms_norm_eps=0.1),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=24),
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
}


@pytest.fixture(params=MODELS)
def model(request) -> PreTrainedModel:
    config = MODELS[request.param]
    return randomise(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config), seed=1)


def without_it(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decoder that uses transformers' own forward."""
    with monkeypatch.context() as patch:
        patch.setattr(FastBackbone, "for_model", lambda model: None)
        return Decoder(model, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_forward_of_transformers(model, random_ids, monkeypatch, dtype):
    """Prefill, tokens one by one, a chain, a tree, and what enters each layer, over several growths of the cache."""
    model.to(dtype)
    enable_split_attention(model)
    fast, slow = Decoder(model, ()), without_it(model, monkeypatch)
    assert fast.fast is not None and slow.fast is None
    found: list[list[torch.Tensor]] = [[], []]
    for decoder, states in zip((fast, slow), found, strict=True):
        capture = decoder.capture_hidden([0, 2, 3])
        decoder.seek(random_ids(250))
        states.append(decoder.forward().hidden)
        for seed in range(9):  # past the 256 tokens of room that a cache has at first
            decoder.seek([*decoder.ids, *random_ids(1, seed)])
            states.append(decoder.next_logits())
        states.append(decoder.look_ahead(random_ids(5, seed=3)))
        decoder.keep([0, 1, 2])
        tree = branches(random_ids(4, seed=4), [-1, 0, 0, 1], len(decoder.ids), decoder.device)
        states.append(decoder.look_ahead(tree))
        decoder.keep([0, 2])
        states.append(decoder.forward(random_ids(3, seed=5)).hidden)
        states.append(capture.pop_hidden()[1])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours.shape == theirs.shape
        difference = float((ours - theirs).abs().max())
        assert difference < tolerance * max(1.0, float(theirs.abs().max())), f"step {i}: {difference}"


def test_small_models_on_a_cpu_have_a_fused_step(model, monkeypatch):
    fast = FastBackbone.for_model(model)
    assert fast is not None
    plain = type(model.config).__name__ != "Qwen3Config" and not getattr(model.config, "mlp_bias", False)
    assert (fast._fused is not None) == plain
    monkeypatch.setattr(fused_step, "LARGEST", 1000)
    large = FastBackbone.for_model(model)
    assert large is not None and large._fused is None
    half = FastBackbone.for_model(model.to(torch.bfloat16))
    assert half is not None and half._fused is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow
def test_the_fused_step_follows_weights_that_change(random_ids, monkeypatch, packed, bias):
    """Also of packed layers: tokens and logits are those of transformers, before and after a change in place."""
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, attention_bias=bias)
    model = randomise(MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](config), seed=1)
    if packed:
        monkeypatch.setattr(prepacked_linear, "SMALL", 0)
        assert prepacked_linear.pack_linears(model)
    fast, slow = Decoder(model, ()), without_it(model, monkeypatch)
    assert fast.fast is not None and fast.fast._fused is not None
    layer = model.model.layers[1]
    changes = (
        lambda: None,
        lambda: layer.input_layernorm.weight.mul_(0.5),
        lambda: layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 0.5),
    )
    for change in changes:
        with torch.no_grad():
            change()
        written = []
        for decoder in (fast, slow):
            decoder.seek([])
            decoder.seek(random_ids(20))
            written.append((list(decoder.decode(40)), decoder.next_logits()))
        assert written[0][0] == written[1][0]
        torch.testing.assert_close(written[0][1], written[1][1], atol=1e-4, rtol=1e-4)


def test_the_table_of_angles_grows(random_ids, monkeypatch):
    """Positions beyond the first 1,024, reached by a long prefill and token by token."""
    model = randomise(MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](MODELS["llama"]), seed=1)
    fast, slow = Decoder(model, ()), without_it(model, monkeypatch)
    for length in (1023, 2100):
        hidden = []
        for decoder in (fast, slow):
            decoder.seek((random_ids(100) * 30)[:length])
            hidden.append(torch.stack([decoder.next_logits(), *(_after(decoder, t) for t in (5, 6))]))
        torch.testing.assert_close(*hidden, atol=1e-4, rtol=1e-4)


def _after(decoder: Decoder, token: int) -> torch.Tensor:
    decoder.seek([*decoder.ids, token])
    return decoder.next_logits()


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SHAPE, sliding_window=16),
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ],
    ids=["sliding window", "angles that depend on the length"],
)
def test_other_models_keep_their_own_forward(config):
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    assert FastBackbone.for_model(model) is None


def test_weights_that_accelerate_moves_keep_their_own_forward():
    model = MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](MODELS["llama"]).eval()
    model.model.layers[1]._hf_hook = object()  # what accelerate's dispatch leaves on a module
    assert FastBackbone.for_model(model) is None


def test_wrapped_linears_and_another_number_type_are_detected(random_ids, monkeypatch):
    """Both after the first answer: peft puts its layers into the model, and somebody calls model.to."""
    model = randomise(MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig](MODELS["llama"]), seed=1)
    decoder = Decoder(model, ())
    decoder.seek(random_ids(20))
    decoder.next_logits()
    torch.manual_seed(0)
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    lora.eval()
    expected = without_it(model, monkeypatch)
    for each in (decoder, expected):
        each.seek([])
        each.seek(random_ids(20))
    torch.testing.assert_close(decoder.next_logits(), expected.next_logits(), atol=1e-4, rtol=1e-4)
    model.to(torch.float64)
    for each in (decoder, expected):
        each.seek([])
        each.seek(random_ids(20))
    # transformers' norms round to float32 even here.
    torch.testing.assert_close(decoder.next_logits(), expected.next_logits(), atol=1e-5, rtol=1e-5)


def scaled(output, by: float):
    return (output[0] * by, *output[1:]) if isinstance(output, tuple) else output * by


def without_residual(module, args, output):
    return output - args[0]


# What a model's own forward may do besides, by the module that does it.
MORE = {
    "attention, 5 % more": lambda backbone: backbone.layers[1].self_attn.register_forward_hook(
        lambda module, args, output: scaled(output, 1.05)
    ),
    "MLP, 5 % less": lambda backbone: backbone.layers[2].mlp.register_forward_hook(
        lambda module, args, output: scaled(output, 0.95)
    ),
    "layer left out": lambda backbone: setattr(backbone.layers[1], "forward", lambda x, **options: x),
    "layer without residual": lambda backbone: backbone.layers[1].register_forward_hook(without_residual),
    "embeddings, 5 % more": lambda backbone: backbone.layers[0].register_forward_pre_hook(
        lambda module, args: (scaled(args[0], 1.05), *args[1:])
    ),
    "last norm, 5 % more": lambda backbone: backbone.norm.register_forward_hook(
        lambda module, args, output: scaled(output, 1.05)
    ),
    "angles of other positions": lambda backbone: backbone.rotary_emb.register_forward_hook(
        lambda module, args, output: tuple(table.roll(1, dims=1) for table in output) if table_of(output) else output
    ),
}


def table_of(output: tuple[torch.Tensor, ...]) -> bool:
    return output[0].shape[1] == 5  # of the few tokens that are compared, not the fast forward's own table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [None, *MORE])
def test_a_model_that_does_something_more_keeps_its_own_forward(model, dtype, more):
    """Whatever the number type, although 16 bits round; and a model that does nothing more has the fast one."""
    model.to(dtype)
    if more is not None:
        MORE[more](model.model)
    assert (Decoder(model, ()).fast is None) == (more is not None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules()) or more is not None


@pytest.mark.parametrize("name", ["zoo:target", "zoo:draft"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_trained_models_have_the_fast_forward(name, dtype):
    assert load_language_model(name, role="target", device="cpu", dtype=dtype).decoder.fast is not None
