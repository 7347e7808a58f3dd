"""Train EAGLE-3 and P-EAGLE heads: `accelerate launch recipes/eagle3.yaml` or `recipes/parallel.yaml`.

EAGLE-3: "training-time test" (arXiv 2503.01840): the head is run on its own output, `steps` times, as it will be when
it drafts. P-EAGLE (arXiv 2602.01469; ParallelSpec's training in groups, arXiv 2410.05589, on EAGLE-3's features): all
depths of a block in one forward, deeper ones at a shrinking share of the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from parse_infer.models.loading import LanguageModel
from parse_infer.speculation.eagle_head import EagleConfig, EagleHead
from parse_train.heads.training import HeadModel, HeadTrainingConfig, check_share, train_head


@dataclass
class EagleTrainingConfig(HeadTrainingConfig):
    """Fields of EAGLE heads."""

    parallel: bool = field(default=False, metadata={"help": "P-EAGLE: a block in one forward."})
    depth_share: float = field(default=0.8, metadata={"help": "P-EAGLE: places kept at each further depth."})
    feature_layers: list[int] | None = field(
        default=None, metadata={"help": "Where features are taken; by default layers 2, n/2 and n-3 as in EAGLE-3."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Of the head's MLP; the model's by default."}
    )
    num_attention_heads: int | None = field(
        default=None, metadata={"help": "Of the head's attention; the model's by default."}
    )
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "Of the head's attention; the model's by default."}
    )
    ptd_token: str | None = field(
        default=None, metadata={"help": "P-EAGLE: token that fills the places ahead; by default the padding token."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("depth_share", self.depth_share)


class EagleModel(HeadModel):
    """Guesses of an EAGLE head where it will be asked for them. `depth_share` is for a parallel head."""

    def __init__(
        self, lm: LanguageModel, head: EagleHead, steps: int, step_decay: float, depth_share: float = 1.0
    ) -> None:
        super().__init__(lm, head, steps, step_decay)
        self.depth_share = depth_share

    def guesses(self, states: Sequence[Tensor], embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        features = torch.cat([states[i] for i in self.head.config.eagle_aux_hidden_state_layer_ids], dim=-1)
        features = features.to(embeddings.dtype)
        return (self._block if self.head.config.parallel_drafting else self._unroll)(features, embeddings)

    def _unroll(self, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """EAGLE-3's training-time test.

        At step k, place i stands for draft token k behind a context that ends at i - k: it sees the true features up
        to there, and the head's own k later ones.
        """
        t = features.shape[1] - 1
        device = features.device
        hidden, following = self.head.fc(features[:, :-1]), embeddings[:, 1:]
        positions = torch.arange(t, device=device)
        rows, columns = positions[:, None], positions[None, :]
        past: tuple[Tensor, Tensor] | None = None
        results = []
        for step in range(self.steps):
            # Keys of step m stand at every place; place i at this step sees those of its own draft: i - (step - m).
            blocks = [columns <= rows - step] + [columns == rows - (step - m) for m in range(1, step + 1)]
            mask = torch.cat(blocks, dim=1)
            mask[:step, 0] = True  # places without a draft that long: anything, they do not count
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
        """P-EAGLE: all depths in one forward, deeper ones at fewer anchors."""
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
        weight = cast(Tensor, self._frozen[0].model.get_input_embeddings().weight).detach()
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
    """A fresh head of the model's shape. Raises ValueError for what does not fit the model."""
    own = lm.model.config.get_text_config(decoder=True)
    n, heads = own.num_hidden_layers, own.num_attention_heads
    rope = getattr(own, "rope_parameters", None) or {}
    layers = config.feature_layers or sorted({min(2, n - 1), n // 2, max(n - 3, 0)})
    for layer in layers:
        if not 0 <= layer <= n:
            raise ValueError(f"feature_layers has {layer}; {lm.name!r} has features 0 to {n}")
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
        raise ValueError(f"ptd_token is {name!r}, which is no token of {lm.name!r}")
    return int(lm.tokenizer.get_vocab()[name])


def main(config: EagleTrainingConfig) -> None:
    """Train a head and write it to `output_dir`/head."""
    train_head(
        config,
        lambda lm: EagleModel(lm, make_head(lm, config), config.steps, config.step_decay, config.depth_share),
    )
