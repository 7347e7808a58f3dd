"""CUDA graphs of short forwards: one launch instead of hundreds of kernels.

On a GPU, Python takes several times as long to launch the kernels of one decode step as they take to run
(docs/results/gpu.md). A graph replays them at once. It has fixed addresses and shapes: a chain is padded to
one of four lengths, and attention covers a fixed number of keys under a mask.

float16 has no graphs: values that overflow would stay in the cache's memory, and a mask does not hide them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from parse_infer.files import first_sentence
from parse_infer.models.cpu.fast_backbone import FastBackbone, Layer, rms_norm
from parse_infer.models.cpu.fused_step import rotate

CHAINS = (1, 8, 32, 128)  # tokens
KEYS, KEYS_FACTOR = 512, 4  # keys of the smallest graph, and how many times more the next one has
LARGEST = 2**20  # tokens times keys: attention scores are stored
KEPT = 8192  # tokens: memory for more is freed with the context
_RECOMPILES = 256  # forms of `_run_layer` in a process: shapes of models, chains and keys
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Graph:
    """A captured forward.

    Attributes:
        tokens: input, int64 [1, T].
        start: input, the position of the first token, int64 [].
        tables: of rotations; the graph reads them.
        outputs: the final-norm states and the inputs of some layers, [1, T, H] each; the next replay overwrites them.
        replay: runs the forward.
    """

    tokens: Tensor
    start: Tensor
    tables: tuple[Tensor, Tensor]
    outputs: Outputs
    replay: Callable[[], Any]


class GraphedChains:
    """Runs short chains after a cached context, with the results of `backbone` up to rounding.

    A graph is captured when it is first needed, and again if the cache has moved or modules have been replaced.
    Weights and hooks that changed otherwise are noticed when a context begins.

    Args:
        torch_compile: compile each layer, so that a graph has fewer and faster kernels. This takes up to a minute
            for each model and number of keys; PyTorch keeps the result on disk.
    """

    def __init__(self, backbone: FastBackbone, torch_compile: bool = False) -> None:
        self._backbone = backbone
        self._run_layer: Callable[..., Tensor] | None = compiled(_run_layer) if torch_compile else _run_layer
        self._compiles = torch_compile
        self._graphs: dict[tuple[int, int, tuple[int, ...]], _Graph] = {}
        self._fixed: tuple[Any, ...] = ()  # what the captured addresses belong to

    def takes(self, n: int, past: int) -> bool:
        """Whether n tokens after `past` cached ones run as a graph."""
        return self._run_layer is not None and past > 0 and n <= CHAINS[-1] and n * (past + n) <= LARGEST

    def fits(self, cache: Cache) -> bool:
        """Whether the memory of `cache` serves the next context, too, with the graphs captured for it."""
        layers: list[Any] = cache.layers
        unchanged = bool(self._fixed) and self._fixed[0] is self._backbone.refresh()
        return unchanged and layers[-1].buffers[0] is self._fixed[1] and self._fixed[1].shape[2] <= KEPT

    def __call__(self, tokens: Tensor, cache: Cache, captured: dict[int, Tensor]) -> Tensor | None:
        """Run one forward, [1, T] -> [1, T, H]; the cache grows by T tokens. None if no graph can be captured.

        Args:
            tokens: int64 [1, T], the tokens after the cache, which is not empty.
            captured: receives the inputs of the layers that are its keys.
        """
        layers: list[Any] = cache.layers
        n, past = tokens.shape[1], layers[0].length
        for layer in layers:
            layer.allocate(past + CHAINS[-1])
        modules, buffer = self._backbone.current_layers(), layers[-1].buffers[0]
        if not self._fixed or self._fixed[0] is not modules or self._fixed[1] is not buffer:
            self._graphs.clear()
            self._fixed = modules, buffer
        inner = tuple(sorted(layer for layer in captured if layer < len(layers)))
        graph = self._graph(next(size for size in CHAINS if size >= n), layers, inner)
        if graph is None:
            return None
        graph.tokens[:, :n].copy_(tokens)
        graph.start.fill_(past)
        graph.replay()
        hidden, *states = (output[:, :n].clone() for output in graph.outputs)
        captured.update(zip(inner, states, strict=True))
        for layer in layers:
            layer.length = past + n
        return hidden

    def _graph(self, size: int, layers: list[Any], inner: tuple[int, ...]) -> _Graph | None:
        """Return the graph of a length, captured if needed; with compiled layers, the graphs of all lengths are."""
        past, capacity = layers[0].length, layers[0].buffers[0].shape[2]
        graph = None
        for each in CHAINS if self._compiles else (size,):
            if each > size and each * (past + each) > LARGEST:
                break
            n_keys = KEYS
            while n_keys < past + each:
                n_keys *= KEYS_FACTOR
            key = each, min(n_keys, capacity), inner
            while key not in self._graphs and self._run_layer is not None:
                try:
                    self._graphs[key] = self._record(self._run_layer, layers, *key)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # for example, a layer that synchronises, or no compiler
                    self._give_up(error)
            graph = self._graphs.get(key) if each == size else graph
        return graph

    def _give_up(self, error: Exception) -> None:
        """Go on without compiled layers, or without graphs."""
        lost, self._run_layer = ("torch.compile", _run_layer) if self._compiles else ("CUDA graphs", None)
        self._compiles = False
        self._graphs.clear()
        warnings.warn(f"decoding without {lost}, which is slower: {first_sentence(error)}", stacklevel=4)

    def _record(
        self, run_layer: Callable[..., Tensor], layers: list[Any], size: int, n_keys: int, inner: tuple[int, ...]
    ) -> _Graph:
        backbone, memory = self._backbone, layers[0].buffers[0]
        device, groups = memory.device, backbone.groups
        tokens = torch.zeros(1, size, dtype=torch.int64, device=device)
        # The warm-up writes keys and values there, and every replay first writes its own.
        start = torch.full((), layers[0].length, dtype=torch.int64, device=device)
        tables = backbone.rotations(memory.shape[2], memory)
        seen = [[buffer[:, :, :n_keys] for buffer in layer.buffers] for layer in layers]
        modules = backbone.current_layers()

        def run() -> Outputs:
            positions = start + torch.arange(size, device=device)
            unseen = (torch.arange(n_keys, device=device) > positions[:, None]).repeat(groups, 1)
            cos, sin = (table[positions] for table in tables)
            x, states = backbone.embed(tokens), []
            for i, (layer, (keys, values)) in enumerate(zip(modules, seen, strict=True)):
                if i in inner:
                    states.append(x)
                x = run_layer(layer, x, cos, sin, positions, keys, values, unseen)
            return backbone.final_norm(x), *states

        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
            outputs, replay = capture(run, device)
        return _Graph(tokens, start, tables, outputs, replay)


def _run_layer(
    layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, unseen: Tensor
) -> Tensor:
    """Run one layer for a chain whose place is known to the device only.

    Args:
        x: [1, T, H], input; the output has the same shape.
        cos, sin: rotation of each token (`rotate`), [T, head size].
        positions: int64 [T].
        keys, values: memory of the layer's cache, [1, kv heads, keys, head size]; the chain's own are written to it.
        unseen: keys that a query does not see, bool [groups * T, keys]. Query heads that share keys and values become
            rows of one head.
    """
    n, size = x.shape[1], keys.shape[3]
    y = rms_norm(layer.before, x)
    query, key = layer.query(y).view(1, n, -1, size), layer.key(y).view(1, n, -1, size)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = rms_norm(layer.query_norm, query), rms_norm(layer.key_norm, key)
    query, key = rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin)
    keys.index_copy_(2, positions, key)
    values.index_copy_(2, positions, layer.value(y).view(1, n, -1, size).transpose(1, 2))
    # Fused attention kernels give one head to one multiprocessor, so they take long for few rows and many keys.
    rows = query.reshape(1, keys.shape[1], -1, size)
    # In 16 bits, scores would be rounded: large ones, as Qwen2 has, to the next half or integer.
    scores = rows.float() @ keys.float().transpose(-1, -2) * layer.scaling
    out = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(values.dtype) @ values
    x = x + layer.output(out.reshape(1, -1, n, size).transpose(1, 2).reshape(1, n, -1))
    y = rms_norm(layer.between, x)
    return x + layer.down(layer.activation(layer.gate(y)) * layer.up(y))


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile for fixed shapes. All layers of a model share the compiled code."""
    return torch.compile(function, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})


def capture(run: Callable[[], Outputs], device: torch.device) -> tuple[Outputs, Callable[[], Any]]:
    """Capture `run` after a warm-up; return its outputs and the function that computes them again."""
    graph, current, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), _stream(device)
    generator = torch.cuda.default_generators[stream.device_index]
    random_state = generator.clone_state()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            run()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs = run()
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(random_state)  # the old one stays in capture
                raise
    finally:
        current.wait_stream(stream)
    return outputs, graph.replay


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures: cuBLAS keeps memory for every stream."""
    return torch.cuda.Stream(device)
