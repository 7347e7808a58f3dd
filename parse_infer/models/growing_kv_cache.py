"""KV cache of one context, preallocated so that a new token copies no earlier keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST = 256  # initial capacity in tokens without a reservation


def new_cache(reserved: Callable[[], int] = lambda: 0, zeroed: bool = False) -> Cache:
    """Create an empty cache for one sequence.

    Args:
        reserved: returns the expected number of tokens; called whenever a layer needs more memory.
        zeroed: fill new memory with zeros, for attention over the whole buffer: a mask does not hide NaN.
    """
    return Cache(layer_class_to_replicate=partial(GrowingKVCache, reserved=reserved, zeroed=zeroed))  # type: ignore[arg-type]


class GrowingKVCache(CacheLayerMixin):
    """Keys and values of one layer: the first `length` tokens of a larger buffer, [1, kv heads, length, head size].

    The cache keeps every token, also in sliding-window layers, where the mask applies the window. The buffer grows to
    the reserved size, and doubles beyond it.

    Attributes:
        length: tokens in the cache.
        buffers: memory of the keys and of the values, [1, kv heads, capacity, head size] each.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, reserved: Callable[[], int], zeroed: bool, **_: object) -> None:
        super().__init__()
        self._reserved, self._zeroed = reserved, zeroed
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = [s.new_empty(*s.shape[:2], 0, s.shape[3]) for s in (key_states, value_states)]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [1, kv heads, n, head size]; return all of them, as views of the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        self.allocate(end)
        self.length = end
        keys, values = self.buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def crop(self, max_length: int) -> None:
        """Remove -max_length tokens from the end (transformers' convention: the number is negative)."""
        self.length += max_length

    @property
    def capacity(self) -> int:
        """Tokens that the memory holds."""
        return self.buffers[0].shape[2] if self.is_initialized else 0

    def allocate(self, tokens: int) -> None:
        """Grow the buffers to hold this many tokens."""
        if tokens > self.capacity:
            reserved = self._reserved()
            self._resize(reserved if reserved >= tokens else max(_FIRST, 2 * self.capacity, tokens))

    def shrink(self, tokens: int) -> None:
        """Keep memory for this many tokens, and all tokens in the cache."""
        self._resize(max(tokens, self.length))

    def _resize(self, capacity: int) -> None:
        for i, old in enumerate(self.buffers):
            allocate = old.new_zeros if self._zeroed else old.new_empty
            new = allocate(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            self.buffers[i] = new

    # transformers calls these.
    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1
