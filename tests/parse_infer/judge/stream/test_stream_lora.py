"""The LoRA computes what peft's computes, on the trailing positions, and leaves no trace."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from parse_infer.judge.stream.lora import StreamLoRA


def peft_twin(model, **options):
    """The same model wrapped by peft with a random LoRA, and what peft would write to disk."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False} | options
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = get_peft_model(copy.deepcopy(model), config).eval()
    return twin, twin.peft_config["default"].to_dict(), get_peft_model_state_dict(twin)


@torch.no_grad()
def last_logits(twin, tokens, n):
    """Logits of the last n tokens with peft's LoRA on them alone: the tokens before them are in a cache without it."""
    cache = None
    if n < tokens.shape[1]:
        with twin.disable_adapter():
            cache = twin(input_ids=tokens[:, :-n], use_cache=True).past_key_values
    return twin(input_ids=tokens[:, -n:], past_key_values=cache).logits


def instance_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("n", [1, 2, 6, 20])
def test_equals_pefts_lora(model, random_ids, n):
    twin, config, tensors = peft_twin(model)
    lora = StreamLoRA.from_peft(config, tensors, model)
    tokens = torch.tensor([random_ids(20), random_ids(20, seed=1)])
    expected = last_logits(twin, tokens, n)
    with torch.no_grad():
        base = model(tokens).logits
        with lora.applied(n):
            found = model(tokens).logits
    assert torch.allclose(found[:, 20 - n :], expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(found[:, : 20 - n], base[:, : 20 - n], atol=1e-5)
    assert (found[:, 20 - n :] - base[:, 20 - n :]).abs().max() > 0.1  # the adapter really does something


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r"model\.layers\.1\..*_proj"},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 1, "down_proj": 12}},
    ],
)
def test_equals_peft_with_its_options(make_model, random_ids, options):
    model = make_model("llama_gqa")
    twin, config, tensors = peft_twin(model, **options)
    lora = StreamLoRA.from_peft(config, tensors, model)
    tokens = torch.tensor([random_ids(20)])
    with torch.no_grad(), lora.applied(3):
        found = model(tokens).logits[:, -3:]
    assert torch.allclose(found, last_logits(twin, tokens, 3), atol=1e-4, rtol=1e-4)


def test_bfloat16(make_model, random_ids):
    model = make_model("llama_gqa", dtype=torch.bfloat16)
    twin, config, tensors = peft_twin(model)
    lora = StreamLoRA.from_peft(config, tensors, model)
    tokens = torch.tensor([random_ids(20)])
    expected = last_logits(twin, tokens, 3)
    with torch.no_grad(), lora.applied(3):
        found = model(tokens).logits[:, -3:]
    assert found.dtype == torch.bfloat16
    assert (found - expected).float().norm() / expected.float().norm() < 0.05


