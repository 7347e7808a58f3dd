"""Tiny language models for tests: they write printable text, and a draft model can resemble its target."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from parse_infer.models.loading import LanguageModel


def printable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make a model with an output layer of its own choose letters and punctuation only: the logits of all other tokens
    are 0, which is never the highest of them."""
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        for token in range(weight.shape[0]):
            text = tokenizer.decode([token], skip_special_tokens=True)
            if not (text.isascii() and text.isprintable() and text):
                weight[token] = 0
    return model


def resembling(
    make_model: Any, target: PreTrainedModel, noise: float = 0.05, architecture: str = "llama"
) -> PreTrainedModel:
    """A model that mostly agrees with `target`, which is of this architecture: the same weights plus noise."""
    other = make_model(architecture)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), target.parameters(), strict=True):
            mine.copy_(its + noise * its.std() * torch.randn(its.shape, generator=generator))
    return other


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer unlike that of conftest: 300 tokens with merges, other specials, another chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>", "[Q]", "[A]"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(
        ["There are 19 x 2 = 38 students in the other room. So they share the rest."] * 3, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        additional_special_tokens=["[Q]", "[A]"],
        chat_template=(
            "{% for m in messages %}[Q]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
        ),
    )


def language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str = "tiny") -> LanguageModel:
    return LanguageModel(name, model, tokenizer)


class TokenCount:
    """Records how many tokens each forward of a model reads, from its embedding layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.widths: list[int] = []
        self._handle = model.get_input_embeddings().register_forward_pre_hook(self._note)

    def _note(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.widths.append(args[0].shape[-1])

    def __enter__(self) -> TokenCount:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()
