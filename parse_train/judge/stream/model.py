"""Target, LoRA of the second stream and head as one module for training; without a second stream no LoRA."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.packing import probe_mask, probe_positions
from parse_infer.judge.stream.head import StreamHead
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.models.architecture import decoder_layers, layer_windows
from parse_infer.models.attention import enable_split_attention, layer_masks
from parse_train.judge.logprob.model import TokenModel
from parse_train.judge.stream.context_cache import ContextCache
from parse_train.judge.stream.lora import ADAPTER, LoraOptions, attach_lora

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys


class StreamModel(TokenModel):
    """Scores prefixes of drafts from stored log-probabilities and hidden states. Only LoRA and correction learn.

    The prompt runs without LoRA and gradient, and fills a KV cache. Then the draft runs with both against that cache:
    the layout of one probe whose tokens are the draft. The state dict holds neither target nor trunk.

    Args:
        target: wrapped in place.
        head: the initialised head.
        texts: the target's tokens.
        lora: None: the defaults. Without a second stream it is not used.
        noise, certain_share, dropout: see `StreamTrainingConfig`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        head: StreamHead,
        texts: TokenTexts,
        lora: LoraOptions | None = None,
        *,
        noise: float = 0.0,
        certain_share: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(texts, noise, certain_share)
        self.head = head.to(target.device)
        self._trunk = copy.deepcopy(head.trunk.state_dict())  # DeepSpeed rounds the module's own weights
        enable_split_attention(target)
        self.windows = layer_windows(target)
        second = head.stream.second
        self.target: PreTrainedModel | PeftModel = (
            attach_lora(target, lora or LoraOptions()) if second else target.requires_grad_(False)
        )
        self._adapted = [layer for layer in target.modules() if isinstance(layer, LoraLayer)]
        self.backbone_name, self.dropout = target.base_model_prefix, dropout
        self.adapter_dtype = torch.float32
        self._register_state_dict_hook(drop_frozen)
        self.register_load_state_dict_post_hook(ignore_missing_frozen)

    @property
    def base(self) -> PreTrainedModel:
        """The target without peft's wrapper."""
        target = self.target
        return cast(PreTrainedModel, target.get_base_model() if isinstance(target, PeftModel) else target)

    def train(self, mode: bool = True) -> StreamModel:
        """Set training mode for the correction and LoRA dropout only."""
        super().train(mode)
        self.head.trunk.eval()
        self.target.eval()
        for name, module in self.target.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(
        self, own: Tensor, top: Tensor, ids: Tensor, first: Tensor, cuts: Tensor, context: Tensor, visible: Tensor
    ) -> dict[str, Tensor]:
        """Compute the logits of validity.

        Args:
            own, top, ids, first, cuts: as of `features` and `pooled`.
            context: int64 [B, N], the prompts, padded on the right.
            visible: int64 [B, 1], their lengths.
        """
        doubt, hidden, where = self.head.doubted(self.features(own, top, ids, first), ids, first, self.texts)
        # Other rows, and tokens behind the last doubted one, need no states; padding equals its first choice. One row
        # is always read, since every process of a distributed run must use all trained weights.
        rows = where.any(-1).nonzero()[:, 0]
        rows = rows if len(rows) else rows.new_zeros(1)
        columns = where.any(0).nonzero()
        n, n_keys = int(columns.max()) + 1 if len(columns) else 1, int(visible[rows].max())
        states = self.states(context[rows, :n_keys], visible[rows], ids[rows, :n])
        each = doubt.clone()
        each[rows, :n] = self.head.correct(doubt[rows, :n], hidden[rows, :n], states, where[rows, :n], self.dropout)
        return self.pooled(each, ids == first, cuts, self.head)

    def states(self, context: Tensor, visible: Tensor, ids: Tensor) -> Tensor:
        """Return the states that the correction reads, [B, T, S, H]."""
        backbone, n_keys, n = getattr(self.base, self.backbone_name), context.shape[1], ids.shape[1]
        cache = ContextCache()
        with torch.no_grad(), self.without_lora():
            backbone(input_ids=context, past_key_values=cache, use_cache=True)
        cache.fixed = True
        read = partial(
            backbone,
            input_ids=ids,
            position_ids=probe_positions(visible, n),
            attention_mask=layer_masks(self.windows, lambda window: probe_mask(visible, n, n_keys, window)),
            past_key_values=cache,
            use_cache=True,
        )
        states: list[Tensor] = []
        if self.head.stream.layers:
            with torch.no_grad(), self.without_lora():
                inner = read(output_hidden_states=True).hidden_states
            states += [inner[layer] for layer in self.head.stream.layers]
        if self.head.stream.second:
            states.append(read().last_hidden_state)
        return torch.stack(states, dim=-2)

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Switch the LoRA off within the `with` block. peft's own switch would also freeze its weights."""
        for layer in self._adapted:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._adapted:
                layer._disable_adapters = False

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: object = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Keep only the inputs of the target's layers for the backward pass, which runs each layer again.

        transformers' own checkpointing drops the cache of the prompt, which the stream reads.
        """
        assert not (activation_checkpointing_kwargs or offload) and every_n_layers == 1  # `NOT_SUPPORTED`
        for layer in decoder_layers(self.base):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def exported(self, facts: ValidityConfig, train_problems: Collection[str] = ()) -> ValidityAdapter:
        """Return the adapter as trained, without threshold and metrics; `facts` holds how the data was read."""
        head = copy.deepcopy(self.head).cpu().float()
        assert facts.logprobs is not None and facts.stream is not None
        config = replace(
            facts,
            logprobs={"head": asdict(head.config), **facts.logprobs},
            stream={"head": asdict(head.stream), **facts.stream},
        )
        peft_config: dict[str, Any] = {}
        if isinstance(self.target, PeftModel):
            peft_config = self.target.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
        learnt = frozenset(train_problems)
        return ValidityAdapter(config, head, None, peft_config, self.adapter_tensors(), learnt)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the LoRA's tensors by peft's names, on the CPU in `adapter_dtype`; none without a second stream."""
        if not isinstance(self.target, PeftModel):
            return {}
        state = get_peft_model_state_dict(self.target)
        return {name: tensor.detach().to("cpu", self.adapter_dtype).contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def round_adapter(self, dtype: torch.dtype) -> None:
        """Round the LoRA's weights to values of `dtype`, and export them in `dtype`. The trunk gets its exact weights
        back."""
        self.adapter_dtype = dtype
        self.head.trunk.float().load_state_dict(self._trunk)
        for parameter in self.target.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(dtype))


def drop_frozen(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Hook of a state dict that leaves frozen parameters out."""
    kept = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in kept]:
        del state[name]


def ignore_missing_frozen(module: nn.Module, incompatible: _IncompatibleKeys) -> None:
    """Hook of loading a state dict of `drop_frozen`."""
    needed = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in needed]
