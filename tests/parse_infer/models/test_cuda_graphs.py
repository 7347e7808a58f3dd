"""Short forwards as CUDA graphs. Without a GPU a stand-in for the capture runs the same function again."""

from __future__ import annotations

import pytest
import torch

from parse_infer.models import cuda_graphs
from parse_infer.models.cuda_graphs import GraphedChains
from parse_infer.models.decoder import Decoder

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
FAMILIES = ["llama", "llama_gqa", "qwen3"]  # of which `FastBackbone` exists


def run_again(run, device):
    """Return outputs that a replay overwrites, as those of a graph are."""
    outputs = run()

    def replay():
        for output, new in zip(outputs, run(), strict=True):
            output.copy_(new)

    return outputs, replay


@pytest.fixture
def graphed(make_model, monkeypatch):
    """`graphed(device, family)`: two decoders of one model, with graphs and without."""

    def make(device, family="llama_gqa", torch_compile=False):
        model = make_model(family).to(device)
        if device == "cpu":
            monkeypatch.setattr(cuda_graphs, "capture", run_again)
        decoder, plain = Decoder(model, ()), Decoder(model, ())
        assert decoder.fast is not None, family
        decoder._graphs, plain._graphs = GraphedChains(decoder.fast, torch_compile), None
        for each in (decoder, plain):
            each._cache = each._new_cache()
        return decoder, plain

    return make


