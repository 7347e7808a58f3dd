"""Split attention equals dense attention, and never holds a mask of T x T."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import CausalVariant
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BltConfig,
    BltForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from parse_infer.judge.packing import probe_mask, probe_positions, probes
from parse_infer.models import attention
from parse_infer.models.architecture import layer_windows
from parse_infer.models.attention import (
    enable_split_attention,
    layer_masks,
    split_attention_forward,
    split_attention_mask,
)
from parse_infer.models.decoder import Decoder
from tests.parse_infer.dense_mask import dense_mask

HEADS, HEAD_DIM = 4, 8


class Groups(nn.Module):
    """What the attention function reads from its layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def reference(query, key, value, mask, scaling):
    """Softmax attention in float32 with a dense boolean mask: [B, T, heads, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    scores = (query.float() @ key.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def mask_rows(monkeypatch) -> list[int]:
    """Rows of every mask that reaches the fused attention kernel."""
    rows: list[int] = []
    fused = nn.functional.scaled_dot_product_attention

    def recording(*args, attn_mask=None, **kwargs):
        if attn_mask is not None:
            rows.append(attn_mask.shape[-2])
        return fused(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recording)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5, 1000])
@pytest.mark.parametrize(("past", "causal"), [(0, 37), (21, 16), (30, 1), (0, 1)])
@pytest.mark.parametrize("chunk", [7, 256])
def test_split_equals_dense(monkeypatch, past, causal, window, groups, dtype, chunk):
    monkeypatch.setattr(attention, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    total, probe_len = past + causal, 3
    visible = torch.tensor([[total, max(1, total // 2), 1], [max(1, total // 3), total, total]])
    n_probe = visible.shape[1] * probe_len
    query = torch.randn(2, HEADS, causal + n_probe, HEAD_DIM).to(dtype)
    key, value = (torch.randn(2, HEADS // groups, total + n_probe, HEAD_DIM).to(dtype) for _ in range(2))
    mask = probe_mask(visible, probe_len, total, window)
    split, _ = split_attention_forward(Groups(groups), query, key, value, mask, scaling=0.4, sliding_window=window)
    dense = reference(query, key, value, dense_mask(past, causal, visible, probe_len, window), 0.4)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert split.shape == (2, causal + n_probe, HEADS, HEAD_DIM) and split.dtype == dtype
    assert torch.allclose(split.float(), dense, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("chunk", [4, 256])
def test_packed_forward_equals_the_eager_reference(model, random_ids, past, chunk, monkeypatch):
    """The whole model, cache included, against transformers' eager attention with the dense mask."""
    monkeypatch.setattr(attention, "CHUNK_ROWS", chunk)
    ids, probe, visible = random_ids(40), [3, 4], [25, 33, 40]
    windows, cuts = layer_windows(model), torch.tensor([visible])
    tokens = torch.tensor([[*ids[past:], *probe * 3]])
    positions = torch.cat([torch.arange(past, 40)[None], probe_positions(cuts, 2)], 1)

    def dense(window):
        allowed = dense_mask(past, 40 - past, cuts, 2, window)
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)

    hidden = {}
    for implementation, mask_of in (
        ("eager", dense),
        ("parse_split", lambda window: probe_mask(cuts, 2, 40, window)),
    ):
        model.set_attn_implementation(implementation)
        decoder = Decoder(model, ())
        with torch.inference_mode():
            if past:
                decoder.seek(ids[:past])
                decoder.forward()
            output = model.base_model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=layer_masks(windows, mask_of),
                past_key_values=decoder._cache,
                use_cache=True,
            )
        hidden[implementation] = output.last_hidden_state
    assert torch.allclose(hidden["eager"], hidden["parse_split"], atol=1e-4, rtol=1e-4)


def test_no_mask_of_t_by_t(model, random_ids, mask_rows, monkeypatch):
    """Prefill, verification pass, a second pass behind it and decoding: masks have probe rows or one chunk's rows."""
    monkeypatch.setattr(attention, "CHUNK_ROWS", 16)
    enable_split_attention(model)
    decoder = Decoder(model, ())
    mask_rows.clear()
    decoder.seek(random_ids(150))
    decoder.forward()
    decoder.forward(random_ids(150, seed=1), probes([3, 4], [200, 250, 300], len(decoder.ids) + 150, decoder.device))
    decoder.forward(random_ids(100, seed=2), probes([3, 4], [320, 400], len(decoder.ids) + 100, decoder.device))
    list(decoder.decode(3))
    assert mask_rows, "the probe rows need a mask"
    assert max(mask_rows) <= 24  # 16 of a chunk, or three probes of two tokens for each of at most four grouped heads
    assert len(decoder.ids) == 403


