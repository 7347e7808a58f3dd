"""Heads that learnt a few answers of a model by heart, in seconds and without the packages of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parse_infer.models.loading import LanguageModel
from parse_infer.token_drafters.eagle_head import EagleConfig, EagleHead
from parse_infer.token_drafters.medusa import MedusaConfig, MedusaHead

STEPS = 25


def save_head(lm: LanguageModel, kind: str, answers: Sequence[tuple[list[int], list[int]]], folder: Path) -> Path:
    """Train a head to propose the answers that `lm` wrote to prompts, and save it.

    Medusa heads learn all tokens that they propose. EAGLE heads learn the first one, from the model's own features.

    Args:
        kind: "eagle3", "parallel" or "medusa".
        answers: tokens of each prompt and its answer.
    """
    torch.manual_seed(0)
    tokens = sorted({token for _, answer in answers for token in answer})
    head = medusa_head(lm, len(tokens)) if kind == "medusa" else eagle_head(lm, len(tokens), kind == "parallel")
    head.set_vocabulary(tokens)
    for weight in head.output_weights:
        weight.data.copy_(lm.model.get_output_embeddings().weight[tokens])
    optimizer, embed, rows = torch.optim.AdamW(head.parameters(), lr=3e-3), lm.model.get_input_embeddings(), []
    with torch.no_grad():
        for prompt, answer in answers:
            ids = torch.tensor(prompt + answer)
            output = lm.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
            rows.append((len(prompt) - 1, ids, [state[0] for state in output.hidden_states], embed(ids)))
    for _ in range(STEPS):
        losses = []
        for start, ids, states, embeddings in rows:
            all_logits = (
                head(states[-1][:-1]) if isinstance(head, MedusaHead) else [first_logits(head, states, embeddings)]
            )
            for ahead, logits in enumerate(all_logits):  # state i proposes token i + 2 + ahead
                targets = torch.searchsorted(head.token_ids, ids[start + 2 + ahead :])
                losses.append(cross_entropy(logits[start : -1 - ahead], targets))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return head.save_pretrained(folder)


def first_logits(head: EagleHead, states: Sequence[Tensor], embeddings: Tensor) -> Tensor:
    """Logits [T - 1, V] of the token that follows each next token, from states and embeddings [T, H]."""
    features = torch.cat([states[i] for i in head.config.eagle_aux_hidden_state_layer_ids], dim=-1)[:-1]
    n = len(features)
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    output, _ = head(head.fc(features)[None], embeddings[None, 1:], torch.arange(n)[None], causal)
    return head.logits(output[0])


def eagle_head(lm: LanguageModel, vocabulary: int, parallel: bool) -> EagleHead:
    """A new head of the model's shape that proposes `vocabulary` tokens."""
    own = lm.model.config
    return EagleHead(
        EagleConfig(
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_attention_heads=own.num_attention_heads,
            num_key_value_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            vocab_size=own.vocab_size,
            draft_vocab_size=vocabulary,
            eagle_aux_hidden_state_layer_ids=(2, own.num_hidden_layers // 2, own.num_hidden_layers - 1),
            max_position_embeddings=lm.window,
            parallel_drafting=parallel,
            ptd_token_id=lm.tokenizer.pad_token_id if parallel else None,
            target_num_hidden_layers=own.num_hidden_layers,
        )
    )


def medusa_head(lm: LanguageModel, vocabulary: int) -> MedusaHead:
    """Four new heads of the model's shape that propose `vocabulary` tokens."""
    own = lm.model.config
    head = MedusaHead(MedusaConfig(own.hidden_size, own.vocab_size, 4, 1, vocabulary, own.num_hidden_layers))
    for block in head.blocks.parameters():
        nn.init.zeros_(block)
    return head
