"""The decoder: greedy decoding is transformers' own, the cache is exact after any seek, sampling is correct."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from parse_infer.judge.packing import probes
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.decoder import Decoder
from parse_infer.models.growing_kv_cache import GrowingKVCache
from parse_infer.models.token_sampling import RowSampling, choose
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.tree import branches
from tests.parse_infer.language_models import TokenCount

EOS = 258


@pytest.fixture
def decoder(make_model) -> Decoder:
    """Without end tokens, so that a random model decodes as long as it is asked to."""
    return Decoder(make_model("llama_gqa"), ())


def plain_hidden(model, ids: list[int]) -> torch.Tensor:
    """Final-norm hidden states of one ordinary forward without a cache: [T, H]."""
    with torch.no_grad():
        return model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("split", [False, True])
def test_greedy_equals_generate(model, random_ids, split):
    if split:
        enable_split_attention(model)
    decoder = Decoder(model, {EOS})
    for seed in range(3):
        prompt = random_ids(17, seed)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=EOS)
        decoder.seek(prompt)
        assert list(decoder.decode(24)) == expected[0, 17:].tolist()
        assert decoder.ids == expected[0].tolist()


def test_greedy_in_bfloat16(make_model, random_ids):
    model = make_model("llama_gqa", dtype=torch.bfloat16)
    decoder = Decoder(model, ())
    decoder.seek(random_ids(9))
    expected = model.generate(torch.tensor([random_ids(9)]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert list(decoder.decode(8)) == expected[0, 9:].tolist()


def test_seek_keeps_the_common_prefix(model, random_ids):
    """Whatever was decoded before, the continuation is that of a fresh decoder, and only new tokens are run."""
    decoder, fresh = Decoder(model, ()), Decoder(model, ())
    ids = random_ids(40)
    decoder.seek(ids)
    list(decoder.decode(10))
    for keep, extra in ((25, []), (25, [1, 2, 3]), (40, [5]), (3, [9]), (0, [4, 4])):
        context = ids[:keep] + extra
        decoder.seek(context)
        assert decoder.cached == keep and decoder.ids == context
        before = decoder.forwards
        found = list(decoder.decode(5))
        assert decoder.forwards - before == len(found)  # one for the context's rest, one per token but the last
        fresh.seek([])
        fresh.seek(context)
        assert found == list(fresh.decode(5))
        decoder.seek(ids)
        decoder.forward()


def test_seek_runs_nothing(decoder, random_ids):
    decoder.seek(random_ids(10))
    decoder.forward()
    decoder.seek(random_ids(10)[:4])
    assert (decoder.forwards, decoder.cached) == (1, 4)


def test_a_cached_context_is_never_run_twice(make_model, random_ids):
    """Tokens per forward, counted at the model."""
    model = make_model("llama_gqa")
    decoder, lengths = Decoder(model, ()), []
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    decoder.seek(random_ids(50))
    decoder.forward()
    decoder.forward([1, 2, 3])
    list(decoder.decode(3))
    decoder.seek(decoder.ids[:52])
    list(decoder.decode(2))
    handle.remove()
    assert lengths == [50, 4, 1, 1, 1, 1, 1]  # 4: the last prompt token again, for its hidden state


def test_decode_stops_after_eos_and_yields_it(make_model, random_ids):
    model = make_model("llama_gqa")
    free = Decoder(model, ())
    free.seek(random_ids(9))
    tokens = list(free.decode(12))
    stop = next(t for t in tokens if tokens.index(t) >= 3)
    decoder = Decoder(model, {stop})
    decoder.seek(random_ids(9))
    assert list(decoder.decode(12)) == tokens[: tokens.index(stop) + 1]


def test_an_abandoned_decode_leaves_a_sound_context(decoder, random_ids):
    decoder.seek(random_ids(9))
    whole = list(decoder.decode(10))
    decoder.seek(random_ids(9))
    iterator = decoder.decode(10)
    part = [next(iterator) for _ in range(4)]
    iterator.close()
    assert decoder.ids == random_ids(9) + part and decoder.cached == len(decoder.ids) - 1
    assert part + list(decoder.decode(6)) == whole


def test_no_budget_no_token(decoder, random_ids):
    decoder.seek(random_ids(3))
    assert list(decoder.decode(0)) == [] and decoder.forwards == 0


def test_next_logits_save_a_forward(decoder, random_ids):
    ids = random_ids(20)
    decoder.seek(ids)
    expected = list(decoder.decode(5))
    decoder.seek(ids[:8])
    hidden = decoder.forward(ids[8:]).hidden
    decoder.set_next_logits(decoder.logits(hidden[-1]))
    before = decoder.forwards
    assert list(decoder.decode(5)) == expected
    assert decoder.forwards - before == 4
    # known in the middle of a draft, and with context tokens still missing from the cache
    for cached in (12, 5):
        decoder.seek(ids[:cached])
        decoder.seek(ids[:12])
        decoder.set_next_logits(decoder.logits(hidden[12 - 8]))
        resumed = list(decoder.decode(4))
        fresh = Decoder(decoder.model, ())
        fresh.seek(ids[:12])
        assert resumed == list(fresh.decode(4))


def test_next_logits_are_forgotten_with_their_context(decoder, random_ids):
    decoder.seek(random_ids(9))
    expected = list(decoder.decode(3))
    decoder.seek(random_ids(8))
    decoder.set_next_logits(torch.full((260,), 0.0).index_fill(0, torch.tensor([77]), 9.0))
    decoder.seek(random_ids(9))
    assert list(decoder.decode(3)) == expected


def test_forward_gives_the_base_models_states(model, random_ids):
    ids = random_ids(40)
    decoder = Decoder(model, ())
    decoder.seek(ids[:30])
    output = decoder.forward(ids[30:])
    expected = plain_hidden(model, ids)[29:]
    assert output.hidden.shape == (11, 32) and output.trailing.shape == (0, 32)
    assert torch.allclose(output.hidden, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, 29:]
    assert torch.allclose(decoder.logits(output.hidden), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("split", [False, True])
def test_a_long_context_is_read_in_chunks(model, random_ids, split):
    """The same states as in one forward, of which none reads more than a chunk; each may be interrupted before."""
    if split:
        enable_split_attention(model)
    decoder, asked, ids = Decoder(model, ()), [], random_ids(75)
    decoder.prefill_chunk, decoder.before_forward = 16, lambda: asked.append(decoder.cached)
    expected = plain_hidden(model, ids)
    with TokenCount(model) as count:
        decoder.seek(ids[:40])
        first = decoder.next_logits()
        output = decoder.forward(ids[40:])
    assert count.widths == [16, 16, 8, 16, 16, 4] and asked == [0, 16, 32, 39, 55, 71]
    assert torch.allclose(first, decoder.logits(expected[39]), atol=1e-4, rtol=1e-5)
    assert output.hidden.shape == (36, 32)
    assert torch.allclose(output.hidden, expected[39:], atol=1e-5, rtol=1e-5)
    # One token more than a chunk, and a chain of guesses behind an unread context.
    for length, guesses in ((17, []), (40, ids[40:60])):
        decoder.seek([])
        decoder.seek(ids[:length])
        found = decoder.look_ahead(guesses)
        assert torch.allclose(found, expected[length - 1 : length + len(guesses)], atol=1e-5, rtol=1e-5)


def test_a_tree_after_a_long_context_is_read_with_the_last_chunk(make_model, random_ids):
    model = make_model("llama_gqa")
    enable_split_attention(model)
    ids, tokens, parents = random_ids(45), random_ids(5, seed=1), [-1, -1, 1, 1, 2]
    found = []
    for chunk in (16, 1000):
        decoder = Decoder(model, ())
        decoder.prefill_chunk = chunk
        decoder.seek(ids)
        with TokenCount(model) as count:
            found.append(decoder.look_ahead(branches(tokens, parents, len(ids), decoder.device)))
        assert count.widths == ([16, 16, 13 + 5] if chunk == 16 else [50])
        decoder.keep([1, 2, 4])
        found.append(decoder.forward(random_ids(3, seed=2)).hidden)
    for chunked, whole in zip(found[:2], found[2:], strict=True):
        assert torch.allclose(chunked, whole, atol=1e-5, rtol=1e-5)


def test_captured_states_of_all_chunks_are_kept(make_model, random_ids):
    found = []
    for chunk in (16, 1000):
        decoder = Decoder(make_model("llama_gqa"), ())
        capture = decoder.capture_hidden([0, 1, 2])
        decoder.prefill_chunk = chunk
        decoder.seek(random_ids(40))
        decoder.forward(random_ids(30, seed=1))
        found.append(capture.pop_hidden())
    assert found[0][0] == found[1][0] == 0 and found[0][1].shape == (70, 96)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forward", range(6))
def test_interrupted_between_chunks(make_model, random_ids, forward):
    """In the context or in what is read behind it: the decoder stays usable, and nothing is lost or doubled."""
    model = make_model("llama_gqa")
    decoder, calls, ids = Decoder(model, ()), [], random_ids(75)
    decoder.prefill_chunk = 16

    def interrupt():
        calls.append(1)
        if len(calls) == forward + 1:
            raise KeyboardInterrupt

    decoder.seek(ids[:40])
    decoder.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        decoder.forward(ids[40:])
        decoder.seek(ids[:20])
        decoder.forward(ids[20:60])
    decoder.before_forward = None
    for context in (decoder.ids, ids[:50]):
        decoder.seek(context)
        expected = plain_hidden(model, [*context, 5, 6])[len(context) - 1 :]
        assert torch.allclose(decoder.forward([5, 6]).hidden, expected, atol=1e-5, rtol=1e-5)


class Allocations:
    """Counts how often each layer's buffer gets new memory, and for how many tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        resize = GrowingKVCache._resize

        def counting(layer, tokens):
            resize(layer, tokens)
            self.sizes.append(layer.capacity)

        monkeypatch.setattr(GrowingKVCache, "_resize", counting)


