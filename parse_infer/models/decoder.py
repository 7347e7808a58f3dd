"""One model, its KV cache and the token ids the cache stands for.

The only place that grows or crops the cache. The cache keeps every token in every layer (also in sliding-window
layers, whose window then comes from the mask), so that cropping back to any token is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from parse_infer.models.architecture import decoder_layers, layer_windows, output_layer, text_config
from parse_infer.models.attention import SPLIT_ATTENTION, layer_masks
from parse_infer.models.cpu.fast_backbone import FastBackbone
from parse_infer.models.growing_kv_cache import new_cache
from parse_infer.models.hidden_capture import HiddenCapture
from parse_infer.models.sampling import Sampling, choose, without

_MOST_RESERVED = 4096  # new tokens: few answers are longer, whatever their budget
_BEHIND = 64  # tokens read behind a context and dropped again: a tree of guesses


@dataclass(frozen=True)
class Trailing:
    """Tokens read behind the context in the same forward that are no part of it: probes, or a tree of guesses.

    Attributes:
        ids: n token ids.
        positions: int64 [n].
        mask: for the sliding window of a layer (None: it has none), what they see: bool [1, 1, n, context + n].
        within: entered for the forward that reads them, and for no other: what applies to these tokens alone.
    """

    ids: Sequence[int]
    positions: Tensor
    mask: Callable[[int | None], Tensor]
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class PassOutput:
    """Final-norm hidden states of one forward.

    Attributes:
        hidden: [1 + extra, H]: the last context token and every extra token. Entry i predicts extra token i.
        trailing: [n, H]: the trailing tokens.
    """

    hidden: Tensor
    trailing: Tensor


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many tokens both begin."""
    n = min(len(one), len(other))
    if list(one[:n]) == list(other[:n]):  # much faster than token by token
        return n
    return next(i for i in range(n) if one[i] != other[i])


