"""Batched decoding: many rows at once, which share what they have in common.

Contexts are prefilled once. Any number of rows may start from any prefix of any context: a row is a copy of the
context's keys and values up to its start, and a seat in the batch until it ends. Seats that become free go to the rows
still waiting (the longest way to go first); when none waits, the batch shrinks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parse_infer.models.architecture import layer_windows, output_layer
from parse_infer.models.attention import layer_masks
from parse_infer.models.batched_kv_cache import BatchedKVCache, KVLayer
from parse_infer.models.cpu.fast_backbone import FastBackbone
from parse_infer.models.sampling import RowSampling, Sampling, uniform_numbers

KEY_MULTIPLE = 8  # masks whose rows are not aligned are copied by the CUDA kernels
FREE_SHARE = 1 / 16  # seats are given away (or removed) when this share of them is free
FREE_PADDING, PADDING_SHARE = 256, 1 / 4  # tokens of padding that a group may have, plus this share of its own tokens


@dataclass(frozen=True)
class Row:
    """One decode: start after the first `length` tokens of context `context`, write `max_new_tokens` at most."""

    context: int
    length: int
    max_new_tokens: int
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Contexts:
    """Prefilled sequences: their token ids, and their keys and values."""

    ids: list[list[int]]
    kv: BatchedKVCache | None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Run:
    """A row while it is decoded.

    Attributes:
        source: the keys and values that it starts from.
        token, slot: the token it runs next, and its position.
        ended: it writes no more. Whoever wants no more of it may say so.
    """

    row: Row
    source: BatchedKVCache
    token: int
    slot: int
    uniform: list[float]
    ended: bool
    written: list[int] = field(default_factory=list)


class Batch:
    """Rows under way, each in a seat with keys and values of its own. Made by `BatchDecoder.batch`."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self.runs: list[Run] = []
        self._decoder = decoder
        self._kv: BatchedKVCache | None = None

    @property
    def free(self) -> list[int]:
        """Seats whose run has ended."""
        return [seat for seat, run in enumerate(self.runs) if run.ended]

    @torch.inference_mode()
    def add(self, runs: Sequence[Run] = ()) -> None:
        """Seats for these: the free ones first, then more of them."""
        free = self.free
        places = [*free, *range(len(self.runs), len(self.runs) + len(runs))][: len(runs)]
        more = len(runs) - len(free)
        if more > 0 and self._kv is None:
            self._kv = runs[0].source.empty(more, max(run.row.length for run in runs))
        elif more > 0:
            assert self._kv is not None
            self._kv.append(more)
        for source in {id(run.source): run.source for run in runs}.values():
            arriving = {seat: run for seat, run in zip(places, runs, strict=True) if run.source is source}
            contexts = [run.row.context for run in arriving.values()]
            assert self._kv is not None
            self._kv.load(list(arriving), source, contexts, max(run.row.length for run in arriving.values()))
        seated = dict(zip(places, runs, strict=True))
        self.runs = [seated.get(seat, run) for seat, run in enumerate([*self.runs, *runs[len(free) :]])]
        self._sampling = RowSampling([run.row.sampling for run in self.runs], self._decoder.device)

    @torch.inference_mode()
    def compact(self) -> None:
        """Remove the free seats. This copies the others' keys and values; a free seat costs a little of each step."""
        kept = [seat for seat, run in enumerate(self.runs) if not run.ended]
        if len(kept) == len(self.runs):
            return
        self.runs = [self.runs[seat] for seat in kept]
        if not kept:
            self._kv = None
        elif self._kv is not None:
            self._kv.keep(kept)
        self._sampling = RowSampling([run.row.sampling for run in self.runs], self._decoder.device)

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every seat; seats whose run has ended run on the spot."""
        if self._kv is None:
            return
        logits = self._decoder._next(self._kv, self.runs)
        numbers = [run.uniform[len(run.written)] if run.uniform and not run.ended else 0.0 for run in self.runs]
        chosen = self._sampling.choose(logits, numbers).tolist()
        self._decoder.steps += 1
        for run, token in zip(self.runs, chosen, strict=True):
            if not run.ended:
                self._decoder.tokens += 1
                run.written.append(token)
                run.token, run.slot = token, run.slot + 1
                run.ended = token in self._decoder.eos_ids or len(run.written) == run.row.max_new_tokens


class BatchDecoder:
    """Decodes many rows with `model`. In float32 a row gets the tokens that it would get alone.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a row (they are part of it).
        batch_size: rows decoded, and sequences prefilled, at a time. Bounds the memory, together with the contexts.
        fast: the model's own, if steps are to be taken by it where it can (`Decoder.fast`).

    Attributes:
        steps: forwards of one token for each row so far.
        tokens: tokens written so far.

    Raises:
        ValueError: the model's cache cannot be cut at a token (recurrent, chunked or shared layers).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        batch_size: int = 64,
        fast: FastBackbone | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
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
        """Run every sequence once. Padding stands on the right, where causal attention cannot see it."""
        ids = [list(sequence) for sequence in sequences]
        if not all(ids):
            raise ValueError("a context needs at least one token")
        kv: BatchedKVCache | None = None
        for group in self._groups(ids):
            cache = DynamicCache()  # without a config every layer keeps all tokens; windows come from the mask
            self._backbone(input_ids=self._pad([ids[i] for i in group]), past_key_values=cache, use_cache=True)
            part = BatchedKVCache([KVLayer(layer.keys, layer.values) for layer in cast("list[Any]", cache.layers)])
            if len(group) == len(ids):
                return Contexts(ids, part)  # several groups are in order of length, a single one as given
            kv = kv or part.empty(len(ids), max(map(len, ids)))
            kv.load(group, part, range(len(group)), part.capacity)
        return Contexts(ids, kv)

    @torch.inference_mode()
    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> Contexts:
        """New contexts: `contexts[parents[i]] + suffixes[i]`. Only the suffixes are run."""
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
                slots = starts[:, None] + torch.arange(n_new, device=self.device)
                self._forward(self._backbone, part, tokens, slots, int(starts.max()) + n_new)
            kv.load(group, part, range(len(group)), min(part.capacity, kv.capacity))
        return Contexts(ids, kv)

    @torch.inference_mode()
    def decode(self, contexts: Contexts, rows: Sequence[Row]) -> list[list[int]]:
        """New tokens of every row, end token included; a row without one has used up its `max_new_tokens`.

        One synchronisation with the device per step: reading the chosen tokens.
        """
        runs = [self.run(contexts, row) for row in rows]
        waiting = deque(sorted((run for run in runs if not run.ended), key=lambda run: run.row.length))
        batch = self.batch()
        while waiting or batch.runs:
            room = self.batch_size - len(batch.runs) + len(batch.free)
            batch.add([waiting.popleft() for _ in range(min(room, len(waiting)))])
            batch.compact()
            enough = max(1, FREE_SHARE * len(batch.runs))
            while batch.runs and len(batch.free) < enough:
                batch.step()
        return [run.written for run in runs]

    def batch(self) -> Batch:
        """An empty batch, whose rows come and go as its caller likes."""
        self._steps_rows = self._fast is not None and self._fast.steps_rows
        return Batch(self)

    def run(self, contexts: Contexts, row: Row) -> Run:
        """A row, ready for a seat. Raises ValueError where there is no such prefix, or a sampled row has no seed."""
        ids = contexts.ids[row.context]
        if not 1 <= row.length <= len(ids):
            raise ValueError(f"a row must start after 1 to {len(ids)} tokens of its context, not {row.length}")
        # The last token is run again, for its logits.
        start = row.length - 1
        uniform = uniform_numbers(row.sampling, row.max_new_tokens)
        assert contexts.kv is not None
        return Run(row, contexts.kv, ids[start], start, uniform, ended=row.max_new_tokens < 1)

    def _next(self, kv: BatchedKVCache, runs: Sequence[Run]) -> Tensor:
        """Logits [B, V] after one more token of each row."""
        placed = torch.tensor([[run.token, run.slot] for run in runs], device=self.device)
        n_keys = -(-(max(run.slot for run in runs) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        tokens, slots = placed[:, :1], placed[:, 1:]
        if not self._steps_rows:
            return cast("Tensor", self._forward(self.model, kv, tokens, slots, n_keys).logits[:, -1])
        assert self._fast is not None
        kv.place(slots, n_keys)
        visible = torch.arange(n_keys) <= slots
        return self._logits(self._fast.step_rows(tokens, slots, kv, visible[:, None, None])[:, 0])

    def _forward(self, part: torch.nn.Module, kv: BatchedKVCache, tokens: Tensor, slots: Tensor, n_keys: int) -> Any:
        """Run `tokens` [B, n] at `slots` [B, n] with `part`, the model or its backbone."""
        keys = torch.arange(n_keys, device=self.device)

        def mask(window: int | None) -> Tensor:
            visible = keys <= slots[..., None]
            if window is not None:
                visible &= slots[..., None] - keys < window
            return visible[:, None]  # [B, 1, n, n_keys]

        kv.place(slots, n_keys)
        return part(
            input_ids=tokens,
            position_ids=slots,
            attention_mask=layer_masks(self._windows, mask),
            past_key_values=kv,
            use_cache=True,
        )

    def _groups(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices in groups of at most `batch_size`; of similar length, where padding costs more than a forward."""
        groups: list[list[int]] = []
        tokens = 0
        for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
            size = len(sequences[i])
            tokens += size
            padding = size * (len(groups[-1]) + 1) - tokens if groups else 0
            if not groups or len(groups[-1]) == self.batch_size or padding > FREE_PADDING + PADDING_SHARE * tokens:
                groups.append([])
                tokens = size
            groups[-1].append(i)
        return groups if len(groups) > 1 else [sorted(group) for group in groups]

    def _pad(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, sequences))
        return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device).long()