@pytest.mark.slow
def test_a_known_budget_is_reserved_at_once(make_model, random_ids, monkeypatch):
    """No growth within it; only a larger one makes the buffer grow, and a huge one is not taken at its word."""
    model = make_model("llama_gqa", max_position_embeddings=200_000)
    decoder, layers = Decoder(model, ()), model.config.num_hidden_layers
    allocated = Allocations(monkeypatch)
    decoder.seek(random_ids(250))
    list(decoder.decode(600))
    assert len(allocated.sizes) == layers and 850 <= allocated.sizes[0] <= 950, allocated.sizes
    decoder.seek(decoder.ids[:300])  # the same memory for the next turn
    list(decoder.decode(500))
    assert len(allocated.sizes) == layers
    list(decoder.decode(700))
    assert len(allocated.sizes) == 2 * layers and 1500 <= allocated.sizes[-1] <= 1600, allocated.sizes
    decoder.seek([])
    decoder.seek(random_ids(10))
    allocated.sizes.clear()
    list(zip(range(3), decoder.decode(150_000), strict=False))
    assert len(allocated.sizes) == layers and allocated.sizes[0] < 5000, allocated.sizes


@pytest.mark.slow
def test_a_long_request_keeps_no_memory(make_model, random_ids):
    """Its cache shrinks with the next context, and what both share stays in it."""
    model = make_model("llama_gqa", max_position_embeddings=200_000)
    decoder, ids = Decoder(model, ()), random_ids(6000)
    layers = decoder._cache.layers
    decoder.seek(ids)
    expected = list(decoder.decode(2))
    assert layers[0].capacity >= 6000
    decoder.seek(ids[:40])
    short = list(decoder.decode(20))
    assert all(layer.capacity < 500 for layer in layers) and decoder.ids[:40] == ids[:40]
    for context, tokens in ((ids[:40], short), (ids, expected)):
        fresh = Decoder(model, ())
        fresh.seek(context)
        decoder.seek(context)
        assert list(fresh.decode(len(tokens))) == list(decoder.decode(len(tokens))) == tokens


