"""Sampler of batches with similar lengths, in an order that a resumed run reproduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices


class EpochLengthSampler(Sampler[int]):
    """Random order with rows of similar length in each batch; a function of seed and epoch alone.

    A resumed run gets the same order of the epoch and skips the batches already seen. `epoch` is a callable because
    accelerate does not pass the epoch to every sampler.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = list(lengths), batch_size, seed, epoch

    @classmethod
    def of(cls, trainer: Trainer, lengths: Sequence[int]) -> EpochLengthSampler:
        """Return the sampler for `trainer`, whose rows have these lengths."""
        args = trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        size = args.train_batch_size * args.world_size
        return cls(lengths, size, seed, lambda: int(trainer.state.epoch or 0))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch())
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        # Each mega-batch is sorted from long to short, so shuffle the batches to mix lengths over time.
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        shuffled = torch.randperm(len(batches) - 1, generator=generator).tolist() if len(batches) > 1 else []
        for i in [*shuffled, len(batches) - 1]:  # the last batch may be smaller, and stays last
            yield from batches[i]
