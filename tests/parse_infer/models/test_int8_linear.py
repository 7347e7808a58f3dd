"""8-bit draft models: close to the original, token by token, and harmless to the target's text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parse_infer import ParseEngine
from parse_infer.errors import ModelError
from parse_infer.models.cpu.int8_linear import Int8Linear, JoinedInt8
from parse_infer.models.cpu.prepacked_linear import n_parameters
from parse_infer.models.growing_kv_cache import new_cache
from parse_infer.models.loading import load_language_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_close_and_the_tokens_beside_change_nothing(bias):
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, bias=bias)
    rounded = Int8Linear(linear)
    x = torch.randn(1, 40, 96) * torch.logspace(-2, 3, 40)[:, None]  # the first token of real models is as far off
    with torch.inference_mode():
        whole, expected = rounded(x), linear(x)
        assert ((whole - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.03
        alone = torch.cat([rounded(x[:, i : i + 1]) for i in range(40)], dim=1)
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_are_the_layers(bias):
    torch.manual_seed(0)
    layers = [Int8Linear(nn.Linear(96, n, bias=bias)) for n in (64, 16, 16)]
    x, scale = torch.randn(3, 96), torch.rand(96)
    with torch.inference_mode():
        expected = torch.cat([layer(x * scale) for layer in layers], dim=1)
        assert torch.equal(JoinedInt8(layers, scale)(x), expected)


def test_the_fused_step_is_the_models_own():
    model = load_language_model("zoo:draft", role="draft", dtype="int8")
    fast, prompt = model.decoder.fast, model.render("How many pens are in 7 boxes of 12 pens?")
    assert fast is not None and fast.steps_rows
    ids, cache = torch.tensor([prompt]), new_cache()
    with torch.inference_mode():
        steps = [fast(ids[:, i : i + 1], ids.new_tensor([[i]]), cache, None, {}) for i in range(len(prompt))]
        own = model.model.model(ids).last_hidden_state
    difference = (torch.cat(steps, dim=1) - own).norm(dim=-1) / own.norm(dim=-1)
    assert difference.median() < 0.05, difference


@pytest.mark.slow
def test_a_draft_model_in_8_bits_writes_nearly_the_same_and_the_target_decides():
    prompt = "A box holds 12 pens. How many pens are in 7 boxes?"
    how = {"draft_dtype": "int8", "target_drafter": "draft:tokens=8"}  # else measured times decide about the length
    engine = ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", **how)
    described = engine.describe()["draft"]
    assert described["dtype"] == "int8"
    assert described["parameters"] == n_parameters(load_language_model("zoo:draft", role="draft").model)
    answer = engine.generate(prompt, threshold=2.0)
    assert answer.token_ids == engine.generate_target(prompt).token_ids
    assert answer.stats.target_forwards < len(answer.token_ids) / 2


def test_a_target_in_8_bits_is_refused():
    with pytest.raises(ModelError, match="a target in int8 would be another model"):
        load_language_model("zoo:target", role="target", dtype="int8")
