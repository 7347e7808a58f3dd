"""Packed linear layers compute the same, and a packed model is saved whole."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from parse_infer.models.cpu import prepacked_linear
from parse_infer.models.cpu.prepacked_linear import PrepackedLinear, n_parameters, pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_packed_layer_equals_the_ordinary_one(rows, bias, dtype):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no instructions for bfloat16")
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, bias=bias, dtype=dtype)
    packed = PrepackedLinear(linear)
    x = torch.randn(1, rows, 96).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
        assert torch.equal(packed.weight, linear.weight)


def test_a_packed_model_answers_and_is_saved_as_before(make_model, random_ids, tmp_path, monkeypatch):
    monkeypatch.setattr(prepacked_linear, "SMALL", 0)
    model, plain = make_model("llama_gqa"), make_model("llama_gqa")
    assert pack_linears(model) == 2 * 7 + 1  # every linear of two layers, and the output layer
    assert isinstance(model.get_output_embeddings(), PrepackedLinear)
    assert n_parameters(model) == plain.num_parameters()
    ids = torch.tensor([random_ids(20)])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-4)
    state, expected = model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, plain(ids).logits)


def test_small_models_and_wrong_products_stay_as_they_are(make_model, monkeypatch):
    assert pack_linears(make_model("llama")) == 0, "it fits the caches"
    monkeypatch.setattr(prepacked_linear, "SMALL", 0)
    monkeypatch.setattr(PrepackedLinear, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features))
    assert pack_linears(make_model("llama")) == 0, "a product that differs must not be used"


def test_a_packed_model_is_copied_and_does_not_move(make_model, random_ids, monkeypatch):
    monkeypatch.setattr(prepacked_linear, "SMALL", 0)
    model = make_model("llama_gqa")
    pack_linears(model)
    copy = deepcopy(model)
    ids = torch.tensor([random_ids(20)])
    with torch.inference_mode():
        assert torch.equal(copy(ids).logits, model(ids).logits)
    model.to("cpu")
    with pytest.raises(ValueError, match="load it again with the device and dtype"):
        model.to(torch.bfloat16)