def test_a_long_context_gets_its_memory_at_once(make_model, random_ids, monkeypatch):
    """Although it is read in chunks, and no budget is known."""
    decoder = Decoder(make_model("llama_gqa"), ())
    allocated, decoder.prefill_chunk = Allocations(monkeypatch), 64
    decoder.seek(random_ids(1000))
    decoder.forward(random_ids(200, seed=1))
    assert len(allocated.sizes) == 2 and 1200 <= allocated.sizes[0] <= 1300, allocated.sizes
    for token in range(100):
        decoder.forward([token])
    assert len(allocated.sizes) == 4, "doubled once"


def test_the_context_must_not_change_under_a_running_decode(decoder, random_ids):
    decoder.seek(random_ids(9))
    iterator = decoder.decode(10)
    next(iterator)
    decoder.seek(random_ids(5))
    with pytest.raises(RuntimeError, match="start a new decode"):
        next(iterator)


def test_an_interrupted_forward_does_not_spoil_the_cache(make_model, random_ids, monkeypatch):
    """Ctrl-C between two layers leaves the first one longer than the second."""
    model = make_model("llama_gqa")
    decoder = Decoder(model, ())

    update = GrowingKVCache.update

    def interrupted(layer, *states):
        if layer is decoder._cache.layers[1]:
            raise KeyboardInterrupt
        return update(layer, *states)

    decoder.seek(random_ids(9))
    iterator = decoder.decode(6)
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(GrowingKVCache, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    decoder.seek(random_ids(9))
    found = decoder.forward(random_ids(4, seed=1)).hidden
    expected = plain_hidden(model, random_ids(9) + random_ids(4, seed=1))[8:]
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
def test_an_interruption_before_proposals_are_kept(make_model, random_ids, tree):
    """Ctrl-C between look_ahead() and keep(): the same context again is whole, without the guesses."""
    model = make_model("llama_gqa")
    enable_split_attention(model)
    decoder, ids, guesses = Decoder(model, ()), random_ids(9), random_ids(3, seed=1)
    decoder.seek(ids)
    if tree:
        decoder.look_ahead(branches(guesses, [-1, -1, 0], len(ids), decoder.device))
    else:
        decoder.look_ahead(guesses)
    assert decoder.cached > len(ids)
    decoder.seek(ids)
    assert decoder.cached <= len(ids)
    following = random_ids(4, seed=2)
    expected = plain_hidden(model, ids + following)[8:]
    assert torch.allclose(decoder.forward(following).hidden, expected, atol=1e-5, rtol=1e-5)
    decoder.seek(ids)
    decoder.look_ahead(guesses)  # and without a seek in between
    assert torch.allclose(decoder.forward(following).hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [2, 6])
def test_keeping_a_path_costs_one_copy_of_each_tensor(make_model, random_ids, length):
    class Count(TorchDispatchMode):
        copies = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.copies += function.overloadpacket in (torch.ops.aten.index_copy_, torch.ops.aten.copy_)
            return function(*args, **(kwargs or {}))

    model = make_model("llama_gqa")
    enable_split_attention(model)
    decoder, ids = Decoder(model, ()), random_ids(9)
    decoder.seek(ids)
    guesses = random_ids(length + 1, seed=1)  # a wrong child of the root, then the path
    decoder.look_ahead(branches(guesses, [-1, -1, *range(1, length)], len(ids), decoder.device))
    with Count() as count:
        decoder.keep(range(1, length + 1))
    assert count.copies == 2 * model.config.num_hidden_layers
    expected = plain_hidden(model, ids + guesses[1:] + [5])[-1]
    assert torch.allclose(decoder.forward([5]).hidden[-1], expected, atol=1e-5, rtol=1e-5)


def test_bad_calls_are_named(decoder, random_ids):
    with pytest.raises(ValueError, match="context is empty"):
        list(decoder.decode(3))
    with pytest.raises(ValueError, match="context is empty"):
        decoder.forward([1, 2])
    decoder.seek(random_ids(4))
    with pytest.raises(ValueError, match="enable_split_attention"):
        decoder.forward([1], probes([2], [5], 5, decoder.device))
    with pytest.raises(ValueError, match="between 1 and 5 tokens"):
        probes([2], [6], 5, decoder.device)
    with pytest.raises(ValueError, match="at least one token"):
        probes([], [5], 5, decoder.device)
    assert decoder.ids == random_ids(4)


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "scaled",
    [
        lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
        lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)),
    ],
    ids=["cohere", "granite"],
)
def test_scaled_logits(scaled):
    model = scaled().eval()
    decoder = Decoder(model, ())
    decoder.seek([1, 2, 3])
    logits = decoder.logits(decoder.forward().hidden[-1])
    with torch.no_grad():
        assert torch.allclose(logits, model(torch.tensor([[1, 2, 3]])).logits[0, -1], atol=1e-5)


