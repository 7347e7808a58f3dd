"""One model, its KV cache and the token ids the cache stands for.

The only place that grows or crops the cache. The cache keeps every token in every layer (also in sliding-window
layers, whose window then comes from the mask), so that cropping back to any token is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parse_infer.attention import SPLIT_ATTENTION, layer_masks, layer_windows, text_config
from parse_infer.packing import probe_mask, probe_positions, tree_mask
from parse_infer.sampling import Sampling, choose

__all__ = ["Decoder", "PassOutput", "Sampling"]


@dataclass(frozen=True)
class PassOutput:
    """Final-norm hidden states of one forward.

    Attributes:
        hidden: [1 + extra, H]: the last context token and every extra token. Entry i predicts extra token i.
        probe_hidden: [K, H]: the last token of each probe.
    """

    hidden: Tensor
    probe_hidden: Tensor


class Decoder:
    """Decodes with `model` over a context of token ids (batch size 1), reusing whatever the cache already holds.

    Args:
        model: a decoder-only `transformers` language model in evaluation mode.
        eos_ids: tokens that end a decode.

    Attributes:
        ids: the context; `ids[:cached]` are in the cache.
        cached: number of tokens in the cache.
        forwards: model forwards so far.
        edits: changes of the context from outside decode() so far.

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
        self._windows = layer_windows(model)
        self._backbone = getattr(model, model.base_model_prefix)
        self._output_layer = output_layer(model)
        self._cache = DynamicCache()
        self._next_logits: Tensor | None = None
        self._guessed: list[int] = []  # between look_ahead() and keep()
        self._taps: tuple[int, ...] = ()
        self._tapped: list[Tensor] = []  # of the tokens from _tapped_from to cached
        self._tapped_from = 0
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
        if ids == self.ids:
            return
        common = min(self.cached, len(self.ids), len(ids))
        if ids[:common] != self.ids[:common]:
            common = next(i for i in range(common) if ids[i] != self.ids[i])
        self._crop(common)
        self.ids = ids
        self._next_logits = None
        self.edits += 1

    @torch.inference_mode()
    def decode(
        self, max_new_tokens: int, sampling: Sampling | None = None, generator: torch.Generator | None = None
    ) -> Iterator[int]:
        """Yield new tokens and append them to `ids`; stops after an EOS token (yielded too) or the budget.

        The last yielded token is in `ids` but not in the cache. The iterator may be dropped at any time. One device
        synchronisation per token: reading its id.

        Args:
            generator: random generator on the model's device; by default a fresh one from `sampling.seed`.

        Raises:
            ValueError: the context is empty.
            RuntimeError: the context was changed (seek, forward) while this iterator was still in use.
        """
        sampling = sampling or Sampling()
        if generator is None:
            generator = sampling.generator(self.device)
        if max_new_tokens <= 0:
            return
        logits = self.next_logits()
        position = torch.tensor([[len(self.ids)]], device=self.device)
        self.edits += 1
        edits = self.edits
        for count in range(1, max_new_tokens + 1):
            token = choose(logits, sampling, generator)
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
    def forward(
        self, extra_ids: Sequence[int] = (), *, probe_ids: Sequence[int] = (), visible: Sequence[int] = ()
    ) -> PassOutput:
        """One forward over [context tokens not cached yet, extra_ids, one probe per entry of `visible`].

        Afterwards `ids` ends with `extra_ids`, all of it is cached, and the probes are gone from the cache.

        Args:
            extra_ids: tokens appended to the context (a draft).
            probe_ids: the P tokens of a probe, the same for every probe.
            visible: for each of the K probes, how many tokens of context + extra_ids it sees.

        Raises:
            ValueError: empty context, a probe that sees more tokens than there are, or probes on a model whose
                attention is not split (`enable_split_attention`).
        """
        total = len(self.ids) + len(extra_ids)
        if len(visible) and not len(probe_ids):
            raise ValueError("a probe needs at least one token")
        if any(not 0 < v <= total for v in visible):
            raise ValueError(f"a probe sees between 1 and {total} tokens here, not {list(visible)}")
        probed = len(visible) * len(probe_ids)
        if probed:
            cuts, p = torch.tensor([list(visible)], device=self.device), len(probe_ids)
            hidden = self._run(
                extra_ids,
                list(probe_ids) * len(visible),
                probe_positions(cuts, p)[0],
                lambda window: probe_mask(cuts, p, total, window),
            )
            self._crop(total)
        else:
            hidden = self._run(extra_ids)
        text, probes = hidden[: len(hidden) - probed], hidden[len(hidden) - probed :]
        readout = probes[len(probe_ids) - 1 :: len(probe_ids)] if probed else probes
        return PassOutput(hidden=text[len(text) - 1 - len(extra_ids) :], probe_hidden=readout)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of final-norm hidden states [..., H], with the model's own scale and cap."""
        return self._output_layer(hidden)

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
    def look_ahead(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """One forward over [context tokens not cached yet, a tree of guessed tokens]; `keep` must follow.

        Args:
            tokens: n token ids.
            parents: for each the index of the token it follows, -1 the context's last; parents stand before children.

        Returns:
            [1 + n, H]: the final-norm state after the last context token and after every guessed token.

        Raises:
            ValueError: an empty context, or a tree with branches on a model whose attention is not split.
        """
        n, chain = len(tokens), list(parents) == list(range(-1, len(tokens) - 1))
        if chain:
            hidden = self._run(tokens)
            del self.ids[len(self.ids) - n :]
        else:
            depth = [0] * n
            sees = torch.eye(n, dtype=torch.bool)
            for i, parent in enumerate(parents):
                if parent >= 0:
                    depth[i] = depth[parent] + 1
                    sees[i] |= sees[parent]
            start = len(self.ids)
            steps, sees = torch.tensor(depth, device=self.device), sees.to(self.device)
            hidden = self._run([], tokens, start + steps, lambda window: tree_mask(sees, steps, start, window))
        self._guessed = list(tokens)
        return hidden[len(hidden) - n - 1 :]

    def tap(self, layers: Sequence[int]) -> None:
        """From now on keep what stands behind these layers (0: the embeddings) for every token read, until `drain`.

        The cache is emptied, so that no token of a context is missing.

        Raises:
            ValueError: a layer that the model does not have.
        """
        deepest = text_config(self.model).num_hidden_layers
        wrong = [layer for layer in layers if not 0 <= layer <= deepest]
        if wrong:
            raise ValueError(
                f"{type(self.model).__name__} has layers 0 to {deepest}, so layer {wrong[0]} is not there"
            )
        self.seek([])
        self._taps = tuple(layers)

    def drain(self) -> tuple[int, Tensor | None]:
        """What `tap` kept since the last call: position of the first token, and [n, len(layers) * H] (None: nothing).

        Tokens that have left the context are not among them; a first position below the one that the last call ended
        at says that the context was cut back to there.
        """
        start, kept = self._tapped_from, self._tapped
        self._tapped_from, self._tapped = self.cached, []
        return start, torch.cat(kept) if kept else None

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Append the guessed tokens on this path (from the root down) to the context and drop the others."""
        start = len(self.ids)
        for position, node in enumerate(path, start):
            if start + node != position:  # a chain stands where it belongs already
                for layer in self._cache.layers:
                    for kept in (cast(Any, layer).keys, cast(Any, layer).values):
                        kept[:, :, position] = kept[:, :, start + node]
        if self._tapped:  # the path first, so that the crop drops the rest
            rows, first = torch.cat(self._tapped), start - self._tapped_from
            order = torch.arange(len(rows), device=rows.device)
            order[first : first + len(path)] = first + torch.tensor(path, dtype=torch.long, device=rows.device)
            self._tapped = [rows[order]]
        self.ids.extend(self._guessed[node] for node in path)
        self._crop(len(self.ids))
        self._next_logits = None
        self.edits += 1

    def set_next_logits(self, logits: Tensor) -> None:
        """Let the next `decode` choose its first token from these logits [V] instead of running a forward."""
        self._next_logits = logits

    def _run(
        self,
        extra_ids: Sequence[int],
        trailing_ids: Sequence[int] = (),
        trailing_positions: Tensor | None = None,
        trailing_mask: Callable[[int | None], Tensor] | None = None,
    ) -> Tensor:
        """One forward over [context tokens not cached yet, extra_ids, trailing_ids]; hidden states of all, [T, H].

        `extra_ids` join the context. The trailing tokens (probes, a tree) have positions [n] and a mask of their own
        for each sliding window; they stay in the cache behind the context until it is cropped.
        """
        if not self.ids:
            raise ValueError("the context is empty: seek() to a prompt of at least one token first")
        if self.cached == len(self.ids):
            self._crop(self.cached - 1)  # the last context token's hidden state is asked for
        past, text = self.cached, [*self.ids[self.cached :], *extra_ids]
        tokens = torch.tensor([[*text, *trailing_ids]], device=self.device)
        positions = torch.arange(past, past + len(text), device=self.device)
        mask = None
        if trailing_positions is not None and trailing_mask is not None:
            if text_config(self.model)._attn_implementation != SPLIT_ATTENTION:
                raise ValueError("probes and trees need split attention: call enable_split_attention(model) first")
            positions = torch.cat([positions, trailing_positions])
            mask = layer_masks(self._windows, trailing_mask)
        hidden = self._step(tokens, positions[None], mask)[0]
        self.ids.extend(extra_ids)
        self._next_logits = None
        self.edits += 1
        return hidden

    def _step(self, tokens: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None = None) -> Tensor:
        """One forward of the backbone, [1, T] -> [1, T, H]; the cache grows by T tokens."""
        try:
            output = self._backbone(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                output_hidden_states=bool(self._taps),
            )
        except BaseException:  # interrupted or out of memory: some layers may have grown, others not
            self._cache, self.cached = DynamicCache(), 0
            self._tapped, self._tapped_from = [], 0
            raise
        self.forwards += 1
        self.cached += tokens.shape[1]
        if self._taps:
            self._tapped.append(torch.cat([output.hidden_states[layer][0] for layer in self._taps], dim=-1))
        return output.last_hidden_state

    def _crop(self, length: int) -> None:
        """Drop everything after the first `length` tokens from the cache."""
        if length == 0 and self.cached:
            self._cache = DynamicCache()
        elif length < self.cached:
            self._cache.crop(length - self.cached)  # transformers counts the tokens to remove, as a negative number
        dropped = self.cached - length
        while dropped > 0 and self._tapped:
            left = len(self._tapped[-1]) - dropped
            if left > 0:
                self._tapped[-1] = self._tapped[-1][:left]
                break
            dropped -= len(self._tapped.pop())
        self._tapped_from = min(self._tapped_from, length)
        self.cached = length

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Compare `logits(backbone(x))` with the model's own forward on a few tokens."""
        size = text_config(self.model).vocab_size
        tokens = torch.tensor([[i % size for i in (1, 2, 3, 5, 7)]], device=self.device)
        own = self.model(input_ids=tokens, use_cache=False).logits
        ours = self.logits(self._backbone(input_ids=tokens, use_cache=False).last_hidden_state)
        tolerance = 1e-4 if own.dtype == torch.float32 else 1e-2
        if own.shape != ours.shape or not torch.allclose(own.float(), ours.float(), rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"{type(self.model).__name__} computes its logits in a way PARSE does not know "
                "(not lm_head of the final hidden state): choose another model"
            )


def output_layer(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """From final-norm hidden states [..., H] to logits [..., V], with the model's own scale and cap."""
    lm_head, config = model.get_output_embeddings(), text_config(model)
    # Cohere multiplies its logits, Granite divides them, Gemma caps them.
    multiplier = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    softcap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        result = lm_head(hidden)
        if multiplier != 1:
            result = result * multiplier
        return result if softcap is None else torch.tanh(result / softcap) * softcap

    return logits
