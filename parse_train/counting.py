"""Memory and operations of a training step, counted on tensors that have shapes and no content."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Counted:
    """Counts of one training step.

    Attributes:
        saved: bytes that the forward pass keeps for the backward pass, parameters excluded.
        peak: largest number of bytes alive at once, parameters excluded: what is saved, the KV cache, gradients and
            intermediate results.
        flops: floating-point operations of matrix products, forward and backward.
    """

    saved: float
    peak: float
    flops: float

    def extrapolated(self, deeper: Counted, layers: float) -> Counted:
        """Continue the line from this count to that of a deeper model, over `layers` times its additional depth."""
        both = ((getattr(self, name), getattr(deeper, name)) for name in ("saved", "peak", "flops"))
        return Counted(*(one + (other - one) * layers for one, other in both))


def count(model: nn.Module, step: Callable[[], Tensor], bf16: bool = False, content: bool = False) -> Counted:
    """Count one step of `model`, whose parameters become tensors without content.

    Masks of tokens are taken to select every token, so the counts are those of a batch without padding.

    Args:
        model: on any device; "meta" needs no memory.
        step: builds its inputs, runs the forward pass and returns the loss.
        bf16: the trainer's mixed precision.
        content: run the step in earnest, for a small model whose shapes depend on contents.
    """
    with nullcontext() if content else FakeTensorMode():
        if not content:
            _without_content(model)
        parameters = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
        saved: dict[Any, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage not in parameters:
                saved[storage] = storage.nbytes()
            return tensor

        every_token = nullcontext() if content else EveryToken()
        with every_token, _Alive(parameters) as alive, FlopCounterMode(display=False) as flops:
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=bf16),
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            ):
                loss = step()
            kept = sum(saved.values())
            saved.clear()
            torch.autograd.backward([loss])  # as a method it would run outside `EveryToken`
    return Counted(kept, alive.peak, flops.get_total_flops())


def _without_content(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors of the current `FakeTensorMode`; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, old in (*module._parameters.items(), *module._buffers.items()):
            if old is None:
                continue
            if id(old) not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            (module._parameters if name in module._parameters else module._buffers)[name] = made[id(old)]  # type: ignore[assignment]


class EveryToken(TorchFunctionMode):
    """Lets masks select every token, and conditions on contents be true."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is Tensor.__bool__:
            return True
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            mask = args[1]
            if isinstance(mask, Tensor) and mask.dtype == torch.bool:
                tokens = args[0].flatten(0, mask.ndim - 1)
                args = (tokens, torch.arange(mask.numel()), *args[2:])
        return func(*args, **(kwargs or {}))


class _Alive(TorchDispatchMode):
    """Follows the bytes of all storages that operations create, but those of `known`."""

    def __init__(self, known: set[Any]) -> None:
        super().__init__()
        self._seen = weakref.WeakSet(known)
        self._bytes = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self._bytes += storage.nbytes()
                self.peak = max(self.peak, self._bytes)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, n: int) -> None:
        self._bytes -= n