class Decoder:
    """Decodes with `model` over a context of token ids (batch size 1), reusing whatever the cache already holds.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a decode.

    Attributes:
        ids: the context; `ids[:cached]` are in the cache.
        cached: number of tokens in the cache.
        forwards: model forwards so far.
        fast: the model's backbone without overhead, where it computes the same.
        edits: changes of the context from outside decode() so far.
        before_forward: called before every forward. What it raises ends the work at hand; the decoder stays usable.
        prefill_chunk: the most context tokens that one forward reads. It bounds the memory of a forward, and how long
            `before_forward` waits.

    Raises:
        ValueError: the cache of this model cannot be cropped exactly, or its logits are not
            `lm_head(backbone(x))` with a known scale or cap.
    """

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int]) -> None:
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
        self._cache = self._new_cache()
        self._next_logits: Tensor | None = None
        self._guessed: list[int] = []  # between look_ahead() and keep()
        self._captures: WeakSet[HiddenCapture] = WeakSet()
        self.edits = 0  # counts changes of the context from outside decode()
        self._check_logits()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def seek(self, ids: Sequence[int]) -> None:
        """Make `ids` the context: the longest common prefix with the cache stays, the rest of the cache is dropped.

        Runs no forward. Known next logits are forgotten unless the context stays as it was.
        """
        ids = list(ids)
        if ids == self.ids and self.cached <= len(ids):  # more in the cache: an interrupted look_ahead()
            return
        self._crop(min(self.cached, common_prefix(self.ids, ids)))
        self.ids = ids
        self._next_logits = None
        self.edits += 1

    def append(self, token_id: int) -> None:
        """Put one token behind the context: `seek([*ids, token_id])` in constant time."""
        if self.cached > len(self.ids):  # an interrupted look_ahead()
            self._crop(len(self.ids))
        self.ids.append(token_id)
        self._next_logits = None
        self.edits += 1

    @torch.inference_mode()
    def advance(self, token_id: int, token: Tensor) -> Tensor:
        """Append a token and read it: logits [V] of what follows. Nothing is sent to the device.

        Args:
            token: the same token where the model is, int64 [].
        """
        self.append(token_id)
        if self.cached == len(self.ids) - 1:
            position = torch.full((1, 1), self.cached, device=self.device)
            self._next_logits = self.logits(self._step(token.view(1, 1), position)[0, 0])
        return self.next_logits()

    def reserve(self, context: int, new: int) -> None:
        """Expect a context of this size, so that its cache gets memory once. Nothing is allocated now.

        Args:
            context: number of tokens that are known.
            new: the most tokens that may follow them; beyond 4,096 memory grows as it is needed.
        """
        self._reserved = context + min(new, _MOST_RESERVED) + _BEHIND

    @torch.inference_mode()
    def decode(
        self,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        banned_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield new tokens and append them to `ids`; stops after an EOS token (yielded too) or the budget.

        The last yielded token is in `ids` but not in the cache. The iterator may be dropped at any time. One device
        synchronisation per token: reading its id.

        Args:
            generator: random generator on the model's device; by default a fresh one from `sampling.seed`.
            banned_ids: tokens that are not chosen.

        Raises:
            ValueError: the context is empty.
            RuntimeError: the context was changed (seek, forward) while this iterator was still in use.
        """
        sampling = sampling or Sampling()
        if generator is None:
            generator = sampling.generator(self.device)
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
            token_id = int(token)  # synchronises with the device: the loop's exit test
            self.ids.append(token_id)
            self._next_logits = None
            yield token_id
            if self.edits != edits:
                raise RuntimeError("the context was changed during decode(): start a new decode() after seek()")
            if token_id in self.eos_ids or count == max_new_tokens:
                return
            if self.cached == len(self.ids) - 1:
                hidden = self._step(token.view(1, 1), position)[0, 0]
            else:  # next logits were given while context tokens were still missing from the cache
                hidden, edits = self._run([])[-1], self.edits
            logits = self.logits(hidden)
            position = position + 1

    @torch.inference_mode()
    def forward(self, extra_ids: Sequence[int] = (), trailing: Trailing | None = None) -> PassOutput:
        """One forward over [context tokens not cached yet, extra_ids, trailing tokens]; several for a long context.

        Afterwards `ids` ends with `extra_ids`, all of it is cached, and the trailing tokens are gone from the cache.

        Args:
            extra_ids: tokens appended to the context (a draft).
            trailing: see `Trailing`.

        Raises:
            ValueError: an empty context, or trailing tokens on a model whose attention is not split
                (`enable_split_attention`).
        """
        hidden = self._run(extra_ids, trailing)
        self._crop(len(self.ids))
        return PassOutput(hidden[: 1 + len(extra_ids)], hidden[1 + len(extra_ids) :])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of final-norm hidden states [..., H], with the model's own scale and cap."""
        return self._output_layer(hidden)

    def token_index(self, ids: Collection[int]) -> Tensor | None:
        """int64 [n] on the model's device; None for no token."""
        return torch.tensor(sorted(ids), device=self.device) if ids else None

    @property
    def knows_next(self) -> bool:
        """Whether `next_logits` needs no forward."""
        return self._next_logits is not None

    @torch.inference_mode()
    def next_logits(self) -> Tensor:
        """Logits [V] of the token after the context; runs a forward unless they are known."""
        if self._next_logits is None:
            self._next_logits = self.logits(self._run([])[-1])
        return self._next_logits

    @torch.inference_mode()
    def look_ahead(self, guessed: Sequence[int] | Trailing) -> Tensor:
        """One forward over [context tokens not cached yet, n guessed tokens]; `keep` or `seek` must follow.

        Args:
            guessed: a chain of token ids, or a tree.

        Returns:
            [1 + n, H]: the final-norm state after the last context token and after every guessed token.

        Raises:
            ValueError: an empty context, or a tree on a model whose attention is not split.
        """
        if isinstance(guessed, Trailing):
            hidden, tokens = self._run([], guessed), list(guessed.ids)
        else:
            hidden, tokens = self._run(guessed), list(guessed)
            del self.ids[len(self.ids) - len(tokens) :]
        self._guessed = tokens
        return hidden

    def capture_hidden(self, layers: Sequence[int]) -> HiddenCapture:
        """Capture what enters these layers for every token read, as long as the caller holds the result. The number
        behind the last layer stands for the final-norm state. (As `hidden_states` of transformers count.)

        The cache is emptied, so that no token of a context is missing.

        Raises:
            ValueError: a layer that the model does not have.
        """
        deepest = len(self._layers)
        wrong = [layer for layer in layers if not 0 <= layer <= deepest]
        if wrong:
            raise ValueError(
                f"{type(self.model).__name__} has layers 0 to {deepest}, so layer {wrong[0]} is not there"
            )
        self.seek([])
        capture = HiddenCapture(layers)
        self._captures.add(capture)
        return capture

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Append the guessed tokens on this path (from the root down) to the context and drop the others."""
        start = len(self.ids)
        if list(path) != list(range(len(path))):  # a chain stands where it belongs already
            nodes = torch.tensor(path, device=self.device)
            places = torch.arange(len(path), device=self.device)
            for layer in cast("list[Any]", self._cache.layers):
                for kept in (layer.keys, layer.values):
                    kept.index_copy_(2, start + places, kept.index_select(2, start + nodes))
            for capture in self._captures:  # the path first, so that the crop drops the rest
                capture.move(start, path)
        self.ids.extend(self._guessed[node] for node in path)
        self._crop(len(self.ids))
        self._next_logits = None
        self.edits += 1

    def set_next_logits(self, logits: Tensor) -> None:
        """Let the next `decode` choose its first token from these logits [V] instead of running a forward."""
        self._next_logits = logits

    def _run(self, extra_ids: Sequence[int], trailing: Trailing | None = None) -> Tensor:
        """Read [context tokens not cached yet, extra_ids, trailing tokens], a chunk at a time.

        `extra_ids` join the context. The trailing tokens stay in the cache behind it until it is cropped.

        Returns:
            [1 + extra + n, H]: the states of the last context token, of the extra and of the trailing tokens.
        """
        if not self.ids:
            raise ValueError("the context is empty: seek() to a prompt of at least one token first")
        if trailing is not None and text_config(self.model)._attn_implementation != SPLIT_ATTENTION:
            raise ValueError("probes and trees need split attention: call enable_split_attention(model) first")
        if self.cached >= len(self.ids):
            self._crop(len(self.ids) - 1)  # the last context token's hidden state is asked for
        past, text = self.cached, [*self.ids[self.cached :], *extra_ids]
        if len(text) > self.prefill_chunk:  # the memory for all chunks at once
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
            with nullcontext() if last is None else last.within():
                hidden = self._step(torch.tensor([tokens], device=self.device), positions[None], mask)[0]
            if stop > unused:
                kept.append(hidden[max(0, unused - start) :])
        self.ids.extend(extra_ids)
        self._next_logits = None
        self.edits += 1
        return torch.cat(kept)

    def _step(self, tokens: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None = None) -> Tensor:
        """One forward of the backbone, [1, T] -> [1, T, H]; the cache grows by T tokens."""
        if self.before_forward is not None:
            self.before_forward()
        captures = list(self._captures)
        heard = {layer: tokens for capture in captures for layer in capture.layers}
        try:
            if self.fast is not None:
                hidden = self.fast(tokens, positions, self._cache, cast("Tensor | None", mask), heard)
            else:
                with self._listening(heard):
                    hidden = self._backbone(
                        input_ids=tokens,
                        position_ids=positions,
                        attention_mask=mask,
                        past_key_values=self._cache,
                        use_cache=True,
                    ).last_hidden_state
        except BaseException:  # interrupted or out of memory: some layers may have grown, others not
            self._cache, self.cached = self._new_cache(), 0
            for capture in captures:
                capture.crop(0)
            raise
        self.forwards += 1
        self.cached += tokens.shape[1]
        heard[len(self._layers)] = hidden
        for capture in captures:
            capture.add(heard)
        return hidden

    @contextmanager
    def _listening(self, heard: dict[int, Tensor]) -> Iterator[None]:
        """Puts what enters the layers that are keys of `heard` during the block there; no other state is kept."""

        def note(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
                heard[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        inner = [layer for layer in heard if layer < len(self._layers)]
        handles = [self._layers[i].register_forward_pre_hook(note(i), with_kwargs=True) for i in inner]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _crop(self, length: int) -> None:
        """Drop everything after the first `length` tokens from the cache."""
        if length == 0 and self.cached:
            self._cache = self._new_cache()
        elif length < self.cached:
            self._cache.crop(length - self.cached)  # transformers counts the tokens to remove, as a negative number
        for capture in self._captures:
            capture.crop(length)
        self.cached = length

    def _new_cache(self) -> Cache:
        return new_cache(lambda: self._reserved)

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Compare `logits(backbone(x))` with the model's own forward on a few tokens."""
        size = text_config(self.model).vocab_size
        tokens = torch.tensor([[i % size for i in (1, 2, 3, 5, 7)]], device=self.device)
        own = self.model(input_ids=tokens, use_cache=False).logits
        hidden = self._backbone(input_ids=tokens, use_cache=False).last_hidden_state
        ours = self.logits(hidden)
        if self.fast is not None and not self.fast.agrees(tokens):
            self.fast = None  # transformers' own forward does something more
        tolerance = 1e-4 if own.dtype == torch.float32 else 1e-2
        if own.shape != ours.shape or not torch.allclose(own.float(), ours.float(), rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"{type(self.model).__name__} computes its logits in a way PARSE does not know "
                "(not lm_head of the final hidden state): choose another model"
            )