class Float8Linear(nn.Linear):
    """As transformers' FP8Linear: the weight has 8 bits, what goes in and comes out has 16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize("first", ["embedding in 16 bits", "all weights in 8 bits"])
def test_weights_of_8_bits_get_an_update_of_16(make_model, random_adapter, first):
    """The type is chosen on another device (a CPU takes float32 for all updates); the products are compared here."""
    model = make_model("llama_gqa", dtype=torch.bfloat16)
    adapter = random_adapter(model, stream=True)
    for part in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, linear in [(n, m) for n, m in part.named_children() if isinstance(m, nn.Linear)]:
            setattr(part, name, Float8Linear(linear))
    if first == "all weights in 8 bits":
        embedding = model.get_input_embeddings()
        embedding.weight = nn.Parameter(embedding.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        assert model.dtype == torch.float8_e4m3fn
    elsewhere = StreamLoRA.from_peft(adapter.peft_config, adapter.tensors, copy.deepcopy(model).to("meta"))
    chosen = {matrix.dtype for _, a, b in elsewhere._updates for matrix in (a, b)}
    assert chosen == {torch.bfloat16}, chosen
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = StreamLoRA.from_peft(adapter.peft_config, adapter.tensors, model)
    rounded = StreamLoRA([(layer, a.bfloat16(), b.bfloat16()) for layer, a, b in exact._updates])
    layer, found = model.model.layers[0].mlp.up_proj, []
    for lora in (exact, rounded):
        with torch.no_grad(), lora.applied(3):
            found.append((layer(x) - Float8Linear.forward(layer, x))[:, -3:].float())
    error = float((found[0] - found[1]).norm() / found[0].norm())
    assert error < 0.02, f"relative error {error:.3f}"


def test_the_folder_loads_in_peft(make_model, random_adapter, random_ids, tmp_path):
    model = make_model("qwen3")
    adapter = random_adapter(model, stream=True)
    folder = adapter.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    tokens = torch.tensor([random_ids(14)])
    with torch.no_grad(), adapter.lora.applied(2):
        found = model(tokens).logits[:, -2:]
    assert torch.allclose(found, last_logits(twin, tokens, 2), atol=1e-4, rtol=1e-4)


def test_the_model_is_restored(model, random_adapter, random_ids):
    tokens = torch.tensor([random_ids(9)])
    with torch.no_grad():
        before = model(tokens).logits
        lora = random_adapter(model, stream=True).lora
        assert instance_forwards(model) == []
        with lora.applied(2):
            assert len(instance_forwards(model)) == 7 * model.config.num_hidden_layers
        assert instance_forwards(model) == []
        assert torch.equal(model(tokens).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_an_error_restores_the_model(make_model, random_adapter):
    model = make_model("llama")
    lora = random_adapter(model, stream=True).lora
    with pytest.raises(IndexError, match="out of range"), lora.applied(2):
        model(torch.tensor([[10_000]]))
    assert instance_forwards(model) == []


def test_another_ones_forward_is_restored(make_model, random_adapter):
    model = make_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    original = layer.forward
    layer.forward = original  # as accelerate's offloading does
    with random_adapter(model, stream=True).lora.applied(2):
        assert layer.__dict__["forward"] is not original
    assert layer.__dict__["forward"] is original


def test_no_positions_is_an_error(make_model, random_adapter):
    lora = random_adapter(make_model("llama"), stream=True).lora
    with pytest.raises(ValueError, match="at least one position"), lora.applied(0):
        pass


def test_tokens_without_their_order_are_refused(make_model, random_adapter):
    model = make_model("llama")
    with pytest.raises(ValueError, match="without their order"), random_adapter(model, stream=True).lora.applied(1):
        model.model.layers[0].mlp(torch.zeros(3, 32))


def without(tensors, end):
    return {key: value for key, value in tensors.items() if not key.endswith(end)}


BROKEN = {
    "only one of the two matrices": lambda c, t: (c, without(t, "layers.0.mlp.up_proj.lora_B.weight")),
    r"no weights for model.layers.1.mlp.up_proj \(1 of": lambda c, t: (
        c,
        without(without(t, "1.mlp.up_proj.lora_A.weight"), "1.mlp.up_proj.lora_B.weight"),
    ),
    "holds no weights": lambda c, t: (c, {}),
    "no linear layer of LlamaForCausalLM": lambda c, t: (
        c,
        {key.replace("layers.1", "layers.9"): value for key, value in t.items()},
    ),
    r"up_proj have shapes \(4, 31\) and \(48, 4\)": lambda c, t: (
        c,
        {key: value[:, :31] if "up_proj.lora_A" in key else value for key, value in t.items()},
    ),
    "no weight of a plain LoRA": lambda c, t: (c, t | {"base_model.model.score.weight": torch.zeros(2)}),
    "alora_invocation_tokens": lambda c, t: (c | {"alora_invocation_tokens": [1]}, t),
    "use_dora=True": lambda c, t: (c | {"use_dora": True}, t),
    "modules_to_save": lambda c, t: (c | {"modules_to_save": ["lm_head"]}, t),
    "bias='all'": lambda c, t: (c | {"bias": "all"}, t),
    "init_lora_weights='pissa'": lambda c, t: (c | {"init_lora_weights": "pissa"}, t),
    "IA3 adapter": lambda c, t: (c | {"peft_type": "IA3"}, t),
    "output layer lm_head": lambda c, t: (
        c,
        t
        | {
            "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32),
            "base_model.model.lm_head.lora_B.weight": torch.zeros(260, 4),
        },
    ),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_an_adapter_that_does_not_fit_is_named(make_model, random_adapter, sentence):
    model = make_model("llama")
    adapter = random_adapter(model, stream=True)
    config, tensors = BROKEN[sentence](adapter.peft_config, adapter.tensors)
    with pytest.raises(ValueError, match=sentence):
        StreamLoRA.from_peft(config, tensors, model)
