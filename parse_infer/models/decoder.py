"""`Decoder`: one model, its KV cache and the cached token ids.

Only the decoder grows or crops the cache. The cache keeps every token in every layer, so that cropping to any token is
exact. In sliding-window layers the mask applies the window.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from parse_infer.errors import ModelError
from parse_infer.models.architecture import decoder_layers, layer_windows, output_layer, text_config
from parse_infer.models.attention import SPLIT_ATTENTION, layer_masks
from parse_infer.models.cpu.fast_backbone import FastBackbone
from parse_infer.models.cuda_graphs import CHAINS, KEPT, GraphedChains
from parse_infer.models.growing_kv_cache import GrowingKVCache, new_cache
from parse_infer.models.hidden_capture import HiddenCapture
from parse_infer.models.token_sampling import choose, random_generator, without
from parse_infer.settings.sampling import Sampling

_MOST_RESERVED = 4096  # new tokens; few answers are longer, for any budget
_TRAILING = 64  # tokens read after a context and dropped again, such as a token tree
_SLACK, _SMALL = 4, 1024  # memory for at most so many times the tokens needed, or for a small number of tokens
_GRAPHED = 2048  # tokens: smallest cache of a decoder with CUDA graphs, which belong to its memory


@dataclass(frozen=True)
class Trailing:
    """Tokens read in the same forward after the context, without joining it: probes, or a token tree.

    Attributes:
        ids: n token ids.
        positions: int64 [n].
        mask: maps a layer's sliding window (None: no window) to the attention mask, bool [1, 1, n, context + n].
        within: context manager for the forward that reads these tokens, such as the adapter's LoRA.
    """

    ids: Sequence[int]
    positions: Tensor
    mask: Callable[[int | None], Tensor]
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class PassOutput:
    """Final-norm hidden states of one forward.

    Attributes:
        hidden: [1 + extra, H]: states of the last context token and every extra token. Row i predicts extra token i.
        trailing: [n, H]: states of the trailing tokens.
        inner: [extra, layers, H]: inputs of the layers asked for at every extra token.
    """

    hidden: Tensor
    trailing: Tensor
    inner: Tensor


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(one), len(other))
    if list(one[:n]) == list(other[:n]):  # much faster than a loop
        return n
    return next(i for i in range(n) if one[i] != other[i])


class Decoder:
    """Decodes with `model` over a context of token ids (batch size 1) and reuses the cached prefix.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a decode.
        torch_compile: compile the short forwards for a GPU (`GraphedChains`).

    Attributes:
        ids: the context; `ids[:cached]` are in the cache.
        cached: number of tokens in the cache.
        forwards: model forwards so far.
        fast: faster backbone with the same results, or None.
        edits: changes of the context from outside decode() so far.
        before_forward: called before every forward. An exception from it ends the call; the decoder stays usable.
        prefill_chunk: maximum number of context tokens per forward. Bounds a forward's memory and duration.

    Raises:
        ValueError: the cache of this model cannot be cropped exactly, or its logits are not
            `lm_head(backbone(x))` with a known scale or cap.
    """

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], torch_compile: bool = False) -> None:
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.ids: list[int] = []
        self.cached = 0
        self.forwards = 0
        self.before_forward: Callable[[], None] | None = None
        self.prefill_chunk = 2048
        self._windows = layer_windows(model)
        self._backbone = getattr(model, model.base_model_prefix)
        self.fast = FastBackbone.for_model(model)
        self._layers = decoder_layers(model)
        self._output_layer = output_layer(model)
        self._reserved = 0  # tokens
        self._next_logits: Tensor | None = None
        self._proposed: list[int] = []  # between look_ahead() and keep()
        self._captures: WeakSet[HiddenCapture] = WeakSet()
        self.edits = 0
        self._check_logits()
        self._graphs: GraphedChains | None = None
        if self.fast is not None and self.device.type == "cuda" and model.dtype != torch.float16:
            self._graphs = GraphedChains(self.fast, torch_compile)
        elif torch_compile:
            name, where = type(model).__name__, f"{model.dtype} on {self.device}"
            warnings.warn(f"torch_compile does nothing for {name} in {where}: it has no CUDA graphs", stacklevel=2)
        self._cache = self._new_cache()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def seek(self, ids: Sequence[int]) -> None:
        """Set the context to `ids` and crop the cache to the longest common prefix.

        Runs no forward. Drops known next logits unless the context is unchanged.
        """
        ids = list(ids)
        if ids == self.ids and self.cached <= len(ids):  # the cache is longer after an interrupted look_ahead()
            return
        self._crop(min(self.cached, common_prefix(self.ids, ids)))
        self.ids = ids
        self._next_logits = None
        self.edits += 1

    def append(self, token_id: int) -> None:
        """Append one token to the context: `seek([*ids, token_id])` in constant time."""
        if self.cached > len(self.ids):  # an interrupted look_ahead()
            self._crop(len(self.ids))
        self.ids.append(token_id)
        self._next_logits = None
        self.edits += 1

    @torch.inference_mode()
    def advance(self, token_id: int, token: Tensor) -> Tensor:
        """Append a token, run it and return the next logits [V], without a transfer to the device.

        Args:
            token: the same token on the model's device, int64 [].
        """
        self.append(token_id)
        if self.cached == len(self.ids) - 1:
            position = torch.full((1, 1), self.cached, device=self.device)
            self._next_logits = self.logits(self._step(token.view(1, 1), position)[0, 0])
        return self.next_logits()

    def reserve(self, context: int, new: int) -> None:
        """Announce the size of the context, so that the cache allocates memory once, later.

        Args:
            context: number of known tokens.
            new: maximum number of new tokens; beyond 4,096 the memory grows on demand.
        """
        self._reserved = context + min(new, _MOST_RESERVED) + _TRAILING
        self._free()

    @torch.inference_mode()
    def decode(
        self,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        banned_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield new tokens and append them to `ids`, up to an EOS token (included) or the budget.

        The last yielded token is in `ids` but not in the cache. The caller may drop the iterator at any time. One
        device synchronisation per token, to read its id.

        Args:
            generator: random generator on the model's device; default: a fresh one from `sampling.seed`.
            banned_ids: tokens to exclude.

        Raises:
            ValueError: the context is empty.
            RuntimeError: the context was changed (seek, forward) while this iterator was still in use.
        """
        sampling = sampling or Sampling()
        if generator is None:
            generator = random_generator(sampling, self.device)
        if max_new_tokens <= 0:
            return
        self.reserve(len(self.ids), max_new_tokens)
        banned = self.token_index(banned_ids)
        logits = self.next_logits()
        position = torch.tensor([[len(self.ids)]], device=self.device)
        self.edits += 1
        edits = self.edits
        for count in range(1, max_new_tokens + 1):
            token = choose(without(logits, banned), sampling, generator)
            token_id = int(token)  # device synchronisation
            self.ids.append(token_id)
            self._next_logits = None
            yield token_id
            if self.edits != edits:
                raise RuntimeError("the context was changed during decode(): start a new decode() after seek()")
            if token_id in self.eos_ids or count == max_new_tokens:
                return
            if self.cached == len(self.ids) - 1:
                hidden = self._step(token.view(1, 1), position)[0, 0]
            else:  # `set_next_logits` was called while context tokens were missing from the cache
                hidden, edits = self._run([])[-1], self.edits
            logits = self.logits(hidden)
            position = position + 1

    @torch.inference_mode()
    def forward(
        self, extra_ids: Sequence[int] = (), trailing: Trailing | None = None, layers: Sequence[int] = ()
    ) -> PassOutput:
        """Run one forward over [uncached context tokens, extra_ids, trailing tokens]; several for a long context.

        Afterwards `ids` ends with `extra_ids`, all of it is cached, and the trailing tokens are not.

        Args:
            extra_ids: tokens to append to the context (a draft).
            trailing: see `Trailing`.
            layers: of which to return the inputs, counted as in `capture_hidden`.

        Raises:
            ValueError: an empty context, or trailing tokens on a model without `enable_split_attention`.
        """
        inner: list[Tensor] = []
        hidden = self._run(extra_ids, trailing, layers, inner)
        self._crop(len(self.ids))
        end = 1 + len(extra_ids)
        states = torch.cat(inner)[-len(extra_ids) :] if inner else hidden.new_empty(0, len(layers), hidden.shape[1])
        return PassOutput(hidden[:end], hidden[end:], states)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Map final-norm hidden states [..., H] to next-token logits [..., V], with the model's scale and cap."""
        return self._output_layer(hidden).to(self.device)  # the layers may be on several devices

    def token_index(self, ids: Collection[int]) -> Tensor | None:
        """Return the ids as int64 [n] on the model's device; None for no ids."""
        return torch.tensor(sorted(ids), device=self.device) if ids else None

    @property
    def knows_next(self) -> bool:
        """Whether `next_logits` needs no forward."""
        return self._next_logits is not None

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Return the logits [V] of the token after the context; run a forward unless they are known."""
        if self._next_logits is None:
            self._next_logits = self.logits(self._run([])[-1])
        return self._next_logits

    @torch.inference_mode()
    def look_ahead(self, proposed: Sequence[int] | Trailing) -> Tensor:
        """Run one forward over [uncached context tokens, n proposed tokens]; `keep` or `seek` must follow.

        Args:
            proposed: a chain of token ids, or a tree.

        Returns:
            [1 + n, H]: the final-norm state after the last context token and after every proposed token.

        Raises:
            ValueError: an empty context, or a tree on a model without `enable_split_attention`.
        """
        if isinstance(proposed, Trailing):
            hidden, tokens = self._run([], proposed), list(proposed.ids)
        else:
            hidden, tokens = self._run(proposed), list(proposed)
            del self.ids[len(self.ids) - len(tokens) :]
        self._proposed = tokens
        return hidden

    def capture_hidden(self, layers: Sequence[int]) -> HiddenCapture:
        """Capture the inputs of these layers for every token read, as long as the caller holds the result.

        Layers count as in transformers' `hidden_states`: the index after the last layer is the final-norm state. This
        call clears the cache, so that the capture covers the whole context.

        Raises:
            ValueError: a layer that the model does not have.
        """
        deepest = len(self._layers)
        wrong = [layer for layer in layers if not 0 <= layer <= deepest]
        if wrong:
            raise ModelError(f"{type(self.model).__name__} has layers 0 to {deepest}, so there is no layer {wrong[0]}")
        self.seek([])
        capture = HiddenCapture(layers)
        self._captures.add(capture)
        return capture

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Append the proposed tokens on this path (from the root down) to the context and drop the others."""
        start = len(self.ids)
        if list(path) != list(range(len(path))):  # a chain is already in place
            nodes = torch.tensor(path, device=self.device)
            places = torch.arange(len(path), device=self.device)
            for layer in cast("list[Any]", self._cache.layers):
                for kept in layer.buffers:
                    kept.index_copy_(2, start + places, kept.index_select(2, start + nodes))
            for capture in self._captures:  # move the path to the front, so that the crop drops the rest
                capture.move(start, path)
        self.ids.extend(self._proposed[node] for node in path)
        self._crop(len(self.ids))
        self._next_logits = None
        self.edits += 1

    def set_next_logits(self, logits: Tensor) -> None:
        """Set the logits [V] from which the next `decode` chooses its first token, without a forward."""
        self._next_logits = logits

    def _run(
        self,
        extra_ids: Sequence[int],
        trailing: Trailing | None = None,
        layers: Sequence[int] = (),
        inner: list[Tensor] | None = None,
    ) -> Tensor:
        """Run [uncached context tokens, extra_ids, trailing tokens] in chunks.

        `extra_ids` join the context. The trailing tokens stay in the cache until it is cropped. `inner` receives the
        inputs of `layers`, [T, layers, H], of the chunks that end in extra tokens.

        Returns:
            [1 + extra + n, H]: the states of the last context token, of the extra and of the trailing tokens.
        """
        if not self.ids:
            raise ModelError("the context is empty: seek() to a prompt of at least one token first")
        if trailing is not None and text_config(self.model)._attn_implementation != SPLIT_ATTENTION:
            raise ModelError("probes and trees need split attention: call enable_split_attention(model) first")
        if self.cached >= len(self.ids):
            self._crop(len(self.ids) - 1)  # the caller needs the last context token's hidden state
        past, text = self.cached, [*self.ids[self.cached :], *extra_ids]
        if len(text) > self.prefill_chunk:  # allocate the memory for all chunks at once
            self._reserved = max(self._reserved, past + len(text) + (0 if trailing is None else len(trailing.ids)))
        kept, unused = [], len(text) - 1 - len(extra_ids)
        for start in range(0, len(text), self.prefill_chunk):
            stop = min(start + self.prefill_chunk, len(text))
            last = trailing if stop == len(text) else None
            tokens, positions = text[start:stop], torch.arange(past + start, past + stop, device=self.device)
            mask = None
            if last is not None:
                tokens, positions = [*tokens, *last.ids], torch.cat([positions, last.positions])
                mask = layer_masks(self._windows, last.mask)
            states: dict[int, Tensor] = {layer: positions for layer in layers}
            with nullcontext() if last is None else last.within():
                hidden = self._step(torch.tensor([tokens], device=self.device), positions[None], mask, states)[0]
            if stop > unused:
                kept.append(hidden[max(0, unused - start) :])
            if inner is not None and layers and stop > len(text) - len(extra_ids):
                inner.append(torch.stack([states[layer][0, : stop - start].to(self.device) for layer in layers], 1))
        self.ids.extend(extra_ids)
        self._next_logits = None
        self.edits += 1
        return torch.cat(kept)

    def _step(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None = None,
        inner: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one forward of the backbone, [1, T] -> [1, T, H]; the cache grows by T tokens. `inner` receives the
        inputs of the layers that are its keys."""
        if self.before_forward is not None:
            self.before_forward()
        captures = list(self._captures)
        captured = {layer: tokens for capture in captures for layer in capture.layers} | (inner or {})
        graphs, hidden = self._graphs, None
        try:
            if graphs is not None and mask is None and graphs.takes(tokens.shape[1], self.cached):
                hidden = graphs(tokens, self._cache, captured)
            if hidden is None and self.fast is not None:
                hidden = self.fast(tokens, positions, self._cache, cast("Tensor | None", mask), captured)
            elif hidden is None:
                with self._capturing(captured):
                    hidden = self._backbone(
                        input_ids=tokens,
                        position_ids=positions,
                        attention_mask=mask,
                        past_key_values=self._cache,
                        use_cache=True,
                    ).last_hidden_state.to(self.device)
        except BaseException:  # an interrupt or out of memory may leave layers of different lengths
            self._cache, self.cached = self._new_cache(), 0
            for capture in captures:
                capture.crop(0)
            raise
        self.forwards += 1
        self.cached += tokens.shape[1]
        captured[len(self._layers)] = hidden
        for capture in captures:
            capture.add(captured)
        if inner:
            inner.update({layer: captured[layer] for layer in inner})
        return hidden

    @contextmanager
    def _capturing(self, captured: dict[int, Tensor]) -> Iterator[None]:
        """Store the inputs of the layers that are keys of `captured` during the `with` block."""

        def note(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
                captured[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        inner = [layer for layer in captured if layer < len(self._layers)]
        handles = [self._layers[i].register_forward_pre_hook(note(i), with_kwargs=True) for i in inner]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _crop(self, length: int) -> None:
        """Crop the cache to the first `length` tokens."""
        if length == 0 and self.cached and not (self._graphs is not None and self._graphs.fits(self._cache)):
            self._cache = self._new_cache()
        elif length < self.cached:
            self._cache.crop(length - self.cached)  # transformers counts the tokens to remove, as a negative number
        for capture in self._captures:
            capture.crop(length)
        self.cached = length
        self._free()

    def _free(self) -> None:
        """Free memory that only a longer context has needed."""
        layers = cast("list[GrowingKVCache]", self._cache.layers)
        needed = max(self.cached, self._capacity())
        if layers and layers[0].capacity > max(_SLACK * needed, KEPT if self._graphs is not None else _SMALL):
            for layer in layers:
                layer.shrink(needed)

    def _new_cache(self) -> Cache:
        return new_cache(self._capacity, zeroed=self._graphs is not None)

    def _capacity(self) -> int:
        """Return the number of tokens to allocate memory for: few sizes with graphs, which end with their memory."""
        if self._graphs is None:
            return self._reserved
        needed = self._reserved + CHAINS[-1]  # chains are padded
        if needed > KEPT:
            return -(-needed // KEPT) * KEPT
        return max(_GRAPHED, 1 << (needed - 1).bit_length())

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Compare `logits(backbone(x))` with the model's own forward on a few tokens."""
        size = text_config(self.model).vocab_size
        tokens = torch.tensor([[i % size for i in (1, 2, 3, 5, 7)]], device=self.device)
        own = self.model(input_ids=tokens, use_cache=False).logits
        hidden = self._backbone(input_ids=tokens, use_cache=False).last_hidden_state
        ours = self.logits(hidden)
        if self.fast is not None and not self.fast.agrees(tokens):
            self.fast = None  # transformers' own forward differs
        tolerance = 1e-4 if own.dtype == torch.float32 else 1e-2
        if own.shape != ours.shape or not torch.allclose(own.float(), ours.float(), rtol=tolerance, atol=tolerance):
            raise ModelError(
                f"{type(self.model).__name__} computes its logits in an unsupported way (not as lm_head of the final "
                "hidden state): choose another model"
            )