def test_a_model_with_other_logits_is_refused(make_model):
    class Squared(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits**2
            return output

    model = Squared(make_model("llama").config)
    with pytest.raises(ValueError, match="Squared computes its logits"):
        Decoder(model, ())


SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 6},
    {"temperature": 2.0, "top_p": 0.05},
    {"temperature": 1.0, "top_k": 100},
]


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_samples_follow_transformers_distribution(settings):
    sampling = Sampling(**settings)
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 2
    warped = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        warped = TopKLogitsWarper(sampling.top_k)(None, warped)
    if sampling.top_p < 1:
        warped = TopPLogitsWarper(sampling.top_p)(None, warped)
    expected = warped.softmax(-1)[0]
    n = 40_000
    draws = choose(logits.expand(n, -1), sampling, torch.Generator().manual_seed(0))
    found = torch.bincount(draws, minlength=30) / n
    assert not found[expected == 0].any()  # nothing outside the kept set
    assert (found - expected).abs().max() < 4 * (0.25 / n) ** 0.5  # four standard errors


def test_greedy_is_the_argmax():
    logits = torch.randn(5, 30)
    assert torch.equal(choose(logits, Sampling()), logits.argmax(-1))
    assert torch.equal(choose(logits, Sampling(temperature=1.0, top_k=1)), logits.argmax(-1))


