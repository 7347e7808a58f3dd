"""Target, activated LoRA and validity head as one module for training."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.logprob_head import NO_DOUBT
from parse_infer.judge.probe.head import Probe, ReducedLMHead, TokenDoubt, ValidityHead, surprise
from parse_infer.judge.probe.packing import probe_mask, probe_positions, readout_index
from parse_infer.models.architecture import decoder_layers, layer_windows, output_layer
from parse_infer.models.attention import enable_split_attention, layer_masks
from parse_train.judge.probe.activated_lora import ADAPTER, LoraOptions, attach_activated_lora
from parse_train.judge.probe.context_cache import ContextCache
from parse_train.judge.probe.draft_states import DraftStates, StateStore

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys

_NO_TOKEN = -1e4  # outside the draft; finite: logcumsumexp has no gradient for a row of -inf


class ValidityModel(nn.Module):
    """Scores prefixes of drafts. Only adapter and head receive gradients; without a probe, only the head.

    First, prompt and draft run without adapter and gradient, and fill a KV cache as the base target does at inference.
    Then the K·P probe tokens run with gradient against that cache. The adapter stays off on prompt and draft, so
    back-propagation through them would give the same gradients at a higher cost (`tools.step_cost`).

    The state dict holds adapter and head only: the target is frozen and identified by its name.

    Args:
        target: the target; wrapped in place if the probe has tokens.
        probe: the P probe tokens; none for a head with token doubt alone.
        head: the initialised read-out.
        end_ids: tokens that end an answer; hidden from a probe that closes the turn.
        lora: the activated LoRA; None: the defaults.
        state_store_gib: memory for draft states, which without a probe are equal in all epochs.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over all cuts of an optimiser step

    def __init__(
        self,
        target: PreTrainedModel,
        probe: Probe,
        head: ValidityHead,
        *,
        end_ids: Iterable[int] = (),
        lora: LoraOptions | None = None,
        state_store_gib: float = 0.0,
    ) -> None:
        super().__init__()
        enable_split_attention(target)
        self.windows = layer_windows(target)
        self.backbone_name = target.base_model_prefix
        self._output_layer = output_layer(target)  # the adapter does not change this layer
        vocabulary = None if head.tokens is None else head.tokens.vocabulary
        self._part = None if vocabulary is None else _reduced_lm_head(target, vocabulary)
        self.target: PreTrainedModel | PeftModel
        if probe.ids:
            self.target = attach_activated_lora(target, probe.ids, lora or LoraOptions())
        else:
            self.target = target.requires_grad_(False)
        self.head = copy.deepcopy(head).to(target.device)
        # DeepSpeed cannot broadcast a 0-d parameter; `exported_head` restores the shape of the bias.
        self.head.bias = nn.Parameter(head.bias.detach().reshape(1).to(target.device))
        self.probe = probe
        self.end_ids = sorted(end_ids)
        self.store = StateStore(int(state_store_gib * 2**30))
        self.adapter_dtype = torch.float32
        self.surprise_rows: int | None = None  # as in `surprise`
        self._recomputes = False
        self._adapted = (0, 0)
        self._register_state_dict_hook(drop_frozen)
        self.register_load_state_dict_post_hook(ignore_missing_frozen)

    @property
    def peft_model(self) -> PeftModel | None:
        """The wrapped target; None without a probe."""
        return self.target if isinstance(self.target, PeftModel) else None

    @property
    def base(self) -> PreTrainedModel:
        """The target without peft's wrapper. Its adapted layers add nothing outside `adapted`."""
        return cast(PreTrainedModel, self.target if self.peft_model is None else self.peft_model.get_base_model())

    @property
    def backbone(self) -> nn.Module:
        return getattr(self.base, self.backbone_name)

    def train(self, mode: bool = True) -> ValidityModel:
        """Set training mode for head and LoRA dropout only; the frozen target computes as at inference."""
        super().train(mode)
        self.target.eval()
        for name, module in self.target.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(self, input_ids: Tensor, visible: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        """Compute the logits of validity.

        Args:
            input_ids: int64 [B, T], prompt and draft, padded on the right.
            visible: int64 [B, K], number of tokens before each probe; 0 for padding.
            cuts: int64 [B, K], number of draft tokens before each probe.

        Returns:
            {"logits": float32 [B, K]}; arbitrary where `visible` is 0.
        """
        hidden: Tensor | None
        start, end = (visible - cuts)[:, :1], visible.amax(dim=1, keepdim=True)  # the first cut is never padding
        place = torch.arange(1, input_ids.shape[1], device=input_ids.device)
        drafted = (place >= start) & (place < end)  # [B, T - 1]
        if not self.probe.ids:
            stored = self._stored_states(input_ids, drafted, start, end)
            return {"logits": self._read_out(None, stored, input_ids, drafted, visible, cuts)}
        context, hidden = self._context_and_probes(input_ids, self._shown(input_ids, visible, cuts))
        states = self._states(context, input_ids, drafted) if self.head.tokens is not None else None
        return {"logits": self._read_out(hidden, states, input_ids, drafted, visible, cuts)}

    def _states(self, context: Tensor, input_ids: Tensor, drafted: Tensor) -> DraftStates:
        """Select states of `drafted` tokens (bool [B, T - 1], tokens 1 to T - 1) from hidden states [B, T, H]."""
        before, ids = context[:, :-1][drafted], input_ids[:, 1:][drafted]
        with torch.autocast(context.device.type, enabled=False):
            found = surprise(before, ids, self._output_layer, self._part, self.surprise_rows)
            if self.probe.ids:
                return DraftStates(before, found.features, torch.zeros_like(ids, dtype=torch.bool))
            return DraftStates(before, found.features, found.greedy_choices(before, ids, self._output_layer))

    def _stored_states(self, input_ids: Tensor, drafted: Tensor, starts: Tensor, ends: Tensor) -> DraftStates:
        """Return `_states` through the cache, which computes each draft once."""

        def compute(missing: list[int]) -> list[DraftStates]:
            width = int(ends[missing].max())
            ids, where = input_ids[missing, :width], drafted[missing, : width - 1]
            states = self._states(self.context_hidden(ids), ids, where)
            sizes = where.sum(1).tolist()
            return [DraftStates(*parts) for parts in zip(*(part.split(sizes) for part in states), strict=True)]

        rows = [row[:end] for row, end in zip(input_ids, ends[:, 0].tolist(), strict=True)]
        found = self.store(rows, starts[:, 0].tolist(), compute)
        return DraftStates(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _read_out(
        self,
        hidden: Tensor | None,
        states: DraftStates | None,
        input_ids: Tensor,
        drafted: Tensor,
        visible: Tensor,
        cuts: Tensor,
    ) -> Tensor:
        """Compute logits [B, K], in float32 as at inference."""
        with torch.autocast(input_ids.device.type, enabled=False):
            if states is None or self.head.tokens is None:
                return self.head(hidden)
            with torch.no_grad():
                embeddings = cast(nn.Embedding, self.base.get_input_embeddings()).weight
                written = embedding(input_ids[:, 1:][drafted], embeddings)
            each = self.head.tokens(states.before, written, states.surprise)
            each = each.masked_fill(states.certain, NO_DOUBT)  # as in `Verifier`
            doubt = each.new_full(drafted.shape, _NO_TOKEN).masked_scatter(drafted, each)
            return self.head(hidden, TokenDoubt.pool_over_prefixes(doubt, (visible - 1).where(cuts > 0, 0)))

    def _shown(self, input_ids: Tensor, visible: Tensor, cuts: Tensor) -> Tensor:
        """Return `visible`, minus 1 where the probe repeats the prefix's end token, as in `Verifier`."""
        if not self.probe.closes_turn:
            return visible
        last = input_ids.gather(1, (visible - 1).clamp_min(0))
        ends = torch.isin(last, torch.tensor(self.end_ids, dtype=torch.long, device=last.device))
        return visible - (ends & (cuts > 0)).long()

    @torch.no_grad()
    def context_hidden(self, input_ids: Tensor) -> Tensor:
        """Return final-norm hidden states [B, T, H] of the target without adapter."""
        return self._prefill(input_ids)[0]

    @torch.no_grad()
    def _prefill(self, input_ids: Tensor) -> tuple[Tensor, ContextCache]:
        cache = ContextCache()
        output = self.backbone(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return output.last_hidden_state, cache

    def _context_and_probes(self, input_ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states of context [B, T, H], and of the last token of each probe [B, K, H], which runs against
        the cache."""
        context, cache = self._prefill(input_ids)
        cache.fixed = self._recomputes
        (b, k), p, n_keys = visible.shape, len(self.probe.ids), input_ids.shape[1]
        self._adapted = b, k * p
        with self.adapted(*self._adapted):
            output = self.backbone(
                input_ids=torch.tensor(self.probe.ids, device=visible.device).repeat(b, k),
                position_ids=probe_positions(visible, p),
                attention_mask=layer_masks(self.windows, lambda window: probe_mask(visible, p, n_keys, window)),
                past_key_values=cache,
                use_cache=True,
            )
        return context, output.last_hidden_state[:, readout_index(k, p).to(visible.device)]

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: object = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Keep only the inputs of the target's layers for the backward pass, which runs each layer again.

        transformers' own checkpointing drops the cache of the context, which the probes read.
        """
        assert not (activation_checkpointing_kwargs or offload) and every_n_layers == 1  # `NOT_SUPPORTED`
        self._recomputes = True
        for layer in decoder_layers(self.base):
            forward = layer.forward
            layer.forward = partial(checkpoint, forward, use_reentrant=False, context_fn=lambda: self._contexts())

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a layer's forward, which is in `adapted` already, and of its second run."""
        return nullcontext(), self.adapted(*self._adapted)

    @contextmanager
    def adapted(self, rows: int, n: int) -> Iterator[None]:
        """Apply the LoRA to the last `n` tokens of each of the `rows` within the `with` block.

        peft's own way through its wrapper would also run the output layer on every token.
        """
        assert self.peft_model is not None
        hooks = cast(Any, self.peft_model.base_model)._enable_peft_forward_hooks(alora_offsets=[n] * rows)
        hooks.__enter__()
        try:
            yield
        finally:  # peft would leave its hooks after an exception, with which a checkpointed layer's second run ends
            hooks.__exit__(None, None, None)

    def exported(self, facts: ValidityConfig, train_problems: Collection[str] = ()) -> ValidityAdapter:
        """Return the adapter as trained, without threshold and metrics.

        Args:
            facts: what is known before the training: target, verbalizer, cut policy, label and provenance.
            train_problems: `prompt_hash` of every training prompt.
        """
        config = replace(
            facts,
            probe_ids=self.probe.ids,
            probe_text=self.probe.text,
            closes_turn=self.probe.closes_turn,
            token_rank=self.token_rank,
            surprise_vocab_size=self.surprise_vocab_size,
        )
        peft_config: dict[str, Any] = {}
        if self.peft_model is not None:
            peft_config = self.peft_model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
        tensors, learnt = self.adapter_tensors(), frozenset(train_problems)
        return ValidityAdapter(config, self.exported_head(), None, peft_config, tensors, learnt)

    def exported_head(self) -> ValidityHead:
        """Return the head for export: on the CPU, in float32."""
        state = {name: tensor.detach().cpu() for name, tensor in self.head.state_dict().items()}
        vocabulary = state.get("tokens.vocabulary")
        head = ValidityHead(self.head.hidden_size, self.token_rank, vocabulary, probe=bool(self.probe.ids))
        head.load_state_dict(state | {"bias": state["bias"].reshape(())})
        return head

    @property
    def token_rank(self) -> int:
        return 0 if self.head.tokens is None else self.head.tokens.expected.out_features

    @property
    def surprise_vocab_size(self) -> int:
        return 0 if self._part is None else len(self._part.tokens)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by peft's names, on the CPU in `adapter_dtype`; empty without a probe."""
        state = {} if self.peft_model is None else get_peft_model_state_dict(self.peft_model)
        return {name: tensor.detach().to("cpu", self.adapter_dtype).contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def round_adapter(self, dtype: torch.dtype) -> None:
        """Round the adapter's weights to values of `dtype`, and export the adapter in `dtype`."""
        self.adapter_dtype = dtype
        if self.peft_model is not None:
            for parameter in self.peft_model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.to(dtype))


def _reduced_lm_head(target: PreTrainedModel, tokens: Tensor) -> ReducedLMHead:
    """Return the output layer for `tokens`; its copied rows keep their dtype when DeepSpeed casts the target."""
    part, dtype = ReducedLMHead.of(target, tokens.to(target.device)), target.get_output_embeddings().weight.dtype
    return ReducedLMHead(part.tokens, lambda hidden: part.logits(hidden.to(dtype)))


def drop_frozen(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Hook of a state dict that leaves frozen parameters out."""
    kept = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in kept]:
        del state[name]


def ignore_missing_frozen(module: nn.Module, incompatible: _IncompatibleKeys) -> None:
    """Hook of loading a state dict of `drop_frozen`."""
    needed = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in needed]
