"""Train EAGLE-3 and P-EAGLE heads: `accelerate launch recipes/eagle3.yaml` or `recipes/parallel.yaml`.

EAGLE-3 (arXiv 2503.01840) trains with a "training-time test": the head runs on its own output, `steps` times, as at
inference. P-EAGLE (arXiv 2602.01469) applies ParallelSpec's training in groups (arXiv 2410.05589) to EAGLE-3's
features: one forward covers all depths of a block, and each deeper depth keeps a smaller share of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from parse_infer.errors import ParseError
from parse_infer.models.architecture import embedding_weight
from parse_infer.models.loading import LanguageModel
from parse_infer.token_drafters.eagle_head import EagleConfig, EagleHead
from parse_train.heads.training import HeadModel, HeadTrainingConfig, check_head_share, train_head


@dataclass
class EagleTrainingConfig(HeadTrainingConfig):
    """Fields of EAGLE heads."""

    kind: ClassVar[str] = "eagle"

    parallel: bool = field(default=False, metadata={"help": "P-EAGLE: propose a block in one forward."})
    depth_share: float = field(default=0.8, metadata={"help": "P-EAGLE: share of positions kept per further depth."})
    feature_layers: list[int] | None = field(
        default=None, metadata={"help": "Layers of the features; default: 2, n/2 and n-3 as in EAGLE-3."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Inner size of the head's MLP; default: as in the model."}
    )
    num_attention_heads: int | None = field(
        default=None, metadata={"help": "Attention heads of the head; default: as in the model."}
    )
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "Key-value heads of the head; default: as in the model."}
    )
    ptd_token: str | None = field(
        default=None, metadata={"help": "P-EAGLE: placeholder of the tokens ahead; default: the padding token."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_share("depth_share", self.depth_share)


class EagleModel(HeadModel):
    """Trains an EAGLE head on the positions and depths of inference. `depth_share` applies to a parallel head."""

    head: EagleHead

    def __init__(
        self, lm: LanguageModel, head: EagleHead, steps: int, step_decay: float, depth_share: float = 1.0
    ) -> None:
        super().__init__(lm, head, steps, step_decay)
        self.depth_share = depth_share

    def propose(self, states: Sequence[Tensor], embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        features = torch.cat([states[i] for i in self.head.config.eagle_aux_hidden_state_layer_ids], dim=-1)
        features = features.to(embeddings.dtype)
        return (self._block if self.head.config.parallel_drafting else self._unroll)(features, embeddings)

    def _unroll(self, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Run EAGLE-3's training-time test.

        At step k, position i is draft token k after a context that ends at i - k. It attends to the model's features
        up to i - k, and to the head's own features at the k later positions.
        """
        t = features.shape[1] - 1
        device = features.device
        hidden, following = self.head.fc(features[:, :-1]), embeddings[:, 1:]
        positions = torch.arange(t, device=device)
        rows, columns = positions[:, None], positions[None, :]
        past: tuple[Tensor, Tensor] | None = None
        results = []
        for step in range(self.steps):
            # Step m has keys at every position; position i of this step sees the key of its draft, i - (step - m).
            blocks = [columns <= rows - step] + [columns == rows - (step - m) for m in range(1, step + 1)]
            mask = torch.cat(blocks, dim=1)
            mask[:step, 0] = True  # positions without a draft of this length do not count; avoid empty rows
            output, past = self.head(
                hidden,
                following,
                positions.expand(len(hidden), -1),
                mask[None, None].expand(len(hidden), 1, -1, -1),
                past,
            )
            results.append((self.head.logits(output[:, step:]), positions[: t - step]))
            hidden = torch.cat([output[:, :1], output[:, :-1]], dim=1)
        return results

    def _block(self, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Run P-EAGLE: all depths in one forward, deeper depths at fewer anchors."""
        b, t = features.shape[0], features.shape[1] - 1
        device = features.device
        kept = [torch.arange(t, device=device)]
        for _ in range(1, self.steps):
            share = max(1, round(len(kept[-1]) * (self.depth_share if self.training else 1.0)))
            chosen = torch.randperm(len(kept[-1]), device=device)[:share].sort().values
            kept.append(kept[-1][chosen])
        places = torch.cat(kept)
        depth = torch.cat([torch.full_like(k, d) for d, k in enumerate(kept)])
        ahead = len(places) - t
        weight = embedding_weight(self._frozen[0].model).detach()
        mask_token = weight[self.head.config.ptd_token_id or 0].to(embeddings.dtype).expand(b, ahead, -1)
        mask_hidden = self.head.mask_hidden.expand(b, ahead, -1)
        hidden = self.head.fc(torch.cat([features[:, :-1], mask_hidden], dim=1))
        following = torch.cat([embeddings[:, 1:], mask_token], dim=1)
        same = places[:, None] == places[None, :]
        real = depth[None, :] == 0
        mask = (real & (places[None, :] <= places[:, None])) | (same & (depth[None, :] <= depth[:, None]))
        output, _ = self.head(hidden, following, (places + depth).expand(b, -1), mask[None, None].expand(b, 1, -1, -1))
        split = self.head.logits(output).split([len(k) for k in kept], dim=1)
        return list(zip(split, kept, strict=True))


def make_head(lm: LanguageModel, config: EagleTrainingConfig) -> EagleHead:
    """Return a new head of the model's shape; raise ValueError for settings that do not fit the model."""
    own = lm.model.config.get_text_config(decoder=True)
    n, heads = own.num_hidden_layers, own.num_attention_heads
    rope = getattr(own, "rope_parameters", None) or {}
    layers = config.feature_layers or sorted({min(2, n - 1), n // 2, max(n - 3, 0)})
    for layer in layers:
        if not 0 <= layer <= n:
            raise ParseError(f"feature_layers has {layer}; {lm.name!r} has features 0 to {n}")
    shape = EagleConfig(
        hidden_size=own.hidden_size,
        intermediate_size=config.intermediate_size or own.intermediate_size,
        num_attention_heads=config.num_attention_heads or heads,
        num_key_value_heads=config.num_key_value_heads or getattr(own, "num_key_value_heads", heads),
        head_dim=getattr(own, "head_dim", None) or own.hidden_size // heads,
        vocab_size=own.vocab_size,
        draft_vocab_size=min(config.draft_vocab_size or own.vocab_size, own.vocab_size),
        eagle_aux_hidden_state_layer_ids=tuple(layers),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=lm.window,
        parallel_drafting=config.parallel,
        ptd_token_id=_mask_token(lm, config.ptd_token) if config.parallel else None,
        target_num_hidden_layers=n,
    )
    return EagleHead(shape)


def _mask_token(lm: LanguageModel, name: str | None) -> int:
    if name is None:
        return lm.tokenizer.pad_token_id or 0
    if name not in lm.tokenizer.get_vocab():
        raise ParseError(f"ptd_token is {name!r}, but {lm.name!r} has no such token")
    return int(lm.tokenizer.get_vocab()[name])


def main(config: EagleTrainingConfig) -> None:
    """Train a head and write it to `output_dir`/head."""
    train_head(
        config,
        lambda lm: EagleModel(lm, make_head(lm, config), config.steps, config.step_decay, config.depth_share),
    )