def test_a_seed_fixes_the_decode_and_the_generator_moves_on(decoder, random_ids):
    def sampled(**how):
        decoder.seek([])
        decoder.seek(random_ids(9))
        return list(decoder.decode(12, **how))

    seeded = Sampling(temperature=1.5, seed=4)
    assert sampled(sampling=seeded) == sampled(sampling=seeded)
    assert sampled(sampling=seeded) != sampled(sampling=Sampling(temperature=1.5, seed=5))
    generator = torch.Generator().manual_seed(4)
    first = sampled(sampling=Sampling(temperature=1.5), generator=generator)
    assert first == sampled(sampling=seeded)
    assert first != sampled(sampling=Sampling(temperature=1.5), generator=generator)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": "all"}, "top_p"),
        ({"top_k": float("inf")}, "top_k"),
        ({"top_k": "3"}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_a_sampling_value_out_of_range_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**settings)


def test_a_whole_number_may_be_written_as_a_fraction_and_a_tiny_temperature_is_none(decoder, random_ids):
    decoder.seek(random_ids(5))
    greedy = list(decoder.decode(8))
    for settings in (Sampling(1e-40, seed=1), Sampling(1.0, top_k=1.0, seed=2.0)):
        decoder.seek(random_ids(5))
        assert list(decoder.decode(8, sampling=settings)) == greedy
    batch = RowSampling([Sampling(1e-40, seed=1), Sampling(1e-5, seed=1)], decoder.device)
    assert batch.choose(torch.tensor([[1.0, 3.0, 2.0]] * 2), [0.5, 0.5]).tolist() == [1, 1]
