"""Token-level speculation: the same tokens, the same distribution, fewer forwards, an exact cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from scipy.stats import chisquare

from parse_infer.models.attention import enable_split_attention
from parse_infer.models.decoder import Decoder
from parse_infer.models.token_sampling import choose, distribution, draw
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.decode import accept_tree, speculative_decode
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter
from parse_infer.token_drafters.proposer import ROOT, TokenTree
from tests.parse_infer.language_models import language_model, resembling, word_tokenizer

EOS = 258


class Oracle:
    """Guesses what really comes (it is told), hidden in a tree of wrong tokens; `luck` of the levels are right."""

    forwards = 0

    def __init__(self, truth: Sequence[int], luck: float, branches: bool, seed: int = 0) -> None:
        self.truth, self.luck, self.branches, self.rng = list(truth), luck, branches, Random(seed)

    def propose(self, ids, limit, sampling, generator) -> TokenTree:
        tokens, parents, parent = [], [], ROOT
        for depth in range(min(limit, 4)):
            right = self.truth[len(ids) + depth] if len(ids) + depth < len(self.truth) else 0
            wrong = [t for t in self.rng.sample(range(200), 3) if t != right][: 2 if self.branches else 0]
            level = [right if self.rng.random() < self.luck else (right + 1) % 200, *wrong]
            self.rng.shuffle(level)
            if not self.branches:
                level = level[:1]
            start = len(tokens)
            tokens += level
            parents += [parent] * len(level)
            parent = start + (level.index(right) if right in level else 0)
        return TokenTree(tokens, parents)


def written(model, prompt: list[int], n: int) -> list[int]:
    decoder = Decoder(model, ())
    decoder.seek(prompt)
    return list(decoder.decode(n))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("luck", [0.0, 0.7, 1.0])
def test_greedy_tokens_are_the_models_own(model, random_ids, branches, luck):
    enable_split_attention(model)
    for seed in range(3):
        prompt = random_ids(21, seed)
        expected = written(model, prompt, 30)
        decoder = Decoder(model, ())
        decoder.seek(prompt)
        found = list(speculative_decode(decoder, Oracle(prompt + expected, luck, branches, seed), 30))
        assert found == expected
        if luck == 1:
            assert decoder.forwards <= 1 + 30 // 4, decoder.forwards
        # The cache holds exactly the accepted path: what follows is what a fresh decoder writes.
        decoder.seek(prompt + expected[:25])
        assert list(decoder.decode(5)) == expected[25:]


def test_a_draft_model_needs_a_decoder_of_its_own(make_model, tokenizer):
    lm = language_model(make_model("llama"), tokenizer)
    with pytest.raises(ValueError, match="must not share a decoder"):
        DraftModelProposer(lm, lm)
    DraftModelProposer(replace(lm), lm)


@pytest.mark.slow
def test_two_hundred_prompts_greedy_with_a_draft_model(make_model, tokenizer, random_ids):
    target, small = make_model("llama_gqa"), make_model("llama_gqa")
    with torch.no_grad():
        for mine, its in zip(small.parameters(), target.parameters(), strict=True):
            mine.copy_(its + 0.05 * its.std() * torch.randn(its.shape, generator=torch.Generator().manual_seed(1)))
    lm, draft = language_model(target, tokenizer, "target"), language_model(small, tokenizer, "draft")
    drafter = DraftModelProposer(draft, lm, tokens=4, confidence=0.0)
    forwards = 0
    for seed in range(200):
        prompt = random_ids(9, seed)
        lm.decoder.seek(prompt)
        before = lm.decoder.forwards
        found = list(speculative_decode(lm.decoder, drafter, 12))
        forwards += lm.decoder.forwards - before
        expected = written(target, prompt, 12)
        assert found == expected[: expected.index(EOS) + 1 if EOS in expected else 12], f"prompt {seed}"
    assert forwards < 200 * 12 * 0.8, "the draft model is never right"
    assert drafter.forwards > 0


def test_an_end_token_and_the_budget_end_it(make_model, random_ids):
    model = make_model("llama")
    prompt = random_ids(12)
    expected = written(model, prompt, 20)
    end = expected[7]
    first = expected.index(end)
    decoder = Decoder(model, {end})
    decoder.seek(prompt)
    assert list(speculative_decode(decoder, Oracle(prompt + expected, 1.0, False), 20)) == expected[: first + 1]
    for budget in (0, 1, 2, 5, 9):
        decoder = Decoder(model, ())
        decoder.seek(prompt)
        assert list(speculative_decode(decoder, Oracle(prompt + expected, 1.0, False), budget)) == expected[:budget]


def test_known_logits_cost_no_forward(make_model, random_ids):
    model = make_model("llama")
    prompt = random_ids(12)
    decoder = Decoder(model, ())
    decoder.seek(prompt)
    decoder.next_logits()
    before = decoder.forwards
    tokens = speculative_decode(decoder, PromptLookupDrafter(), 5)
    assert next(tokens) == written(model, prompt, 1)[0]
    assert decoder.forwards == before


def test_a_changed_context_is_detected(make_model, random_ids):
    decoder = Decoder(make_model("llama"), ())
    decoder.seek(random_ids(12))
    tokens = speculative_decode(decoder, PromptLookupDrafter(), 5)
    next(tokens)
    decoder.seek(random_ids(3))
    with pytest.raises(RuntimeError, match="context was changed"):
        next(tokens)


def expected_pairs(logits: torch.Tensor, second: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probability of each pair (first token, second token): second[t] are the logits behind first token t."""
    return distribution(logits, sampling)[:, None] * distribution(second, sampling)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *(("drawn chain", each) for each in (Sampling(0.5), Sampling(1.6), Sampling(1.0, top_k=3))),
        *(("drawn chain that ends in doubt", each) for each in (Sampling(1.0), Sampling(1.2, top_p=0.7))),
        *(("fixed tree", each) for each in (Sampling(1.0), Sampling(1.0, top_k=3))),
    ],
    ids=str,
)
@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution(kind, sampling):
    """Chi-square over pairs of tokens: whatever is guessed, pairs come as often as from the model alone."""
    size, draws = 5, 4000
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randn(size, generator=generator) * 1.5, torch.randn(size, size, generator=generator) * 1.5
    other = torch.randn(size, generator=generator) * 1.5  # what the drafter believes
    q = distribution(other, Sampling(sampling.temperature))
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(draws):
        if kind.startswith("drawn chain"):
            drawn_from = torch.stack([q, q.flip(0)])
            tokens = draw(drawn_from, generator).tolist()
            if kind.endswith("doubt") and q[tokens[0]] < q.median():
                tokens = tokens[:1]
            guess = TokenTree.chain(tokens, drawn_from[: len(tokens)])
        else:
            tokens = [0, 2, 1, 3]
            guess = TokenTree(tokens, [ROOT, ROOT, 0, 0])
        logits = torch.stack([first, *(second[t] for t in tokens)])
        path, last = accept_tree(logits, guess, sampling, generator)
        pair = [*(tokens[node] for node in path), last][:2]
        if len(pair) < 2:
            pair.append(int(choose(second[pair[0]], sampling, generator)))
        counts[pair[0], pair[1]] += 1
    expected = expected_pairs(first, second, sampling).flatten() * draws
    found = torch.tensor([counts[a, b] for a in range(size) for b in range(size)], dtype=torch.float64)
    possible = expected > 0
    assert found[~possible].sum() == 0, "a token that the sampling settings rule out"
    common = expected > 5
    pooled_found = torch.cat([found[common], found[possible & ~common].sum()[None]])
    pooled_expected = torch.cat([expected[common], expected[possible & ~common].sum()[None]]).double()
    keep = pooled_expected > 0
    pooled_expected *= draws / pooled_expected.sum()
    assert chisquare(pooled_found[keep].numpy(), pooled_expected[keep].numpy()).pvalue > 1e-4


