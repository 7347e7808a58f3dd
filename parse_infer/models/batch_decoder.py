"""Batched decoding of many rows that share prefilled contexts.

The decoder prefills each context once. Any number of rows may start from any prefix of any context. A row copies the
context's keys and values up to its start and occupies a batch slot until it ends. Waiting rows take free slots, the
shortest prefix first; when no row waits, the batch shrinks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parse_infer.errors import ModelError
from parse_infer.models.architecture import layer_windows, output_layer
from parse_infer.models.attention import layer_masks
from parse_infer.models.batched_kv_cache import BatchedKVCache, KVLayer
from parse_infer.models.cpu.fast_backbone import FastBackbone
from parse_infer.models.token_sampling import RowSampling, uniform_numbers
from parse_infer.settings.sampling import Sampling

KEY_MULTIPLE = 8  # CUDA kernels copy masks with unaligned rows
FREE_SHARE = 1 / 16  # reassign (or remove) free slots once they are this share of the batch
FREE_PADDING, PADDING_SHARE = 256, 1 / 4  # maximum padding of a prefill group: 256 tokens plus 1/4 of its own tokens
GROUP_TOKENS = 8192  # of a prefill group of several sequences, padding included: they bound its activations in memory


@dataclass(frozen=True)
class BatchRow:
    """One decode: start after the first `length` tokens of context `context`, write at most `max_new_tokens`."""

    context: int
    length: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Contexts:
    """Prefilled sequences: token ids, keys and values."""

    ids: list[list[int]]
    kv: BatchedKVCache | None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class RunningRow:
    """A row during decoding.

    Attributes:
        source: the context's keys and values.
        token, position: the next input token, and its position.
        ended: the row is complete. A caller may set this to cancel the row.
    """

    row: BatchRow
    source: BatchedKVCache
    token: int
    position: int
    uniform: list[float]
    ended: bool
    written: list[int] = field(default_factory=list)


class Batch:
    """Rows in flight, one per batch slot, each with its own keys and values. Created by `BatchDecoder.batch`."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self.runs: list[RunningRow] = []
        self._decoder = decoder
        self._kv: BatchedKVCache | None = None

    @property
    def free(self) -> list[int]:
        """Slots whose run has ended."""
        return [slot for slot, run in enumerate(self.runs) if run.ended]

    @torch.inference_mode()
    def add(self, runs: Sequence[RunningRow] = ()) -> list[int]:
        """Assign the runs to free slots first, then to new slots; return the slot of each."""
        free = self.free
        slots = [*free, *range(len(self.runs), len(self.runs) + len(runs))][: len(runs)]
        more = len(runs) - len(free)
        if more > 0 and self._kv is None:
            self._kv = runs[0].source.empty(more, max(run.row.length for run in runs))
        elif more > 0:
            assert self._kv is not None
            self._kv.append(more)
        for source in {id(run.source): run.source for run in runs}.values():
            arriving = {slot: run for slot, run in zip(slots, runs, strict=True) if run.source is source}
            contexts = [run.row.context for run in arriving.values()]
            assert self._kv is not None
            self._kv.load(list(arriving), source, contexts, max(run.row.length for run in arriving.values()))
        added = dict(zip(slots, runs, strict=True))
        self.runs = [added.get(slot, run) for slot, run in enumerate([*self.runs, *runs[len(free) :]])]
        self._sampling = RowSampling([run.row.sampling for run in self.runs], self._decoder.device)
        return slots

    @torch.inference_mode()
    def compact(self) -> None:
        """Remove the free slots, which slow every step. This copies the keys and values of the other slots."""
        kept = [slot for slot, run in enumerate(self.runs) if not run.ended]
        if len(kept) == len(self.runs):
            return
        self.runs = [self.runs[slot] for slot in kept]
        if not kept:
            self._kv = None
        elif self._kv is not None:
            self._kv.keep(kept)
        self._sampling = RowSampling([run.row.sampling for run in self.runs], self._decoder.device)

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one token in every slot. Ended runs repeat their last position."""
        if self._kv is None:
            return
        logits = self.logits()
        numbers = [run.uniform[len(run.written)] if run.uniform and not run.ended else 0.0 for run in self.runs]
        self.write(self._sampling.choose(logits, numbers).tolist())

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Run the next input token of every slot, of which there is at least one; return the logits [B, V]."""
        assert self._kv is not None
        return self._decoder._next(self._kv, self.runs)

    @torch.inference_mode()
    def states(self, tokens: Mapping[int, int], layers: Sequence[int]) -> Tensor:
        """Return the inputs of these layers, [N, layers, H], where each of N slots would read its token next.

        Call after `logits`. Nothing is written; the slots' keys and values are copied for the forward.

        Args:
            tokens: by slot.
            layers: counted as in `Decoder.capture_hidden`.
        """
        assert self._kv is not None
        return self._decoder._states(self._kv, {slot: self.runs[slot] for slot in tokens}, [*tokens.values()], layers)

    def write(self, chosen: Sequence[int | None]) -> None:
        """Let every slot whose run has not ended write its token of `chosen`; None: it waits, and repeats its last
        position."""
        self._decoder.steps += 1
        for run, token in zip(self.runs, chosen, strict=True):
            if token is not None and not run.ended:
                self._decoder.tokens += 1
                run.written.append(token)
                run.token, run.position = token, run.position + 1
                run.ended = token in self._decoder.eos_ids or len(run.written) == run.row.max_new_tokens

    def fork(self, slot: int) -> RunningRow:
        """Copy the run of a slot, for `add`, before the slot's next `write`."""
        run = self.runs[slot]
        assert self._kv is not None
        place = replace(run.row, context=slot, length=run.position + 1)
        return replace(run, row=place, source=self._kv, written=[*run.written])


