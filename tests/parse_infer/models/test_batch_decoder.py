"""Batched decoding gives every row what it would get alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch
from transformers import PreTrainedModel

from parse_infer.models import batch_decoder
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.batch_decoder import BatchDecoder, BatchRow, Contexts
from parse_infer.models.batched_kv_cache import BatchedKVCache, KVLayer
from parse_infer.models.decoder import Decoder
from parse_infer.models.token_sampling import RowSampling, choose, uniform_numbers
from parse_infer.settings.sampling import Sampling, seed_of

EOS = set(range(0, 260, 6))  # many, or random models would seldom write one


@pytest.fixture
def sequences(random_ids: Callable[..., list[int]]) -> list[list[int]]:
    """Contexts of 3 to 30 tokens, longer and shorter than the sliding windows."""
    return [random_ids(n, seed=n) for n in (17, 3, 30, 9, 24, 12, 5)]


def make_rows(sequences: list[list[int]], n: int, sampled: bool = False) -> list[BatchRow]:
    random = Random(1)
    rows = []
    for i in range(n):
        context = random.randrange(len(sequences))
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=i) if sampled and i % 2 else Sampling()
        rows.append(BatchRow(context, random.randint(1, len(sequences[context])), random.randint(0, 12), sampling))
    return rows


def written_alone(model: PreTrainedModel, ids: list[int], n: int) -> list[int]:
    """Greedy tokens from plain forwards over the whole sequence: no cache, no batch, no padding."""
    written: list[int] = []
    while len(written) < n and not (written and written[-1] in EOS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids + written]), use_cache=False).logits
        written.append(int(logits[0, -1].argmax()))
    return written


@pytest.mark.parametrize("fast", [False, True])
def test_rows_from_all_prefixes_equal_single_decoding(
    model: PreTrainedModel, sequences: list[list[int]], fast: bool
) -> None:
    rows = make_rows(sequences, 14)
    expected = [written_alone(model, sequences[row.context][: row.length], row.max_new_tokens) for row in rows]
    assert any(ids and ids[-1] in EOS for ids in expected)
    enable_split_attention(model)
    backbone = Decoder(model, EOS).fast if fast else None
    if fast and (backbone is None or not backbone.steps_rows):
        pytest.skip("this architecture has no fused step")
    for batch_size in (1, 5, 64):
        decoder = BatchDecoder(model, EOS, batch_size, backbone)
        assert decoder.decode(decoder.prefill(sequences), rows) == expected
        assert decoder._steps_rows == fast
        prompts = decoder.prefill([ids[:2] for ids in sequences[:3]])
        parents = [i % 3 for i in range(len(sequences))]
        suffixes = [ids[2:] for ids in sequences]
        extended = decoder.extend(prompts, parents, suffixes)
        alone = decoder.prefill(extended.ids)
        assert decoder.decode(extended, rows) == decoder.decode(alone, rows)


def test_sampled_rows_do_not_depend_on_their_batch(
    make_model: Callable[..., PreTrainedModel], sequences: list[list[int]]
) -> None:
    model = make_model("llama_gqa")
    rows = make_rows(sequences, 16, sampled=True)
    results = []
    for batch_size in (1, 3, 64):
        decoder = BatchDecoder(model, EOS, batch_size)
        results.append(decoder.decode(decoder.prefill(sequences), rows))
    assert results[0] == results[1] == results[2]
    decoder = BatchDecoder(model, EOS)
    contexts = decoder.prefill(sequences)
    assert decoder.decode(contexts, rows[::-1]) == results[0][::-1]
    reseeded = [
        BatchRow(r.context, r.length, 12, Sampling(temperature=1.0, seed=s)) for s, r in enumerate(rows[:1] * 8)
    ]
    assert len({tuple(ids) for ids in decoder.decode(contexts, reseeded)}) > 4


def test_contexts_run_once_and_ended_rows_leave_the_batch(
    make_model: Callable[..., PreTrainedModel], sequences: list[list[int]]
) -> None:
    model = make_model("llama")
    widths: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: widths.append(tuple(args[0].shape)))
    decoder = BatchDecoder(model, EOS, batch_size=8)
    contexts = decoder.extend(decoder.prefill([[1, 2, 3]]), [0] * 7, sequences)
    assert widths == [(1, 3), (7, 30)]
    widths.clear()
    rows = [BatchRow(i % 7, 4, 1 + 2 * (i % 8)) for i in range(20)]
    written = decoder.decode(contexts, rows)
    assert all(width[1] == 1 for width in widths)
    assert len(widths) == decoder.steps
    assert decoder.tokens == sum(map(len, written))
    assert widths[0] == (8, 1) and widths[-1] == (1, 1)
    assert sum(width[0] for width in widths) == decoder.tokens  # with 8 seats no seat ever runs empty


def test_one_long_prompt_does_not_pad_the_others(make_model: Callable[..., PreTrainedModel], random_ids) -> None:
    """In a prefill and behind contexts; the results keep their order, and are what each row gets alone."""
    model = make_model("llama_gqa")
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    sequences = [random_ids(5 + n % 9, seed=n) for n in range(47)]
    sequences.insert(20, random_ids(1500, seed=99))
    tokens = sum(map(len, sequences))
    rows = [BatchRow(i, len(ids), 4) for i, ids in enumerate(sequences)]
    decoder = BatchDecoder(model, EOS)
    prefilled = decoder.prefill(sequences)
    assert sum(read) < 1.5 * tokens, f"{sum(read)} tokens are read for {tokens}"
    first = decoder.prefill([ids[:1] for ids in sequences])
    read.clear()
    extended = decoder.extend(first, range(48), [ids[1:] for ids in sequences])
    assert sum(read) < 1.5 * tokens, f"{sum(read)} tokens are read for {tokens}"
    assert prefilled.ids == extended.ids == sequences
    written = decoder.decode(prefilled, rows)
    assert written == decoder.decode(extended, rows)
    assert written == [decoder.decode(decoder.prefill([ids]), [BatchRow(0, len(ids), 4)])[0] for ids in sequences]


def test_prompts_of_about_one_length_are_read_at_once(make_model: Callable[..., PreTrainedModel], random_ids) -> None:
    model = make_model("llama_gqa")
    read: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    BatchDecoder(model, EOS).prefill([random_ids(60 + n % 30, seed=n) for n in range(48)])
    assert read == [(48, 89)]


def test_a_forward_reads_a_bounded_number_of_tokens(
    make_model: Callable[..., PreTrainedModel], random_ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations of a prefill are bounded, whatever the batch size; a longer prompt is read alone."""
    monkeypatch.setattr(batch_decoder, "GROUP_TOKENS", 200)
    model = make_model("llama_gqa")
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    sequences = [random_ids(40 + n % 10, seed=n) for n in range(20)] + [random_ids(300, seed=99)]
    decoder = BatchDecoder(model, EOS)
    prefilled = decoder.prefill(sequences)
    assert len(read) == 6 and sorted(read)[-2:] == [196, 300], read
    rows = [BatchRow(i, len(ids), 4) for i, ids in enumerate(sequences)]
    alone = [decoder.decode(decoder.prefill([ids]), [BatchRow(0, len(ids), 4)])[0] for ids in sequences]
    assert decoder.decode(prefilled, rows) == alone


