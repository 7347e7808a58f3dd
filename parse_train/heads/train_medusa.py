"""Train Medusa heads (arXiv 2401.10774): `accelerate launch recipes/medusa.yaml`.

"Medusa-1": the model is frozen. Every head starts as a copy of the model's output layer, and learns the model's
distribution for a token further ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from parse_infer.errors import ParseError
from parse_infer.models.loading import LanguageModel
from parse_infer.token_drafters.medusa import MedusaConfig, MedusaHead
from parse_train.heads.training import HeadModel, HeadTrainingConfig, train_head


@dataclass
class MedusaTrainingConfig(HeadTrainingConfig):
    """Fields of Medusa heads; `steps` is the number of heads."""

    kind: ClassVar[str] = "medusa"

    head_layers: int = field(default=1, metadata={"help": "Residual blocks in each head."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_layers < 1:
            raise ParseError(f"head_layers is {self.head_layers}; it must be at least 1")


class MedusaModel(HeadModel):
    """Trains Medusa heads on every token."""

    def propose(self, states: Sequence[Tensor], embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        anchors = torch.arange(embeddings.shape[1] - 1, device=embeddings.device)
        return [(logits, anchors) for logits in self.head(states[-1][:, :-1].to(embeddings.dtype))]


def make_head(lm: LanguageModel, config: MedusaTrainingConfig) -> MedusaHead:
    """Return new heads of the model's shape, with residual blocks initialised to the identity."""
    own = lm.model.config.get_text_config(decoder=True)
    head = MedusaHead(
        MedusaConfig(
            hidden_size=own.hidden_size,
            vocab_size=own.vocab_size,
            num_heads=config.steps,
            num_hidden_layers=config.head_layers,
            truncated_vocab_size=min(config.draft_vocab_size or own.vocab_size, own.vocab_size),
            target_num_hidden_layers=own.num_hidden_layers,
        )
    )
    for parameter in head.blocks.parameters():
        nn.init.zeros_(parameter)
    return head


def main(config: MedusaTrainingConfig) -> None:
    """Train heads and write them to `output_dir`/head."""
    train_head(config, lambda lm: MedusaModel(lm, make_head(lm, config), config.steps, config.step_decay))
