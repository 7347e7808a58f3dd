"""Time every kind of forward at a pair's real size, with random weights: no download, any device.

Rounds interleave all forwards. Random weights give no acceptance rates, so the table gives each token drafter's
break-even: the tokens per target forward from which it pays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3Config

from parse_infer.errors import ParseError
from parse_infer.evaluation.tables import terminal_table
from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
from parse_infer.judge.stream.lora import StreamLoRA
from parse_infer.judge.stream.scorer import StreamScorer
from parse_infer.judge.verifier import Verifier
from parse_infer.models.architecture import embedding_weight, text_config
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.cpu.prepacked_linear import pack_linears
from parse_infer.models.decoder import Decoder
from parse_infer.models.environment import free_memory
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_config
from parse_infer.models.names import resolve
from parse_infer.models.timing import Step, measure
from parse_infer.settings.sampling import Sampling
from parse_infer.text.cuts import Segmenter
from parse_infer.token_drafters.decode import read_tree
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.eagle_head import EagleConfig, EagleHead
from parse_infer.token_drafters.medusa import MedusaConfig, MedusaDrafter, MedusaHead
from parse_infer.token_drafters.proposer import TokenProposer, TokenTree

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
SHAPES = {
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, **_QWEN3
    ),
    "Qwen/Qwen3-0.6B": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
}
STEP, DRAFT_STEP, PACKED, PREFILL = "target, one token", "draft model, one token", "packed pass", "prefill"
CHAIN, TREE = "target, chain of 5", "target, tree of 16"
_CHAIN_TOKENS, _KEPT = 5, 3  # tokens: per chain, accepted of it
_RANK = 16  # of the judge's LoRA


def random_model(shape: str, device: torch.device, dtype: torch.dtype, torch_compile: bool = False) -> LanguageModel:
    """Build a model of this shape (a key of `SHAPES`, Hugging Face id or folder) with random weights.

    Raises ValueError or OSError for an unknown shape.
    """
    with device:
        model = AutoModelForCausalLM.from_config(_config(shape), dtype=dtype).eval().requires_grad_(False)
    enable_split_attention(model)
    pack_linears(model)
    return LanguageModel(shape, model, AutoTokenizer.from_pretrained(resolve("zoo:target")), {}, torch_compile)


def _config(shape: str) -> PretrainedConfig:
    return SHAPES[shape] if shape in SHAPES else load_config(shape)


def _check_memory(shapes: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if the weights alone exceed the free memory."""
    needed = 0
    for shape in shapes:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(_config(shape), dtype=dtype)
        needed += sum(p.numel() * p.element_size() for p in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and needed > free:
        raise ParseError(
            f"{' and '.join(shapes)} have {needed / 2**30:.1f} GiB of weights in {str(dtype).removeprefix('torch.')}, "
            f"but only {free / 2**30:.1f} GiB are free on {device}: choose smaller shapes or a smaller --dtype"
        )


def steps(target: LanguageModel, draft: LanguageModel, context: int, drafted: int, heads: bool = True) -> list[Step]:
    """All forwards of PARSE after `context` tokens, with a draft of `drafted` tokens; `heads`: token drafters too."""
    ids = torch.randint(3, 2000, (context + drafted,)).tolist()
    rest = ids[context:]
    chain, tree = range(-1, _CHAIN_TOKENS - 1), [-1] * 4 + [i // 2 for i in range(12)]
    main, small = target.decoder, draft.decoder
    verifier = Verifier(main, random_judge(target), Segmenter(target.tokenizer))
    assert isinstance(verifier.scorer, StreamScorer)
    verifier.scorer.one_pass = True  # as on a GPU, on any device

    def at(decoder: Decoder, n: int = context) -> Callable[[], None]:
        """Set the context to the first n tokens, with all but the last in the KV cache."""

        def prepare() -> None:
            decoder.seek(ids[: n - 1])
            if decoder.cached < n - 1:
                decoder.forward()
            decoder.seek(ids[:n])

        return prepare

    def look_ahead(decoder: Decoder, parents: Sequence[int]) -> Callable[[], Any]:
        return lambda: decoder.logits(read_tree(decoder, TokenTree(rest[: len(parents)], parents))).argmax(-1).tolist()

    found = [
        Step(STEP, at(main), look_ahead(main, ())),
        Step(CHAIN, at(main), look_ahead(main, chain)),
        Step(TREE, at(main), look_ahead(main, tree)),
        Step(PACKED, at(main), lambda: verifier.verify_block(rest)),
        Step(PREFILL, at(main), lambda: main.forward(rest).hidden.sum().item()),
        Step(DRAFT_STEP, at(small), look_ahead(small, ())),
    ]
    for name, drafter in (_heads(target) if heads else {}).items():
        # The state after a forward that accepted some tokens: the head has not read their features yet.
        decoder = drafter.model.decoder

        def prepare(decoder: Decoder = decoder, drafter: TokenProposer = drafter) -> None:
            at(decoder)()
            drafter.propose(decoder.ids, _CHAIN_TOKENS, Sampling(), None)
            decoder.seek(ids[: context + _KEPT - 1])
            decoder.forward()
            decoder.seek(ids[: context + _KEPT])

        def propose(decoder: Decoder = decoder, drafter: TokenProposer = drafter) -> None:
            assert drafter.propose(decoder.ids, _CHAIN_TOKENS, Sampling(), None).tokens

        found.append(Step(name, prepare, propose))
    return found


def random_judge(target: LanguageModel) -> ValidityAdapter:
    """A judge with a second stream (LoRA and head) of the size in `recipes/train.yaml`, with random weights."""
    model = target.model
    linears = [m for m in getattr(model, model.base_model_prefix).modules() if isinstance(m, nn.Linear)]
    with torch.device(model.device):
        updates = [
            (m, torch.randn(_RANK, m.in_features, dtype=model.dtype), torch.randn(m.out_features, _RANK).to(m.weight))
            for m in linears
        ]
        head = StreamHead(LogprobHead(LogprobHeadConfig()), StreamHeadConfig(text_config(model).hidden_size))
    return ValidityAdapter(
        ValidityConfig(describe_target(model)), head.eval().requires_grad_(False), StreamLoRA(updates)
    )


def _heads(target: LanguageModel) -> dict[str, EagleDrafter | MedusaDrafter]:
    own, weight = text_config(target.model), embedding_weight(target.model)
    small = min(32000, own.vocab_size)
    eagle = EagleConfig(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        vocab_size=own.vocab_size,
        draft_vocab_size=small,
        eagle_aux_hidden_state_layer_ids=(0, own.num_hidden_layers // 2, own.num_hidden_layers),
    )
    found: dict[str, EagleDrafter | MedusaDrafter] = {}
    with torch.device(weight.device):
        heads: dict[str, EagleHead | MedusaHead] = {
            "eagle3": EagleHead(eagle),
            "parallel": EagleHead(replace(eagle, parallel_drafting=True, ptd_token_id=0)),
            "medusa": MedusaHead(MedusaConfig(own.hidden_size, own.vocab_size, _CHAIN_TOKENS, 1, small)),
        }
    for name, head in heads.items():
        head.to(weight.dtype).eval().requires_grad_(False)
        for shape, top_k in (("chain", 1), ("tree", 4)):
            own_features = replace(target)  # the copy's own decoder stores them
            found[f"{name}, {shape}"] = (
                MedusaDrafter(head, own_features, tokens=_CHAIN_TOKENS, top_k=top_k)
                if isinstance(head, MedusaHead)
                else EagleDrafter(head, own_features, tokens=_CHAIN_TOKENS, top_k=top_k)
            )
    return found


def forward_costs(
    names: tuple[str, str],
    context: int,
    drafted: int,
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    torch_compile: bool = False,
    heads: bool = True,
) -> dict[str, list[float]]:
    """Time all forwards of a target and a draft model with the shapes of `names`; returns seconds by forward."""
    torch.manual_seed(0)
    _check_memory(names, device, dtype)
    pair = [random_model(shape, device, dtype, torch_compile) for shape in names]
    if context + drafted > min(lm.window for lm in pair):
        raise ParseError(
            f"{context} context tokens and {drafted} draft tokens exceed the context windows "
            f"{[lm.window for lm in pair]}: choose fewer"
        )
    with torch.inference_mode():
        return measure(steps(pair[0], pair[1], context, drafted, heads), rounds, device)


def serving_costs(seconds: dict[str, list[float]], context: int, drafted: int) -> dict[str, Any]:
    """The costs that `parse-infer plan` reads, of one request at a time (`evaluation.serving_costs.Costs`).

    With random weights nothing is known of how many tokens are kept.
    """
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "target_token_s": {"1": median[STEP]},
        "draft_token_s": {"1": median[DRAFT_STEP]},
        "read_token_s": {"1": median[PREFILL] / drafted},
        "prompt_tokens": context,
        "draft_tokens": drafted,
        "answer_tokens": drafted,
    }


def cost_report(seconds: dict[str, list[float]], drafted: int) -> tuple[Table, str]:
    """Build the table, and a summary of PARSE's largest speed-up with a draft of this many tokens."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    cells = []
    for name, times in seconds.items():
        quarter, ordered = len(times) // 4, sorted(times)
        half = f"{1e3 * ordered[quarter]:.2f}-{1e3 * ordered[-1 - quarter]:.2f}"
        pays = ""
        if name == DRAFT_STEP:  # the draft model as token drafter
            pays = f"{(_CHAIN_TOKENS * median[name] + median[CHAIN]) / median[STEP]:.2f}"
        elif name.endswith((", chain", ", tree")):
            look = median[CHAIN if name.endswith("chain") else TREE]
            pays = f"{(median[name] + look) / median[STEP]:.2f}"
        cells.append([name, f"{1e3 * median[name]:.2f}", half, f"{median[name] / median[STEP]:.2f}", pays])
    draft, alone = drafted * median[DRAFT_STEP], drafted * median[STEP]
    return terminal_table(("forward", "ms", "middle half", "target forwards", "pays from"), cells), (
        f"A fully accepted draft of {drafted} tokens is {alone / (draft + median[PREFILL]):.2f} times as fast as the "
        f"target alone, {alone / (draft + median[PACKED]):.2f} times under a judge with a second stream; with a free "
        f"draft, {alone / median[PREFILL]:.1f} and {alone / median[PACKED]:.1f} times. Pays from: break-even of a "
        "token drafter in tokens per target forward."
    )
