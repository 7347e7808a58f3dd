"""Target, activated LoRA and validity head as one module for training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import DynamicCache, PreTrainedModel

from parse_infer.judge.head import Probe, ReducedLMHead, TokenDoubt, ValidityHead, surprise
from parse_infer.judge.packing import probe_mask, probe_positions, readout_index
from parse_infer.models.architecture import layer_windows, output_layer
from parse_infer.models.attention import enable_split_attention, layer_masks
from parse_train.validity.draft_states import DraftStates, StateStore
from parse_train.validity.trailing_lora import TrailingLora, attach_trailing_lora

_NO_DOUBT = -1e4  # finite: the gradient of logcumsumexp has no answer for a row of -inf


class ValidityModel(nn.Module):
    """Scores prefixes of drafts; gradient reaches the adapter and the head only (without a probe the head alone).

    Prompt and draft run first, with the adapter off and without gradient, and leave keys and values in a cache: the
    same ones the base target leaves at inference. Then the K·P probe tokens run with gradient against that cache.
    With `backprop_context`, one packed pass carries gradient through every token instead; the adapter is off on prompt
    and draft all the same, so the gradients are equal and only the cost differs.

    The state dict holds adapter and head only: the target is frozen and identified by its name.

    Args:
        target: the target; wrapped in place, unless there is no probe to adapt.
        probe: its P tokens; none for a head that has token doubt alone.
        head: the read-out, as initialised.
        end_ids: tokens that end an answer; not shown to a probe that closes the turn itself.
        lora_rank, lora_alpha, lora_dropout, lora_target_modules: the activated LoRA (peft).
        state_store_gib: without a probe the target says the same of a draft in every epoch; so much of it is kept.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over all cuts of an optimiser step

    def __init__(
        self,
        target: PreTrainedModel,
        probe: Probe,
        head: ValidityHead,
        *,
        end_ids: Iterable[int] = (),
        lora_rank: int = 16,
        lora_alpha: int = 32,
        lora_dropout: float = 0.0,
        lora_target_modules: Sequence[str] = ("all-linear",),
        backprop_context: bool = False,
        state_store_gib: float = 0.0,
    ) -> None:
        super().__init__()
        enable_split_attention(target)
        self.windows = layer_windows(target)
        self.backbone_name = target.base_model_prefix
        self._output_layer = output_layer(target)  # the adapter leaves it as it is
        vocabulary = None if head.tokens is None else head.tokens.vocabulary
        self._part = None if vocabulary is None else _part_of_vocabulary(target, vocabulary)
        self.target: PreTrainedModel | PeftModel
        if probe.ids:
            self.target, self._lora = attach_trailing_lora(
                target,
                probe.ids,
                rank=lora_rank,
                alpha=lora_alpha,
                dropout=lora_dropout,
                target_modules=lora_target_modules,
            )
        else:
            self.target, self._lora = target.requires_grad_(False), TrailingLora()
        self.head = copy.deepcopy(head).to(target.device)
        # DeepSpeed cannot broadcast a parameter without dimensions; `exported_head` gives the bias its shape back.
        self.head.bias = nn.Parameter(head.bias.detach().reshape(1).to(target.device))
        self.probe = probe
        self.end_ids = sorted(end_ids)
        self.backprop_context = backprop_context
        self.store = StateStore(int(state_store_gib * 2**30))
        self.adapter_dtype = torch.float32
        self._register_state_dict_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(_forgive_frozen)

    @property
    def peft_model(self) -> PeftModel | None:
        """The wrapped target; None without a probe."""
        return self.target if isinstance(self.target, PeftModel) else None

    @property
    def base(self) -> PreTrainedModel:
        """The target itself, with adapted layers inside; they add nothing unless told to."""
        return cast(PreTrainedModel, self.target if self.peft_model is None else self.peft_model.get_base_model())

    @property
    def backbone(self) -> nn.Module:
        return getattr(self.base, self.backbone_name)

    def train(self, mode: bool = True) -> ValidityModel:
        """Training mode for the adapter's dropout only: the frozen target computes what it computes at inference."""
        super().train(mode)
        self.target.eval()
        for name, module in self.target.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(self, input_ids: Tensor, visible: Tensor, cuts: Tensor) -> dict[str, Tensor]:
        """Logits of validity.

        Args:
            input_ids: int64 [B, T], prompt and draft, padded on the right.
            visible: int64 [B, K], tokens in front of each probe; 0 for padding.
            cuts: int64 [B, K], the same counted from the start of the draft.

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
        if self.backprop_context:
            context, hidden = self._packed(input_ids, self._shown(self.probe, input_ids, visible, cuts))
        else:
            context, cache = self._prefill(input_ids)
            hidden = self._probe(cache, self._shown(self.probe, input_ids, visible, cuts), self.probe, adapter=True)
        states = self._states(context, input_ids, drafted) if self.head.tokens is not None else None
        return {"logits": self._read_out(hidden, states, input_ids, drafted, visible, cuts)}

    def _states(self, context: Tensor, input_ids: Tensor, drafted: Tensor) -> DraftStates:
        """Of the `drafted` tokens (bool [B, T - 1], for tokens 1 to T - 1), from hidden states [B, T, H]."""
        before, ids = context[:, :-1][drafted], input_ids[:, 1:][drafted]
        with torch.autocast(context.device.type, enabled=False):
            return DraftStates(before, surprise(before, ids, self._output_layer, self._part).features)

    def _stored_states(self, input_ids: Tensor, drafted: Tensor, starts: Tensor, ends: Tensor) -> DraftStates:
        """The same, each draft's computed when it is first seen."""

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
        """Logits [B, K], in float32 as at inference."""
        with torch.autocast(input_ids.device.type, enabled=False):
            if states is None or self.head.tokens is None:
                return self.head(hidden)
            with torch.no_grad():
                embeddings = cast(nn.Embedding, self.base.get_input_embeddings()).weight
                written = embedding(input_ids[:, 1:][drafted], embeddings)
            each = self.head.tokens(states.before, written, states.surprise)
            doubt = each.new_full(drafted.shape, _NO_DOUBT).masked_scatter(drafted, each)
            return self.head(hidden, TokenDoubt.pool_over_prefixes(doubt, visible - 1) * (cuts > 0))

    @torch.no_grad()
    def judge(self, input_ids: Tensor, visible: Tensor, cuts: Tensor, probe: Probe, head: nn.Module) -> Tensor:
        """Logits [B, K] of the target alone with another probe and head: the zero-shot judge."""
        shown = self._shown(probe, input_ids, visible, cuts)
        hidden = self._probe(self._prefill(input_ids)[1], shown, probe, adapter=False)
        with torch.autocast(hidden.device.type, enabled=False):
            return head(hidden)

    def _shown(self, probe: Probe, input_ids: Tensor, visible: Tensor, cuts: Tensor) -> Tensor:
        """`visible`, less one where the prefix ends with an end token that the probe repeats, as in `Verifier`."""
        if not probe.closes_turn:
            return visible
        last = input_ids.gather(1, (visible - 1).clamp_min(0))
        ends = torch.isin(last, torch.tensor(self.end_ids, dtype=torch.long, device=last.device))
        return visible - (ends & (cuts > 0)).long()

    @torch.no_grad()
    def context_hidden(self, input_ids: Tensor) -> Tensor:
        """Final-norm hidden states [B, T, H] of the target alone."""
        return self._prefill(input_ids)[0]

    @torch.no_grad()
    def _prefill(self, input_ids: Tensor) -> tuple[Tensor, DynamicCache]:
        cache = DynamicCache()  # every layer keeps every token, as at inference: windows come from the masks
        output = self.backbone(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return output.last_hidden_state, cache

    def _probe(self, cache: DynamicCache, visible: Tensor, probe: Probe, adapter: bool) -> Tensor:
        """Hidden states [B, K, H] at the last token of each probe; the probes follow what is in the cache."""
        (b, k), p, n_keys = visible.shape, len(probe.ids), cache.get_seq_length()
        with self._lora.on(k * p if adapter else 0):
            output = self.backbone(
                input_ids=torch.tensor(probe.ids, device=visible.device).repeat(b, k),
                position_ids=probe_positions(visible, p),
                attention_mask=layer_masks(self.windows, lambda window: probe_mask(visible, p, n_keys, window)),
                past_key_values=cache,
                use_cache=True,
            )
        return output.last_hidden_state[:, readout_index(k, p).to(visible.device)]

    def _packed(self, input_ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """The same in one pass over prompt, draft and probes."""
        (b, k), p, n_keys = visible.shape, len(self.probe.ids), input_ids.shape[1]
        context = torch.arange(n_keys, device=input_ids.device).expand(b, -1)
        probes = torch.tensor(self.probe.ids, device=visible.device).repeat(b, k)
        with self._lora.on(k * p):
            output = self.backbone(
                input_ids=torch.cat([input_ids, probes], dim=1),
                position_ids=torch.cat([context, probe_positions(visible, p)], dim=1),
                attention_mask=layer_masks(self.windows, lambda window: probe_mask(visible, p, n_keys, window)),
                use_cache=False,
            )
        hidden = output.last_hidden_state
        return hidden[:, :n_keys], hidden[:, n_keys + readout_index(k, p).to(visible.device)]

    def exported_head(self) -> ValidityHead:
        """The head as it is saved: on the CPU, in float32."""
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
        """The adapter's tensors under peft's own names, on the CPU in `adapter_dtype`; none without a probe."""
        state = {} if self.peft_model is None else get_peft_model_state_dict(self.peft_model)
        return {name: tensor.detach().to("cpu", self.adapter_dtype).contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def round_adapter(self, dtype: torch.dtype) -> None:
        """Give the adapter's weights the values that `dtype` can hold; it is exported in that from now on."""
        self.adapter_dtype = dtype
        if self.peft_model is not None:
            for parameter in self.peft_model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.to(dtype))


def _part_of_vocabulary(target: PreTrainedModel, tokens: Tensor) -> ReducedLMHead:
    """The output layer for `tokens`, whose copied rows keep their number type when DeepSpeed casts the target."""
    part, dtype = ReducedLMHead.of(target, tokens.to(target.device)), target.get_output_embeddings().weight.dtype
    return ReducedLMHead(part.tokens, lambda hidden: part.logits(hidden.to(dtype)))


def _drop_frozen(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    kept = {prefix + name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in kept]:
        del state[name]


def _forgive_frozen(module: nn.Module, incompatible: Any) -> None:
    needed = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in needed]