def test_rows_come_and_go(make_model: Callable[..., PreTrainedModel], sequences: list[list[int]]) -> None:
    """One after the other, from contexts of different sizes, while others are under way."""
    model = make_model("llama")
    decoder = BatchDecoder(model, EOS)
    batch, waiting, runs = decoder.batch(), list(sequences), []
    batch.step()  # nobody is there
    while waiting or batch.runs:
        arriving = [waiting.pop() for _ in range(min(2, len(waiting)))]
        contexts = decoder.prefill(arriving) if arriving else None
        runs += [decoder.run(contexts, BatchRow(i, len(ids), 6)) for i, ids in enumerate(arriving)]
        batch.add(runs[len(runs) - len(arriving) :])
        if len(runs) == 2:
            runs[0].ended = True  # nobody wants it
        if len(batch.free) > 1 or not waiting:  # a single one waits for the next row
            batch.compact()
        batch.step()
    wanted = [written_alone(model, ids, 6) for ids in reversed(sequences)]
    assert runs[0].written == []
    assert [run.written for run in runs[1:]] == wanted[1:]


def test_new_rows_seldom_copy_the_others() -> None:
    """Or long runs, whose rows come one by one, fragment the memory."""
    keys, values = torch.randn(2, 1, 64, 4), torch.randn(2, 1, 64, 4)
    cache = BatchedKVCache([KVLayer(keys.clone(), values.clone())])
    (layer,), places = cache.kv, set()
    for n_rows in range(3, 43):
        cache.append(1)
        places |= {(layer.keys.data_ptr(), layer.values.data_ptr())}
        assert cache.n_rows == n_rows and layer.keys.is_contiguous()
    assert len(places) <= 4
    cache.reserve(65)
    cache.append(1)
    cache.keep([1, 42, 0])
    cache.append(2)
    for found, first in ((layer.keys, keys), (layer.values, values)):
        assert found.shape == (5, 1, 128, 4)
        torch.testing.assert_close(found[[2, 0], :, :64], first)
        assert not found[[1, 3, 4]].any() and not found[:, :, 64:].any()