def test_a_plain_causal_prefill_uses_no_mask_at_all(make_model, random_ids, mask_rows):
    model = make_model("llama_gqa")
    enable_split_attention(model)
    decoder = Decoder(model, ())
    mask_rows.clear()
    decoder.seek(random_ids(100))
    decoder.forward(random_ids(50, seed=1), probes([3], [120, 150], len(decoder.ids) + 50, decoder.device))
    assert mask_rows == [4] * 2  # the two probe rows for each of two grouped heads, once per layer


@pytest.mark.parametrize("kernel", ["flash", "no flash"])
@pytest.mark.parametrize("past", [0, 1, 40])
def test_a_gpu_reads_the_cache_where_it_is_if_the_kernel_can_group_heads(monkeypatch, kernel, past):
    """Of torch's two kernels for this pattern on CUDA flash attention groups heads, and takes 16 bits only;
    memory-efficient attention does not group: given grouped heads it would leave the work to the slow math kernel."""
    asked, calls = [], []

    def can_use_flash(params):
        asked.append((params.query.shape, params.key.shape, params.attn_mask, params.is_causal, params.enable_gqa))
        return kernel == "flash"

    class Recording(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is nn.functional.scaled_dot_product_attention:
                calls.append((args[1], kwargs["enable_gqa"], kwargs["attn_mask"].variant))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(attention, "can_use_flash_attention", can_use_flash)
    dtype = torch.bfloat16 if kernel == "flash" else torch.float32
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 16, HEAD_DIM).to(dtype)
    key, value = (torch.randn(1, 2, past + 16, HEAD_DIM).to(dtype) for _ in range(2))
    with Recording():
        out = attention.causal_on_gpu(query, key, value, 0.0, 0.4)
    (seen, grouped, variant), *more = calls
    assert not more and variant == CausalVariant.LOWER_RIGHT
    assert asked == [(query.shape, key.shape, None, False, True)]
    assert grouped == (kernel == "flash")
    assert (seen.data_ptr() == key.data_ptr()) == grouped and seen.shape[1] == (2 if grouped else HEADS)
    dense = reference(query, key, value, torch.ones(16, past + 16, dtype=torch.bool).tril(past), 0.4)
    tolerance = 3e-2 if kernel == "flash" else 1e-5
    assert torch.allclose(out.float(), dense, atol=tolerance, rtol=tolerance)


def test_which_attention_a_gpu_gets(monkeypatch):
    """Layers without a window, whatever is in the cache; a window still needs chunks with a mask."""

    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    taken, out = [], torch.zeros(1, 16, HEADS, HEAD_DIM)
    monkeypatch.setattr(attention, "causal_on_gpu", lambda query, key, *_: taken.append(key.shape[2]) or out)
    monkeypatch.setattr(attention, "_band", lambda *_: None)
    monkeypatch.setattr(attention, "_masked", lambda *_: out)
    for past in (0, 40):
        query, key = (torch.zeros(1, heads, n, HEAD_DIM).as_subclass(OnGPU) for heads, n in ((4, 16), (2, past + 16)))
        mask = torch.empty(1, 1, 0, past + 16, dtype=torch.bool)
        for window in (None, 1000, 5):
            split_attention_forward(Groups(2), query, key, key, mask, scaling=0.4, sliding_window=window)
    assert taken == [16, 16, 56, 56]


def test_one_token_and_heads_of_their_own_need_no_choice_of_kernel(monkeypatch):
    monkeypatch.setattr(attention, "can_use_flash_attention", lambda params: pytest.fail("not to be asked"))
    torch.manual_seed(0)
    for n, kv_heads in ((1, 2), (16, HEADS)):
        query, key, value = (torch.randn(1, heads, n, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads))
        dense = reference(query, key, value, torch.ones(n, n, dtype=torch.bool).tril(), 0.4)
        assert torch.allclose(attention.causal_on_gpu(query, key, value, 0.0, 0.4), dense, atol=1e-5)


def test_plain_forwards_compute_what_sdpa_computes(model, random_ids):
    """Training and padded batches run through the same attention."""
    tokens = torch.tensor([random_ids(30), random_ids(30, seed=1)])
    padding = torch.ones_like(tokens)
    padding[0, 20:] = 0
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = [model(tokens).logits, model(tokens, attention_mask=padding).logits[0, :20]]
        enable_split_attention(model)
        found = [model(tokens).logits, model(tokens, attention_mask=padding).logits[0, :20]]
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def test_generate_of_transformers_still_works(model, random_ids):
    prompt = torch.tensor([random_ids(30)])
    model.set_attn_implementation("sdpa")
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    enable_split_attention(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)


