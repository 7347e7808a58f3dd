"""A tiny Llama as llama.cpp's converter would write it: F32 norms and embedding, Q8_0 matrices, byte-level tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    architecture: str = "llama",
    kind: str = "model",
    without: str | None = None,
    scaling: dict[str, Any] | None = None,
    added: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write `model` (a Llama with tied embeddings; its widths are multiples of 32) as a GGUF file.

    Args:
        kind: what the file says that it holds.
        without: a tensor to leave out.
        scaling: entries of `rope.scaling`.
        added: further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type(kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (scaling or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.rope.scaling.{key}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    known = {index: token for token, index in tokenizer.get_vocab().items()}
    specials = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([known.get(i, "ab") for i in range(config.vocab_size)])
    writer.add_token_types([3 if i in specials else 1 for i in range(config.vocab_size)])
    writer.add_token_merges(["a b"])  # transformers wants one
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    state = model.state_dict()
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"]}
    tensors["output_norm.weight"] = state["model.norm.weight"]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                if (tensor := state.get(f"model.layers.{layer}.{ours}.{kind}")) is not None:
                    tensor = _permuted(tensor, heads[theirs]) if theirs in heads else tensor
                    tensors[f"blk.{layer}.{theirs}.{kind}"] = tensor
    tensors |= added or {}
    for name, tensor in tensors.items():
        numbers = tensor.float().contiguous().numpy()
        if name == without:
            continue
        if name.startswith("blk.") and numbers.ndim == 2:
            packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves of a head that rotary embeddings turn."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
