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

from parse_infer.models.architecture import layer_windows
from parse_infer.models.attention import layer_masks
from parse_infer.models.kv_rows import KVLayer, KVRows
from parse_infer.models.sampling import RowSampling, Sampling, uniform_numbers

KEY_MULTIPLE = 8  # masks whose rows are not aligned are copied by the CUDA kernels
FREE_SHARE = 1 / 16  # seats are given away (or removed) when this share of them is free


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
    kv: KVRows | None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class _Run:
    """A row while it is decoded: the token it runs next, and the slot (its position) for it."""

    row: Row
    token: int
    slot: int
    uniform: list[float]
    ended: bool
    written: list[int] = field(default_factory=list)


class BatchDecoder:
    """Decodes many rows with `model`. In float32 a row gets the tokens that it would get alone.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a row (they are part of it).
        batch_size: rows decoded, and sequences prefilled, at a time. Bounds the memory, together with the contexts.

    Attributes:
        steps: forwards of one token for each row so far.
        tokens: tokens written so far.

    Raises:
        ValueError: the model's cache cannot be cut at a token (recurrent, chunked or shared layers).
    """

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], batch_size: int = 64) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.steps = 0
        self.tokens = 0
        self._windows = layer_windows(model)
        self._backbone = getattr(model, model.base_model_prefix)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> Contexts:
        """Run every sequence once. Padding stands on the right, where causal attention cannot see it."""
        ids = [list(sequence) for sequence in sequences]
        if not all(ids):
            raise ValueError("a context needs at least one token")
        kv: KVRows | None = None
        for group in self._groups(ids):
            cache = DynamicCache()  # without a config every layer keeps all tokens; windows come from the mask
            self._backbone(input_ids=self._pad([ids[i] for i in group]), past_key_values=cache, use_cache=True)
            part = KVRows([KVLayer(layer.keys, layer.values) for layer in cast("list[Any]", cache.layers)])
            if len(group) == len(ids):
                return Contexts(ids, part)  # groups are in order of length, one group keeps the given order
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
        runs = [self._run(contexts, row) for row in rows]
        waiting = deque(sorted((run for run in runs if not run.ended), key=lambda run: run.row.length))
        if waiting and contexts.kv is not None:
            seats = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
            kv = contexts.kv.select([run.row.context for run in seats], seats[-1].row.length)
            while seats:
                sampling = RowSampling([run.row.sampling for run in seats], self.device)
                enough = max(1, FREE_SHARE * len(seats))
                while sum(run.ended for run in seats) < enough:
                    self._step(kv, seats, sampling)
                seats = self._reseat(kv, seats, waiting, contexts.kv)
        return [run.written for run in runs]

    def _run(self, contexts: Contexts, row: Row) -> _Run:
        ids = contexts.ids[row.context]
        if not 1 <= row.length <= len(ids):
            raise ValueError(f"a row must start after 1 to {len(ids)} tokens of its context, not {row.length}")
        # The last token is run again, for its logits.
        start = row.length - 1
        uniform = uniform_numbers(row.sampling, row.max_new_tokens)
        return _Run(row, token=ids[start], slot=start, uniform=uniform, ended=row.max_new_tokens < 1)

    def _step(self, kv: KVRows, seats: Sequence[_Run], sampling: RowSampling) -> None:
        """One more token for every seat; seats whose row has ended run on the spot."""
        placed = torch.tensor([[run.token, run.slot] for run in seats], device=self.device)
        n_keys = -(-(max(run.slot for run in seats) + 1) // KEY_MULTIPLE) * KEY_MULTIPLE
        logits = self._forward(self.model, kv, placed[:, :1], placed[:, 1:], n_keys).logits[:, -1]
        numbers = [run.uniform[len(run.written)] if run.uniform and not run.ended else 0.0 for run in seats]
        chosen = sampling.choose(logits, numbers).tolist()
        self.steps += 1
        for run, token in zip(seats, chosen, strict=True):
            if not run.ended:
                self.tokens += 1
                run.written.append(token)
                run.token, run.slot = token, run.slot + 1
                run.ended = token in self.eos_ids or len(run.written) == run.row.max_new_tokens

    def _reseat(self, kv: KVRows, seats: list[_Run], waiting: deque[_Run], source: KVRows) -> list[_Run]:
        """Give the seats of ended rows to waiting ones; remove seats that nobody waits for."""
        free = [seat for seat, run in enumerate(seats) if run.ended]
        arriving = {seat: waiting.popleft() for seat in free[: len(waiting)]}
        if arriving:
            runs = list(arriving.values())
            longest = max(run.row.length for run in runs)
            kv.load(list(arriving), source, [run.row.context for run in runs], longest)
            seats = [arriving.get(seat, run) for seat, run in enumerate(seats)]
        kept = [seat for seat, run in enumerate(seats) if not run.ended]
        if len(kept) < len(seats):
            kv.keep(kept)
        return [seats[seat] for seat in kept]

    def _forward(self, part: torch.nn.Module, kv: KVRows, tokens: Tensor, slots: Tensor, n_keys: int) -> Any:
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
        """Indices in groups of `batch_size`, of similar length if there are several groups."""
        order = list(range(len(sequences)))
        if len(order) > self.batch_size:
            order.sort(key=lambda i: len(sequences[i]))
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    def _pad(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, sequences))
        return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences], device=self.device).long()
