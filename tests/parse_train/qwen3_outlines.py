"""Folders with the configurations of Qwen3-8B and Qwen3-0.6B, and a tokenizer that splits text as theirs do."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config

_SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_OWN = {
    "Qwen3-8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
    "Qwen3-0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"]


def qwen3_outlines(folder: Path) -> dict[str, str]:
    """Write both folders; return them by the names that recipes use."""
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = Split(Regex(r"\n| ?\w+|\?"), "isolated")
    words.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    for name, sizes in _OWN.items():
        config = Qwen3Config(**_SHARED, **sizes, tie_word_embeddings=name == "Qwen3-0.6B", dtype="bfloat16")
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {f"Qwen/{name}": str(folder / name) for name in _OWN}