class BatchDecoder:
    """Decodes many rows with `model`. In float32 each row gets the tokens of an unbatched decode.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a row and belong to it.
        batch_size: maximum number of rows per decode step, and of sequences per prefill. Bounds the memory.
        fast: the model's `Decoder.fast`, to use for decode steps if possible.

    Attributes:
        steps: decode steps so far.
        tokens: tokens written so far.

    Raises:
        ValueError: the model's cache cannot be cropped at a token (recurrent, chunked or shared layers).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        batch_size: int = 64,
        fast: FastBackbone | None = None,
    ) -> None:
        if batch_size < 1:
            raise ModelError(f"batch_size is {batch_size}; it must be at least 1")
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.steps = 0
        self.tokens = 0
        self._windows = layer_windows(model)
        self._backbone = getattr(model, model.base_model_prefix)
        self._fast, self._steps_rows = fast, False
        self._logits = output_layer(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> Contexts:
        """Prefill every sequence once. Padding is on the right, where causal attention cannot see it."""
        ids = [list(sequence) for sequence in sequences]
        if not all(ids):
            raise ModelError("a context needs at least one token")
        kv: BatchedKVCache | None = None
        for group in self._groups(ids):
            cache = DynamicCache()  # without a config every layer keeps all tokens; windows come from the mask
            self._backbone(input_ids=self._pad([ids[i] for i in group]), past_key_values=cache, use_cache=True)
            part = BatchedKVCache([KVLayer(layer.keys, layer.values) for layer in cast("list[Any]", cache.layers)])
            if len(group) == len(ids):
                return Contexts(ids, part)  # a single group keeps the given order; several are sorted by length
            kv = kv or part.empty(len(ids), max(map(len, ids)))
            kv.load(group, part, range(len(group)), part.capacity)
        return Contexts(ids, kv)

    @torch.inference_mode()
    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> Contexts:
        """Build new contexts `contexts[parents[i]] + suffixes[i]` with a forward over the suffixes only."""
        ids = [[*contexts.ids[p], *suffix] for p, suffix in zip(parents, suffixes, strict=True)]
        if not ids or contexts.kv is None:
            return Contexts([], None)
        kv = contexts.kv.empty(len(ids), max(map(len, ids)))
        for group in self._groups(suffixes):
            starts = torch.tensor([len(contexts.ids[parents[i]]) for i in group], device=self.device)
            tokens = self._pad([suffixes[i] for i in group])
            n_new = tokens.shape[1]
            part = contexts.kv.select([parents[i] for i in group], int(starts.max()) + n_new)
            if n_new:
                positions = starts[:, None] + torch.arange(n_new, device=self.device)
                self._forward(self._backbone, part, tokens, positions, int(starts.max()) + n_new)
            kv.load(group, part, range(len(group)), min(part.capacity, kv.capacity))
        return Contexts(ids, kv)

    @torch.inference_mode()
    def decode(self, contexts: Contexts, rows: Sequence[BatchRow]) -> list[list[int]]:
        """Return the new tokens of every row, up to an end token (included) or `max_new_tokens`.

        One device synchronisation per step, to read the chosen tokens.
        """
        runs = [self.run(contexts, row) for row in rows]
        waiting = deque(sorted((run for run in runs if not run.ended), key=lambda run: run.row.length))
        batch = self.batch()
        while waiting or batch.runs:
            slots = self.batch_size - len(batch.runs) + len(batch.free)
            batch.add([waiting.popleft() for _ in range(min(slots, len(waiting)))])
            batch.compact()
            enough = max(1, FREE_SHARE * len(batch.runs))
            while batch.runs and len(batch.free) < enough:
                batch.step()
        return [run.written for run in runs]

    def batch(self) -> Batch:
        """Create an empty batch; the caller adds and removes rows."""
        self._steps_rows = self._fast is not None and self._fast.steps_rows
        return Batch(self)

    def run(self, contexts: Contexts, row: BatchRow) -> RunningRow:
        """Prepare a row for `Batch.add`. Raise ValueError for an invalid prefix, or a sampled row without seed."""
        ids = contexts.ids[row.context]
        if not 1 <= row.length <= len(ids):
            raise ModelError(f"a row must start after 1 to {len(ids)} tokens of its context, not {row.length}")
        # The last token runs again, for its logits.
        start = row.length - 1
        uniform = uniform_numbers(row.sampling, row.max_new_tokens)
        assert contexts.kv is not None
        return RunningRow(row, contexts.kv, ids[start], start, uniform, ended=row.max_new_tokens < 1)

    def _next(self, kv: BatchedKVCache, runs: Sequence[RunningRow]) -> Tensor:
        """Run one token of each row and return the logits [B, V]."""
        placed = torch.tensor([[run.token, run.position] for run in runs], device=self.device)
        n_keys = -(-(max(run.position for run in runs) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        tokens, positions = placed[:, :1], placed[:, 1:]
        if not self._steps_rows:
            return cast("Tensor", self._forward(self.model, kv, tokens, positions, n_keys).logits[:, -1])
        assert self._fast is not None
        kv.place(positions, n_keys)
        visible = torch.arange(n_keys) <= positions
        return self._logits(self._fast.step_rows(tokens, positions, kv, visible[:, None, None])[:, 0])

    def _states(
        self, kv: BatchedKVCache, runs: Mapping[int, RunningRow], tokens: Sequence[int], layers: Sequence[int]
    ) -> Tensor:
        """Run another token behind that of each run, by row of `kv`; return the inputs of these layers."""
        positions = torch.tensor([[run.position + 1] for run in runs.values()], device=self.device)
        n_keys = int(positions.max()) + 1
        ids, part = torch.tensor(tokens, device=self.device)[:, None], kv.select([*runs], n_keys)
        output = self._forward(self._backbone, part, ids, positions, n_keys, output_hidden_states=True)
        return torch.stack([output.hidden_states[layer][:, 0] for layer in layers], dim=1)

    def _forward(
        self,
        part: torch.nn.Module,
        kv: BatchedKVCache,
        tokens: Tensor,
        positions: Tensor,
        n_keys: int,
        **options: bool,
    ) -> Any:
        """Run `tokens` [B, n] at `positions` [B, n] with `part`, the model or its backbone."""
        keys = torch.arange(n_keys, device=self.device)

        def mask(window: int | None) -> Tensor:
            visible = keys <= positions[..., None]
            if window is not None:
                visible &= positions[..., None] - keys < window
            return visible[:, None]  # [B, 1, n, n_keys]

        kv.place(positions, n_keys)
        return part(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=layer_masks(self._windows, mask),
            past_key_values=kv,
            use_cache=True,
            **options,
        )

    def _groups(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Group indices by similar length, at most `batch_size` and `GROUP_TOKENS` each.

        Lengths may differ as far as padding costs less than another forward.
        """
        groups: list[list[int]] = []
        tokens = 0
        for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
            size = len(sequences[i])
            tokens += size
            padded = size * (len(groups[-1]) + 1) if groups else size
            full = not groups or len(groups[-1]) == self.batch_size or padded > GROUP_TOKENS
            if full or padded - tokens > FREE_PADDING + PADDING_SHARE * tokens:
                groups.append([])
                tokens = size
            groups[-1].append(i)
        return groups if len(groups) > 1 else [sorted(group) for group in groups]

    def _pad(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, sequences))
        return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device).long()