def same(one, other):
    assert torch.allclose(one, other, atol=1e-4, rtol=1e-4), (one - other).abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_equal_plain_forwards(graphed, random_ids, device, family):
    """Chains of all lengths, kept in part, with plain forwards between them and in a second context."""
    decoder, plain = graphed(device, family)
    for context, seed in ((7, 0), (60, 1)):
        for each in (decoder, plain):
            each.seek(random_ids(context, seed=seed))
        same(decoder.next_logits(), plain.next_logits())
        for n in (1, 2, 8, 9, 31, 32, 33, 127, 128, 5):
            chain = random_ids(n, seed=n)
            same(decoder.look_ahead(chain), plain.look_ahead(chain))
            for each in (decoder, plain):
                each.keep(range(n // 2))
                assert each.cached == len(each.ids)
            same(decoder.next_logits(), plain.next_logits())
        assert list(decoder.decode(12)) == list(plain.decode(12))
    assert decoder.ids == plain.ids and decoder.forwards == plain.forwards
    assert {key[0] for key in decoder._graphs._graphs} == {1, 8, 32, 128}


@pytest.mark.parametrize("device", DEVICES)
def test_captured_states_equal_those_of_plain_forwards(graphed, random_ids, device):
    """What an EAGLE head reads."""
    decoder, plain = graphed(device)
    captures = [each.capture_hidden((0, 1, 2)) for each in (decoder, plain)]
    for each in (decoder, plain):
        each.seek(random_ids(9))
        list(each.decode(3))
        each.look_ahead(random_ids(6, seed=1))
        each.keep(range(4))
    (start, ours), (also, theirs) = (capture.pop_hidden() for capture in captures)
    assert start == also
    same(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_graphs_follow_the_cache_and_the_weights(graphed, random_ids, device, monkeypatch):
    """A cache that has grown, more keys than a graph covers, weights changed in place, and a replaced module."""
    monkeypatch.setattr(cuda_graphs, "KEYS", 16)
    decoder, plain = graphed(device)
    monkeypatch.setattr("parse_infer.models.decoder._GRAPHED", 32)
    monkeypatch.setattr("parse_infer.models.decoder.KEPT", 512)
    for each in (decoder, plain):
        each.seek(random_ids(5))
        each.next_logits()  # allocates memory for a short context only
    small = decoder._cache.layers[0].buffers[0].shape[2]
    for n in (100, 400):
        assert list(decoder.decode(n)) == list(plain.decode(n))
    assert decoder._cache.layers[0].buffers[0].shape[2] > small
    layer = decoder.model.model.layers[0]

    def changed():
        for each in (decoder, plain):
            each.seek([])
            each.seek(random_ids(5))
            each.next_logits()
        return decoder.look_ahead([3, 4, 5]), plain.look_ahead([3, 4, 5])

    before, _ = changed()
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(-2)
    ours, theirs = changed()
    assert not torch.allclose(ours, before)
    same(ours, theirs)
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.flip(0).clone()  # at another address
    assert not decoder._graphs.fits(decoder._cache)  # without a GPU, graphs would follow by themselves
    moved, theirs = changed()
    assert not torch.allclose(moved, ours)
    same(moved, theirs)
    layer.mlp.down_proj = torch.nn.Linear(layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features, False).to(
        device
    )
    replaced, theirs = changed()
    assert not torch.allclose(replaced, moved)
    same(replaced, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_all_layers_share_the_compiled_code(graphed, random_ids, device, monkeypatch):
    """One compilation for each length and number of keys, and the same results."""
    traced = []

    def backend(graph, inputs):
        traced.append(len(inputs))
        return graph.forward

    if device == "cpu":
        monkeypatch.setattr(
            cuda_graphs, "compiled", lambda f: torch.compile(f, fullgraph=True, dynamic=False, backend=backend)
        )
    decoder, plain = graphed(device, "qwen3", torch_compile=True)
    contexts = (40, 600) if device == "cpu" else (40,)  # compiling takes seconds for each shape
    for context in contexts:
        for each in (decoder, plain):
            each.seek(random_ids(context))
            each.reserve(1000, 0)
        same(decoder.next_logits(), plain.next_logits())
        for n in (7, 3):
            same(decoder.look_ahead(random_ids(n)), plain.look_ahead(random_ids(n)))
        assert list(decoder.decode(6)) == list(plain.decode(6))
    assert decoder._graphs._compiles and len(decoder._graphs._graphs) == 4 * len(contexts)
    if device == "cpu":
        assert len(traced) == 8, traced  # lengths times numbers of keys


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_capture_is_reported_once(graphed, random_ids, monkeypatch, device):
    """The decode goes on without graphs, and the GPU stays usable."""
    decoder, plain = graphed(device)
    run_layer = decoder._graphs._run_layer

    def synchronises(layer, x, *args):
        if device == "cpu":
            raise RuntimeError("operation not permitted when stream is capturing")
        if torch.cuda.is_current_stream_capturing():
            float(x.sum())
        return run_layer(layer, x, *args)

    decoder._graphs._run_layer = synchronises
    for each in (decoder, plain):
        each.seek(random_ids(9))
    with pytest.warns(UserWarning, match="without CUDA graphs, which is slower") as warned:
        found = list(decoder.decode(6))
    assert found == list(plain.decode(6)) and len(warned) == 1
    assert torch.rand(3, device=device).max() < 1
    assert not decoder._graphs.takes(1, 9)
    if device == "cuda":
        again, _ = graphed(device)
        again.seek(random_ids(9))
        assert list(again.decode(6)) == found and again._graphs._graphs


def test_without_a_compiler_the_graphs_remain(graphed, random_ids, monkeypatch):
    def fails(*_):
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(cuda_graphs, "compiled", lambda _: fails)
    decoder, plain = graphed("cpu", torch_compile=True)
    for each in (decoder, plain):
        each.seek(random_ids(9))
    with pytest.warns(UserWarning, match=r"without torch.compile, .*: Cannot find .*installation\.") as warned:
        found = list(decoder.decode(6))
    assert found == list(plain.decode(6)) and len(warned) == 1 and decoder._graphs._graphs


def test_large_memory_is_freed_with_its_context(graphed, random_ids, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "KEPT", 4096)
    for tokens, kept in ((2000, True), (5000, False)):
        decoder, _ = graphed("cpu")
        decoder.seek(random_ids(9))
        writing = decoder.decode(tokens)  # reserves memory for all
        assert len([next(writing) for _ in range(3)]) == 3
        cache = decoder._cache
        decoder.seek([])
        assert (decoder._cache is cache) == kept, tokens


def test_models_without_graphs_report_the_reason(make_model):
    with pytest.warns(UserWarning, match="torch_compile does nothing for LlamaForCausalLM in torch.float32 on cpu"):
        Decoder(make_model(), (), torch_compile=True)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_follow_a_new_cache_and_a_module_within_a_context(graphed, random_ids, device):
    """After an interrupted forward, and when another library wraps a linear layer."""
    decoder, plain = graphed(device)
    for each in (decoder, plain):
        each.seek(random_ids(9))
        list(each.decode(6))
        each._cache, each.cached = each._new_cache(), 0
        each.seek(random_ids(12, seed=3))
        each.next_logits()
        each.append(7)
    same(decoder.next_logits(), plain.next_logits())  # by a graph that was captured for the old cache
    same(decoder.look_ahead([3, 4]), plain.look_ahead([3, 4]))
    for each in (decoder, plain):
        each.keep([0])
    mlp = decoder.model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features, False).to(device)
    same(decoder.look_ahead([5, 6]), plain.look_ahead([5, 6]))


def test_limits_of_memory(graphed, random_ids, monkeypatch):
    decoder, _ = graphed("cpu")
    assert (
        decoder._graphs.takes(128, 8000) and decoder._graphs.takes(32, 30000) and not decoder._graphs.takes(128, 30000)
    )
    decoder.reserve(9, 1960)  # with the padding of a last chain, more than 2,048 tokens
    assert decoder._capacity() == 4096
    monkeypatch.setattr(cuda_graphs, "LARGEST", 3000)
    monkeypatch.setattr(cuda_graphs, "compiled", lambda function: function)
    decoder, _ = graphed("cpu", torch_compile=True)
    decoder.seek(random_ids(40))
    list(decoder.decode(2))
    assert {key[0] for key in decoder._graphs._graphs} == {1, 8, 32}