def test_budgets_end_tokens_and_mistakes(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model("llama")
    decoder = BatchDecoder(model, set())
    contexts = decoder.prefill([[1, 2, 3], [4]])
    assert [
        len(ids) for ids in decoder.decode(contexts, [BatchRow(0, 3, 0), BatchRow(0, 3, 5), BatchRow(1, 1, 2)])
    ] == [0, 5, 2]
    assert decoder.decode(contexts, []) == []
    first = decoder.decode(contexts, [BatchRow(0, 2, 1)])[0][0]
    assert BatchDecoder(model, {first}).decode(contexts, [BatchRow(0, 2, 9)]) == [[first]]
    assert decoder.extend(contexts, [], []) == Contexts([], None)
    for length in (0, 4):
        with pytest.raises(ValueError, match="after 1 to 3 tokens"):
            decoder.decode(contexts, [BatchRow(0, length, 5)])
    with pytest.raises(ValueError, match="seed"):
        decoder.decode(contexts, [BatchRow(0, 1, 5, Sampling(temperature=1.0))])
    with pytest.raises(ValueError, match="at least one token"):
        decoder.prefill([[1], []])
    with pytest.raises(ValueError, match="batch_size is 0"):
        BatchDecoder(model, set(), 0)


def test_bfloat16_rows_decode(make_model: Callable[..., PreTrainedModel]) -> None:
    decoder = BatchDecoder(make_model("qwen3", dtype=torch.bfloat16), set(), 2)
    rows = [BatchRow(i, 2, 4, Sampling(temperature=0.7 * i, seed=i)) for i in range(3)]
    assert [len(ids) for ids in decoder.decode(decoder.prefill([[1, 2], [3, 4, 5], [6, 7]]), rows)] == [4, 4, 4]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.8)])
def test_evenly_spread_numbers_reproduce_the_distribution(top_k: int, top_p: float) -> None:
    n = 4000
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0)) * 2
    probabilities = (logits / 0.8).softmax(-1)
    order = probabilities.argsort(descending=True)
    if top_k:
        probabilities[order[top_k:]] = 0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    probabilities /= probabilities.sum()

    settings = RowSampling([Sampling(0.8, top_p, top_k, seed=0)] * n, torch.device("cpu"))
    chosen = settings.choose(logits.expand(n, -1), [(i + 0.5) / n for i in range(n)])
    counts = Counter(chosen.tolist())
    for token, probability in enumerate(probabilities.tolist()):
        assert abs(counts[token] / n - probability) < 2 / n


def test_extreme_numbers_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 3)
    settings = RowSampling([Sampling(temperature=1.0, seed=0)] * 2 + [Sampling()], torch.device("cpu"))
    assert settings.choose(logits, [0.0, 1.0, 0.0]).tolist() == [1, 2, 2]
    least = Sampling(temperature=1.0, top_p=1e-50, seed=0)
    assert choose(logits, least).tolist() == [2, 2, 2], "the first choice stays, however small top_p"
    assert RowSampling([least] * 3, torch.device("cpu")).choose(logits, [0.0, 0.5, 1.0]).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"temperature must be a number from 0 \(greedy\) to 1,000,000, not 1e\+39"):
        Sampling(temperature=1e39)


def test_seeds_and_draws_are_stable() -> None:
    assert seed_of(0, "a", 1) == seed_of(0, "a", 1) != seed_of(0, "a1")
    assert 0 <= seed_of("x") < 2**63
    sampling = Sampling(temperature=1.0, seed=seed_of("x"))
    assert uniform_numbers(sampling, 5) == uniform_numbers(sampling, 40)[:5]
    assert uniform_numbers(Sampling(), 5) == []
