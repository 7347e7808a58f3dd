"""A served model as the coordinator knows it: its tokenizer and its limits. The weights are the server's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from parse_infer.models.language import Language, check_vocabulary
from parse_infer.models.loading import load_config, load_tokenizer
from parse_infer.vllm.options import end_tokens_of


@dataclass
class ServedModel(Language):
    """
    Attributes:
        size: tokens that it embeds.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_ids: set[int]
    window: int
    size: int
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_vocabulary(self)

    @property
    def n_embeddings(self) -> int:
        return self.size


def served_model(name: str | Path, template_options: Mapping[str, Any] | None = None) -> ServedModel:
    """Of the model behind a name. Raises as `load_language_model` does, except for its weights."""
    config, tokenizer = load_config(name), load_tokenizer(name)
    text = config.get_text_config()
    window = getattr(text, "max_position_embeddings", None) or sys.maxsize
    ends = set(end_tokens_of(name, config))
    return ServedModel(str(name), tokenizer, ends, int(window), int(text.vocab_size), template_options or {})