def test_mask_function_says_causal_throughout_without_rows():
    assert split_attention_mask(1, q_length=9, kv_length=9) is None
    assert split_attention_mask(1, q_length=1, kv_length=9, q_offset=8) is None
    assert split_attention_mask(2, q_length=5, kv_length=9, q_offset=4).shape == (2, 1, 0, 9)
    assert split_attention_mask(1, q_length=1, kv_length=9, q_offset=8, local_size=4).shape == (1, 1, 0, 9)
    padding = torch.tensor([[False, *[True] * 8]])
    assert split_attention_mask(1, 5, 9, q_offset=4, attention_mask=padding).shape == (1, 1, 5, 9)


def tiny(config_class, model_class, **extra):
    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return model_class(config_class(**{**shape, **extra}))


BLT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED = {
    "caps its attention scores": lambda: tiny(Gemma2Config, Gemma2ForCausalLM),
    "attention sinks": lambda: tiny(GptOssConfig, GptOssForCausalLM, **MOE),
    "Qwen3NextForCausalLM has linear_attention layers": lambda: tiny(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "chunked_attention layers": lambda: tiny(
        Llama4TextConfig, Llama4ForCausalLM, intermediate_size_mlp=16, attention_chunk_size=8, **MOE
    ),
    "MambaForCausalLM has linear_attention layers": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    ),
    "BltForCausalLM does not take attention functions": lambda: BltForCausalLM(
        BltConfig(
            vocab_size=64, **{f"{part}_config": dict(BLT) for part in ("patcher", "encoder", "decoder", "global")}
        )
    ),
    "encoder-decoder": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_sentence(reason):
    refused = REFUSED[reason]()
    with pytest.raises(ValueError, match=reason) as error:
        enable_split_attention(refused)
    assert type(refused).__name__ in str(error.value) and "\n" not in str(error.value)


def test_windows_per_kind_of_layer(make_model):
    assert layer_windows(make_model("llama")) == {"full_attention": None}
    assert layer_windows(make_model("mistral")) == {"sliding_attention": 12}
    assert layer_windows(make_model("gemma3")) == {"sliding_attention": 12, "full_attention": None}


def test_a_window_that_the_configuration_does_not_list_is_refused(make_model):
    model = make_model("gemma3")
    model.model.layers[0].self_attn.sliding_window = 99
    with pytest.raises(ValueError, match="window 99"):
        enable_split_attention(model)


WINDOWED = {
    "phimoe": {"num_local_experts": 2},
    "qwen2_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "doge": {},
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_that_the_model_does_not_pass_to_its_attention_are_exact(kind, random_ids):
    config = AutoConfig.for_model(
        kind,
        **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6, "max_position_embeddings": 64},
        **WINDOWED[kind],
    )
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), random_ids(40)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    enable_split_attention(model)
    decoder = Decoder(model, ())
    decoder.seek(ids[:20])
    assert torch.allclose(decoder.logits(decoder.forward(ids[20:]).hidden), expected[19:], atol=1e-5)
    decoder.prefill_chunk = 7
    decoder.seek([])
    decoder.seek(ids)
    assert torch.allclose(decoder.next_logits(), expected[-1], atol=1e-5)
    decoder.seek(ids[:-5])
    assert torch.allclose(decoder.logits(decoder.look_ahead(ids[-5:])), expected[-6:], atol=1e-5)


def test_attention_outside_the_decoder_layers_is_refused(make_model):
    model = make_model("llama")
    model.extra = Groups(1)
    model.extra.layer_idx = 0
    with pytest.raises(ValueError, match="LlamaForCausalLM has Groups outside its decoder layers"):
        enable_split_attention(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("past", "causal"), [(0, 300), (200, 100), (299, 1)])
@pytest.mark.parametrize("window", [None, 50])
def test_split_equals_dense_on_the_gpu(past, causal, window, groups, dtype):
    """There the lower-right causal kernel takes the place of chunks."""
    torch.manual_seed(0)
    visible = torch.tensor([[past + causal, 40]], device="cuda")
    query = torch.randn(1, 4, causal + 6, 64, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 4 // groups, past + causal + 6, 64, device="cuda", dtype=dtype) for _ in range(2))
    mask = probe_mask(visible, 3, past + causal, window)
    with torch.inference_mode():
        split, _ = split_attention_forward(Groups(groups), query, key, value, mask, scaling=0.1, sliding_window=window)
        dense = reference(query, key, value, dense_mask(past, causal, visible, 3, window), 0.1)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert torch.allclose(split.float(), dense, atol=tolerance, rtol=tolerance)
