"""Tiny random models of every supported architecture, a byte-level tokenizer in memory, and random adapters for them.

Weights are drawn large enough for attention, positions and adapters to matter: with transformers' own initialisation
every output is nearly the same, and a wrong mask would go unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

# Before torch is imported, and for the programs that tests start: two test processes share two cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

torch.set_num_threads(1)

WINDOW = 12  # sliding window, shorter than the sequences of the tests
SPECIALS = ("<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "pad_token_id": 258,
    "eos_token_id": 258,
}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "llama_gqa": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=8),
    "mistral": lambda: MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma": lambda: GemmaConfig(**_SHAPE, num_key_value_heads=1, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 3},
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=20.0,
    ),
}
ARCHITECTURES = tuple(_CONFIGS)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Mixture-of-experts models, which training supports in part.
_CONFIGS |= {
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_key_value_heads=2, head_dim=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SHAPE, **_EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=16
    ),
}
MOE_ARCHITECTURES = tuple(_CONFIGS)[len(ARCHITECTURES) :]


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw all weights anew: matrices with a gain of about 1, norms around their default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    return model.eval()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """`make_model(architecture, seed=0, dtype=torch.float32, **config)`: a fresh tiny model with 260 tokens."""

    def make(architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
        configuration = _CONFIGS[architecture]()
        for key, value in config.items():
            setattr(configuration, key, value)
        return randomise(AutoModelForCausalLM.from_config(configuration), seed).to(dtype)

    return make


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(architecture: str, make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A tiny model of every architecture in turn."""
    return make_model(architecture)


@pytest.fixture(autouse=True)
def _drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks never pause: models this small may be faster alone, and the text would depend on the time. Nor does the
    machine's pace end a block."""
    from parse_infer.decoding import block_length

    monkeypatch.setattr(block_length.BlockLength, "next_pause", lambda self: 0)
    monkeypatch.setattr(block_length, "LONGEST_S", 60.0)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the three specials; ids below 260."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=list(SPECIALS[:2]),
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def random_ids() -> Callable[..., list[int]]:
    """`random_ids(n, seed=0)`: ordinary tokens (no specials)."""

    def ids(n: int, seed: int = 0) -> list[int]:
        return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

    return ids


def random_lora(
    model: PreTrainedModel, rank: int, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and configuration of a LoRA on all linear layers."""
    tensors, targets = {}, set()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            key = f"base_model.model.{path}"
            a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
            b = torch.randn(module.out_features, rank, generator=generator) * rank**-0.5
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            targets.add(path.rsplit(".", 1)[-1])
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
    }


@pytest.fixture(scope="session")
def random_adapter() -> Callable[..., Any]:
    """`random_adapter(model, seed=1, stream=False, layers=(), second=True)`: a `ValidityAdapter` with a head on
    log-probabilities; with `stream` also `layers` and a `second` stream, whose LoRA really changes something."""
    from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
    from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
    from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
    from parse_infer.judge.stream.lora import StreamLoRA
    from parse_infer.models.fingerprint import describe_target

    def make(
        model: PreTrainedModel, seed: int = 1, stream: bool = False, layers: Sequence[int] = (), second: bool = True
    ) -> Any:
        generator = torch.Generator().manual_seed(seed)
        sizes = LogprobHeadConfig(k=3, width=8, text_size=4, buckets=64)
        reader = LogprobHead(sizes)
        with torch.no_grad():
            for parameter in reader.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            reader.gap.fill_(0.5)
        config = ValidityConfig(
            target=describe_target(model),
            logprobs={"head": asdict(sizes), "reads": {"k": 3}, "reference": {"ids": [1, 2], "logprobs": [-1.0]}},
            cut_policy={"kind": "tokens", "every": 4, "max_cuts": 32},
            threshold=0.5,
        )
        if not stream:
            return ValidityAdapter(config, reader.requires_grad_(False).eval())
        head = StreamHead(reader, StreamHeadConfig(model.config.hidden_size, 8, -1.0, layers, second))
        for layer in (head.project, head.beside, head.out):
            torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            torch.nn.init.zeros_(layer.bias)
        config.stream = {"head": asdict(head.stream), "start_from": "runs/logprob/adapter"}
        if not second:
            return ValidityAdapter(config, head.requires_grad_(False).eval())
        tensors, peft_config = random_lora(model, 4, generator)
        lora = StreamLoRA.from_peft(peft_config, tensors, model)
        return ValidityAdapter(config, head.requires_grad_(False).eval(), lora, peft_config, tensors)

    return make
