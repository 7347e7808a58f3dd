"""A draft model with some of the target's tokens guesses for it: lossless, and in the target's ids."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import token_map
from parse_infer.models.token_sampling import distribution
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from tests.parse_infer.language_models import TokenCount, reduced_pair


@pytest.fixture
def pair(make_model) -> tuple[LanguageModel, LanguageModel]:
    return reduced_pair(make_model)


@pytest.fixture
def target(pair) -> LanguageModel:
    return pair[0]


@pytest.fixture
def draft(pair) -> LanguageModel:
    return pair[1]


def prompt_of(seed: int, n: int = 9) -> list[int]:
    return torch.randint(1, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
def test_greedy_tokens_are_the_targets_own(target, draft):
    drafter, forwards, n = DraftModelProposer(draft, target, tokens=4, confidence=0.0), 0, 0
    plain = Decoder(target.model, target.eos_ids)
    for seed in range(60):
        target.decoder.seek(prompt_of(seed))
        plain.seek(prompt_of(seed))
        before = target.decoder.forwards
        found = list(speculative_decode(target.decoder, drafter, 12))
        assert found == list(plain.decode(12)), f"prompt {seed}"
        forwards, n = forwards + target.decoder.forwards - before, n + len(found)
    assert drafter.forwards > 0 and forwards < 0.8 * n, "the draft model is never right"


@pytest.mark.slow
def test_sampling_keeps_the_distribution(target, draft):
    drafter, sampling = DraftModelProposer(draft, target, 3, confidence=0.1), Sampling(0.6, top_k=6)
    generator, draws = torch.Generator().manual_seed(0), 1200
    known = list(token_map(draft.tokenizer, target.tokenizer).target_ids)
    for seed in range(200):  # until a token may well come that the draft model does not have
        prompt = prompt_of(seed)
        target.decoder.seek(prompt)
        first = distribution(target.decoder.next_logits(), sampling).double()
        if 0.1 < 1 - first[known].sum() < 0.5:
            break
    else:
        raise AssertionError("choose another target")
    counts = torch.zeros(300, dtype=torch.float64)
    for _ in range(draws):
        target.decoder.seek(prompt[:-1])
        target.decoder.seek(prompt)
        counts[next(speculative_decode(target.decoder, drafter, 3, sampling, generator))] += 1
    possible = first > 0
    assert counts[~possible].sum() == 0
    expected = first[possible] / first.sum() * draws
    assert chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-4


def test_a_chain_is_the_draft_models_in_the_targets_ids(target, draft):
    tokens = token_map(draft.tokenizer, target.tokenizer)
    prompt = prompt_of(3)
    own = Decoder(draft.model, ())
    own.seek([i for token in prompt for i in tokens.from_target(token)])
    expected = target.tokenizer.convert_tokens_to_ids(draft.tokenizer.convert_ids_to_tokens(list(own.decode(5))))
    assert list(DraftModelProposer(draft, target, 5, 0.0).propose(prompt, 5, Sampling(), None).tokens) == expected


def test_drawn_tokens_come_with_their_distribution_over_the_targets_vocabulary(target, draft):
    tokens = token_map(draft.tokenizer, target.tokenizer)
    guess = DraftModelProposer(draft, target, 4, 0.0).propose(
        prompt_of(1), 4, Sampling(1.0), torch.Generator().manual_seed(0)
    )
    assert guess.drawn_from.shape == (len(guess.tokens), 300)
    assert torch.allclose(guess.drawn_from.sum(-1), torch.ones(len(guess.tokens)))
    foreign = [i for i in range(300) if i not in tokens.target_ids]
    assert foreign and not guess.drawn_from[:, foreign].any()
    assert all(guess.drawn_from[i, token] > 0 for i, token in enumerate(guess.tokens))


def test_the_draft_models_cache_follows_the_context(target, draft):
    drafter, prompt = DraftModelProposer(draft, target, 2, 0.0), prompt_of(2, 40)
    guess = drafter.propose(prompt, 2, Sampling(), None)
    with TokenCount(draft.model) as count:
        drafter.propose([*prompt, guess.tokens[0], 17], 2, Sampling(), None)
    assert sum(count.widths) <= 2 + 1, count.widths  # what is new, then a token of its own


def test_padding_of_the_target_and_a_full_window_end_proposals(target, draft):
    drafter = DraftModelProposer(draft, target, 4, 0.0)
    assert list(drafter.propose([], 4, Sampling(), None).tokens) == []
    draft.window = 12
    assert len(drafter.propose([40] * 10, 4, Sampling(), None).tokens) == 2
    assert list(drafter.propose([40] * 12, 4, Sampling(), None).tokens) == []
