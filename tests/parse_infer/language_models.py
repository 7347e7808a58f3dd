"""Tiny language models for tests: they write printable text, and a draft model can resemble its target."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from parse_infer.judge.zero_shot import WORDS, ZeroShotJudge
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.detokenizer import encode_continuation
from parse_infer.text.prompts import render_prompt
from parse_zoo.train.vocabulary_pruning import pruned

QUESTION_LEN = 4  # tokens: the end of the answer, the user's turn, "?", the next answer


def short_question(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, words: tuple[str, str] = WORDS
) -> ZeroShotJudge:
    """A judge that asks after every fourth token, so that validity may rise again after a failure."""
    return ZeroShotJudge(model, tokenizer, CutPolicy("tokens", every=4), question="?", words=words)


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


def cycling(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, prompt: str) -> PreTrainedModel:
    """Make a model answer `prompt` with `text` again and again. Its tokens must differ: each has one successor."""
    ids = encode_continuation(tokenizer, "\n", text)
    following = [render_prompt(tokenizer, prompt)[-1], *ids]
    assert len(set(following)) == len(following), f"{text!r} has a token twice"
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the last token counts
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings /= embeddings.norm(dim=-1, keepdim=True)
        output.zero_()
        for token, successor in zip(following, [*ids, ids[0]], strict=True):
            output[successor] += embeddings[token]
    return model


def thinking_tokenizer(base: PreTrainedTokenizerFast, opened: bool = True) -> PreTrainedTokenizerFast:
    """`base` with the tokens <think> and </think>. Its chat template opens the thinking, unless the model does."""
    core = Tokenizer.from_str(base.backend_tokenizer.to_str())
    core.add_tokens(["<think>", "</think>"])
    template = base.chat_template.replace("'<|assistant|>' }}{% endif %}", "'<|assistant|><think>' }}{% endif %}")
    assert template != base.chat_template
    template = (
        "{% if closed %}"
        + template.replace("<think>", "<think></think>")
        + "{% else %}"
        + (template if opened else base.chat_template)
        + "{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=base.eos_token, chat_template=template)


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


def crossing_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with tokens that begin and end inside characters, as Qwen's for Khmer and Llama 3's for Korean."""
    alphabet = bytes_to_unicode()
    merges = []
    for character in "ធუ툠🙈":
        first, second, *rest = (alphabet[byte] for byte in character.encode())
        merges += [(first, second), *([("".join(rest), first + second)] if len(rest) == 1 else [tuple(rest)])]
    merges.append((alphabet["ធ".encode()[-1]], alphabet["€".encode()[0]]))
    words = [*alphabet.values(), *("".join(merge) for merge in merges)]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens(["<tool call>", "<数>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def llama_tokenizer(text: str = "Once upon a time there was 38 so they share 19.") -> PreTrainedTokenizerFast:
    """Words begin with "▁", and the decoder strips the space of the first token it is given, as Llama 2's does."""
    core = Tokenizer(models.BPE(unk_token="?"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(special_tokens=["?", "</s>"], show_progress=False)
    core.train_from_iterator([text] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def sentencepiece_tokenizer(text: str = "Once upon a time there was 38 so they share 19.") -> PreTrainedTokenizerFast:
    """As `llama_tokenizer`, with a token for each byte of what it does not know."""
    state = json.loads(llama_tokenizer(text).backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    core = Tokenizer.from_str(json.dumps(state | {"model": state["model"] | {"byte_fallback": True}}))
    spaces, *fuse_and_strip = decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), *fuse_and_strip])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str = "tiny") -> LanguageModel:
    return LanguageModel(name, model, tokenizer)


def pruned_tokenizer(
    base: PreTrainedTokenizerFast, text: str, vocab_size: int, specials: Sequence[str] | None = None
) -> PreTrainedTokenizerFast:
    """`base` with the tokens that `text` needs; its special tokens are kept where none are named."""
    ids = base.encode(text, add_special_tokens=False)
    kept = list(base.get_added_vocab()) if specials is None else specials
    smaller = pruned(base.backend_tokenizer, {i: ids.count(i) for i in ids}, kept, vocab_size)
    end = base.eos_token if base.eos_token in kept else None
    return PreTrainedTokenizerFast(tokenizer_object=smaller, eos_token=end, chat_template=base.chat_template)


def with_vocabulary(
    model: PreTrainedModel, of: PreTrainedTokenizerFast, smaller: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """A copy of `model`, whose tokenizer is `of`, that reads and writes the tokens of `smaller` only."""
    rows = of.convert_tokens_to_ids(smaller.convert_ids_to_tokens(list(range(len(smaller)))))
    other = copy.deepcopy(model)
    weights = [model.get_input_embeddings().weight[rows], model.get_output_embeddings().weight[rows]]
    other.resize_token_embeddings(len(smaller), mean_resizing=False)
    with torch.no_grad():
        other.get_input_embeddings().weight.copy_(weights[0])
        other.get_output_embeddings().weight.copy_(weights[1])
    other.config.eos_token_id = other.generation_config.eos_token_id = smaller.eos_token_id
    return other


def reduced_pair(make_model: Any, noise: float = 0.05) -> tuple[LanguageModel, LanguageModel]:
    """A target with 300 tokens, and a draft model that mostly agrees with it as far as its 279 of them go."""
    words = word_tokenizer()
    smaller = pruned_tokenizer(words, "There are students in the rest.", 285)
    target = make_model("llama", vocab_size=300, eos_token_id=words.eos_token_id)
    target.generation_config.eos_token_id = words.eos_token_id
    alike = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in alike.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    draft = with_vocabulary(alike, words, smaller)
    return language_model(target, words, "target"), language_model(draft, smaller, "draft")


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


def refusal(name: Path | str) -> str:
    """The one sentence with which a model is refused."""
    with pytest.raises((ValueError, OSError)) as error:
        load_language_model(name, role="target", device="cpu")
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text
