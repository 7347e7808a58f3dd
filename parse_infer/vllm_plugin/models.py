"""vLLM models with a judge: one class per architecture, all from `ValidityMixin`.

A request whose prompt ends with the ids of `ProbeIds` gets validities instead of a next token. In a step with such
ids, the adapter's update applies to their rows. A reference to the judge's output replaces the hidden state of such a
prompt's last token. All other rows and steps run the base class unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import vllm
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, pad
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from parse_infer.errors import ServerError
from parse_infer.judge.adapter import ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import AdapterFiles, read_adapter
from parse_infer.judge.head import ReducedLMHead, ValidityHead
from parse_infer.models.fingerprint import describe_config, fingerprint_of, fingerprinted
from parse_infer.vllm_plugin.compatibility import check_version
from parse_infer.vllm_plugin.options import SETTINGS
from parse_infer.vllm_plugin.probe_ids import ProbeIds, answer_ids
from parse_infer.vllm_plugin.row_update import RowUpdate
from parse_infer.vllm_plugin.token_doubt import SlotStates

check_version(vllm.__version__)

_MARK = 4096.0  # first entry of a row that refers to a judge output; exact in every dtype
_BASE = 256  # base of the output's number in the next two entries; every dtype holds integers up to 256 exactly


class _Judge:
    """The adapter in this server. Not an nn.Module: vLLM would look for its weights in the target's files.

    Attributes:
        files: the adapter's files; dropped after loading.
        shape: the target in transformers' layer names, without weights; dropped after loading.
    """

    def __init__(self, settings: dict[str, Any], config: Any) -> None:
        self.name: str = settings["adapter"]
        self.files: AdapterFiles | None = read_adapter(self.name)
        self.config = ValidityConfig.from_dict(self.files.validity_config)
        self.target = describe_config(config, "the server's target")
        check_target(self.name, self.config.target, self.target)
        head = read_head(self.name, self.config, self.files.head)
        assert isinstance(head, ValidityHead)  # `engine_options` refuses others
        self.head = head
        self.ids = ProbeIds.of(self.config, settings["end_ids"])
        self.answers = answer_ids(settings["end_ids"], self.ids.together)
        self.update = RowUpdate()
        self.states: SlotStates | None = None
        self.part: ReducedLMHead | None = None
        with torch.device("meta"):
            self.shape: PreTrainedModel | None = AutoModelForCausalLM.from_config(config)


class ValidityMixin:
    """Mixin before a `…ForCausalLM` of vLLM, with settings from the model's configuration (`engine_options`)."""

    # Attributes of the base class.
    model: Any
    lm_head: Any
    logits_processor: Any
    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        settings = getattr(config, SETTINGS)
        extra = config.vocab_size - settings["vocab_size"]
        with _own_vocabulary(config, settings["vocab_size"]):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
            self._judge = _Judge(settings, config)
        self._extra_ids = extra
        self._cache_config = vllm_config.cache_config
        self._told: Tensor | None = None  # output of `_answer` for the prompts that end in this step
        self._embed = _with_probe_ids(self.model.embed_tokens, self._judge.ids)
        self._attention: str = self.model.layers[0].self_attn.attn.layer_name

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the target's weights; raise ValueError if the adapter was trained on other weights."""
        judge = self._judge
        if judge.files is None or judge.shape is None:
            raise ServerError(
                "an adapter works only with the weights it was trained on: start another server for other weights"
            )
        sampled: dict[str, Tensor | None] = dict.fromkeys(fingerprinted(judge.shape))

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in sampled:
                    sampled[name] = tensor
                yield name, tensor

        loaded = super().load_weights(watched())  # type: ignore[misc]
        found = judge.target | {"fingerprint": fingerprint_of(sampled.values())}
        check_target(judge.name, judge.config.target, found)
        judge.head.to(self.lm_head.weight.device)
        if judge.config.probe_ids:
            judge.update.patch(cast(nn.Module, self), judge.files, judge.shape, self.packed_modules_mapping)
        tokens = judge.head.tokens
        if tokens is not None and tokens.vocabulary is not None:
            rows = _output_rows(self.lm_head, tokens.vocabulary)
            judge.part = ReducedLMHead(tokens.vocabulary, lambda x: linear(x, rows) * self.logits_processor.scale)
        judge.files = judge.shape = None
        return loaded

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        judge, context = self._judge, get_forward_context()
        step = context.attn_metadata and context.attn_metadata[self._attention]  # None: profiling or warm-up run
        probed = None
        if step and input_ids is not None:
            # The rest of the buffer is padding and stale ids.
            found = (input_ids[: step.num_actual_tokens] >= judge.ids.vocab_size).nonzero()[:, 0]
            probed = found if len(found) else None
        if probed is not None and judge.config.probe_ids:
            context.skip_compiled = True  # the compiled graph was traced without the update
            judge.update.rows = probed
        try:
            output = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]
        finally:
            judge.update.rows = None
        if step and input_ids is not None:
            hidden = output[0] if isinstance(output, tuple) else output  # a tuple also has an EAGLE-3 head's states
            self._note(step, input_ids, hidden)
            self._told = None if probed is None else self._answer(step, input_ids, positions, hidden, probed)
        return output

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[n, H] -> [n, V + number of probe ids]; the probe ids get -inf, so the target never generates them."""
        logits = pad(self._base_logits(hidden_states), (0, self._extra_ids), value=-torch.inf)
        if self._told is not None:
            refers = (hidden_states[:, 0] == _MARK) & (hidden_states[:, 3:] == 0).all(-1)
            rows = refers.nonzero()[:, 0]
            number = (hidden_states[rows, 1].float() * _BASE + hidden_states[rows, 2].float()).long()
            told = self._told[number]  # [n, most, 2]
            logits = logits.float()
            logits[rows] = -torch.inf
            answers = torch.tensor(self._judge.answers, device=logits.device)[: told.shape[1]].flatten()
            logits[rows[:, None], answers] = told.flatten(1)
        return logits

    def _base_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden)  # type: ignore[misc]

    def _note(self, step: Any, ids: Tensor, hidden: Tensor) -> None:
        """Store this step's states for token doubt in later steps."""
        judge, n = self._judge, step.num_actual_tokens
        if judge.head.tokens is None:
            return
        if judge.states is None:  # the cache size is known only now
            slots = self._cache_config.num_gpu_blocks * self._cache_config.block_size
            judge.states = SlotStates(
                judge.head.tokens, slots, hidden, self._base_logits, self._embed, judge.part, judge.ids.vocab_size
            )
        judge.states.write(step.slot_mapping[:n].long(), ids[:n].long(), hidden[:n])

    def _answer(self, step: Any, ids: Tensor, positions: Tensor, hidden: Tensor, probed: Tensor) -> Tensor | None:
        """Judge the n prompts that end in this step, if any, and make their last hidden states refer to the result.

        Returns log-probabilities of both answers for each of a prompt's K prefixes, float32 [n, most, 2], padded with
        -inf. The later softmax over all of them subtracts log K.
        """
        judge = self._judge
        rows = probed[ids[probed] >= judge.ids.closing]
        if judge.states is not None:
            # Take the last row of each request. vLLM may append slots for speculative tokens to it.
            asks = torch.searchsorted(step.query_start_loc[1:].long(), rows, right=True)
            is_last = asks != pad(asks[1:], (0, 1), value=-1)
            rows, asks = rows[is_last], asks[is_last]
        if not len(rows):
            return None
        sizes, doubt = torch.ones_like(rows), None
        if judge.states is not None:
            sizes, doubt = self._doubt(judge.states, step, asks, ids[rows].long(), positions[rows].long())
        logit = judge.head(hidden[rows] if judge.config.probe_ids else None, doubt)
        told = hidden.new_full((len(rows), int(sizes.max()), 2), -torch.inf, dtype=torch.float32)
        told[_places(sizes)] = logsigmoid(torch.stack([logit, -logit], dim=-1))
        number = torch.arange(len(rows), device=rows.device)
        refers = hidden.new_zeros(len(rows), hidden.shape[-1])
        refers[:, 0], refers[:, 1], refers[:, 2] = _MARK, number // _BASE, number % _BASE
        hidden[rows] = refers
        return told

    def _doubt(
        self, states: SlotStates, step: Any, asks: Tensor, closing: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Number of prefixes in each of n prompts, and token doubt of all prefixes.

        Args:
            asks: int64 [n], index of each prompt's request in this step.
            closing, positions: int64 [n], id and position of each prompt's last token.
        """
        ids, size = self._judge.ids, self._cache_config.block_size

        def slots(request: Tensor, position: Tensor) -> Tensor:
            return step.block_table[request, position // size].long() * size + position % size

        # An earlier step may have read the ids before the last one.
        back = torch.arange(ids.together, device=asks.device)
        before = (positions[:, None] - back).clamp_min(0)
        said = states.ids(slots(asks[:, None], before))
        said[:, 0] = closing
        sizes = ((said >= ids.closing) & (back <= positions[:, None])).cumprod(-1).sum(-1)
        prompt, place = _places(sizes)
        said = said[prompt, (sizes - 1)[prompt] - place] - ids.closing  # the shortest prefix first

        kinds = 1 + len(ids.end_ids)
        # An invalid prompt may be shorter than the probe, or count more draft tokens than it holds.
        behind = (positions - (sizes - 1) - max(len(ids.probe) - 1, 0)).clamp_min(0)  # end of the longest prefix
        start = (behind - (closing - ids.closing) // kinds).clamp_min(0)  # start of the draft
        drafted, end = (said // kinds).minimum((behind - start)[prompt]), said % kinds
        counts = drafted + (end > 0)
        which = torch.repeat_interleave(counts)
        offset = torch.arange(len(which), device=asks.device) - (counts.cumsum(0) - counts)[which]
        request = asks[prompt][which]
        position = start[prompt][which] + offset
        tokens = slots(request, position)
        if ids.end_ids:
            ends = torch.tensor([0, *ids.end_ids], device=asks.device)[end][which]
            tokens = torch.where(offset == drafted[which], -1 - ends, tokens)
        return sizes, states.pool_over_prefixes(slots(request, (position - 1).clamp_min(0)), tokens, counts)


def _places(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each entry of ragged rows with these sizes."""
    row = torch.repeat_interleave(sizes)
    return row, torch.arange(len(row), device=sizes.device) - (sizes.cumsum(0) - sizes)[row]


def _output_rows(layer: Any, ids: Tensor) -> Tensor:
    """Copy rows [n, H] of tokens [n] from an output layer that may be split among ranks.

    Copied at load time, because layers on a CPU may repack their weights later.
    """
    weight, first = layer.weight.detach(), layer.shard_indices.org_vocab_start_index
    here = ((ids >= first) & (ids < layer.shard_indices.org_vocab_end_index))[:, None]
    return cast(Tensor, tensor_model_parallel_all_reduce(torch.where(here, weight[(ids - first) * here[:, 0]], 0)))


@contextmanager
def _own_vocabulary(config: Any, size: int) -> Iterator[None]:
    """Set the configuration's vocab_size to the target's own within the `with`."""
    extended = config.vocab_size
    config.vocab_size = size
    try:
        yield
    finally:
        config.vocab_size = extended


def _with_probe_ids(embedding: nn.Module, ids: ProbeIds) -> Any:
    """Map the probe's ids in an embedding, which an EAGLE head may share; return the original forward."""
    before = embedding.forward
    embedding.register_buffer("probe", torch.tensor(ids.probe or (0,)), persistent=False)
    last = max(len(ids.probe) - 1, 0)

    def forward(input_ids: Tensor) -> Tensor:
        beyond = (input_ids - ids.vocab_size).clamp(0, last)
        asked = cast(Tensor, embedding.probe)[beyond].to(input_ids.dtype)
        return before(torch.where(input_ids < ids.vocab_size, input_ids, asked))

    embedding.forward = forward  # type: ignore[method-assign]
    return before


class ParseLlamaForCausalLM(ValidityMixin, LlamaForCausalLM):
    pass


class ParseMistralForCausalLM(ValidityMixin, MistralForCausalLM):
    pass


class ParseQwen2ForCausalLM(ValidityMixin, Qwen2ForCausalLM):
    pass


class ParseQwen3ForCausalLM(ValidityMixin, Qwen3ForCausalLM):
    pass