@pytest.mark.slow
def test_block_verification_keeps_more_than_token_by_token():
    """The same chains, judged as a whole and token by token (Leviathan et al.)."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(5, 6, generator=generator).softmax(-1)
    q = torch.randn(4, 6, generator=generator).softmax(-1)
    whole = one_by_one = 0
    for _ in range(4000):
        tokens = draw(q, generator).tolist()
        whole += len(accept_tree(p.log(), TokenTree.chain(tokens, q), Sampling(1.0), generator)[0])
        for i, token in enumerate(tokens):
            if torch.rand((), generator=generator) * q[i, token] >= p[i, token]:
                break
            one_by_one += 1
    assert whole > 1.02 * one_by_one, (whole, one_by_one)


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": 3, "confidence": 0.1}, {}, {"tokens": 3, "confidence": 0.1, "greedy": 1}, {"greedy": 1}],
    ids=["fixed", "measured", "fixed, greedy", "measured, greedy"],
)
@pytest.mark.slow
def test_sampling_through_a_draft_model_keeps_the_distribution(make_model, tokenizer, random_ids, sizes):
    """End to end: the first token of a real decode comes as often as the model alone draws it."""
    target = make_model("llama")
    lm = language_model(target, tokenizer, "target")
    draft = language_model(resembling(make_model, target, 0.3), tokenizer, "draft")
    drafter, prompt, sampling = DraftModelProposer(draft, lm, **sizes), random_ids(8), Sampling(0.6, top_k=4)
    generator = torch.Generator().manual_seed(0)
    lm.decoder.seek(prompt)
    first = distribution(lm.decoder.next_logits(), sampling)
    counts = torch.zeros(len(first), dtype=torch.float64)
    for _ in range(1500):
        lm.decoder.seek(prompt[:-1])
        lm.decoder.seek(prompt)
        counts[next(speculative_decode(lm.decoder, drafter, 3, sampling, generator))] += 1
    possible = first > 0
    assert counts[~possible].sum() == 0
    assert (
        chisquare(counts[possible].numpy(), (first[possible].double() / first.double().sum() * 1500).numpy()).pvalue
        > 1e-6
    )


def test_lookup_proposes_what_followed_the_latest_match():
    lookup, sampling = PromptLookupDrafter(tokens=3, max_ngram=3, min_ngram=2), Sampling()
    guess = lookup.propose([1, 2, 3, 9, 9, 1, 2, 3, 7, 8, 5, 1, 2, 3], 10, sampling, None)
    assert (list(guess.tokens), list(guess.parents)) == ([7, 8, 5], [-1, 0, 1])
    assert list(lookup.propose([4, 2, 3, 6, 1, 2, 3], 1, sampling, None).tokens) == [6]
    for nothing in ([1], [1, 2, 3, 4], [3, 1, 3]):
        assert not lookup.propose(nothing, 10, sampling, None).tokens
    assert not lookup.propose([1, 2, 1, 2], 0, sampling, None).tokens
    with pytest.raises(ValueError, match="min_ngram=3"):
        PromptLookupDrafter(max_ngram=2, min_ngram=3)


def test_a_draft_models_chain_ends_in_doubt(make_model, tokenizer, random_ids):
    lm, draft = (language_model(make_model("llama"), tokenizer) for _ in range(2))
    prompt = random_ids(9)
    expected = written(draft.model, prompt, 8)
    with torch.no_grad():
        logits = draft.model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    sure = logits.softmax(-1).amax(-1)
    for confidence in (0.0, float(sure.min()) + 1e-4, float(sure.median()), 1.0):
        doubts = [i for i, p in enumerate(sure.tolist()) if p < confidence]
        guess = DraftModelProposer(draft, lm, 8, confidence).propose(prompt, 8, Sampling(), None)
        assert list(guess.tokens) == expected[: doubts[0] + 1 if doubts else 8]
    with pytest.raises(ValueError, match="confidence is a probability, not 2"):
        DraftModelProposer(draft, lm, confidence=2)


def test_a_draft_model_needs_the_same_tokenizer(make_model, tokenizer):
    lm = language_model(make_model("llama"), tokenizer)
    other = language_model(make_model("llama", vocab_size=300), word_tokenizer())
    with pytest.raises(ValueError, match="tokenizers differ"):
        DraftModelProposer(other, lm)
