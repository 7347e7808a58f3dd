"""Prompt lookup follows its context token by token, and guesses what a search of the whole context would find."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter


def searched(ids: Sequence[int], size: int, max_ngram: int, min_ngram: int) -> list[int]:
    """What followed the latest earlier place of the longest tail: the definition, by looking everywhere."""
    for n in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if list(ids[start : start + n]) == list(ids[-n:]):
                return list(ids[start + n : start + n + size])
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(4, 2), (1, 1), (3, 3), (6, 1)])
@pytest.mark.parametrize("alphabet", [1, 3, 20])
def test_proposals_equal_those_of_a_full_search(max_ngram, min_ngram, alphabet):
    """While the context grows by some tokens, is cut back, changes in the middle, or becomes another one."""
    rng, found = Random(7), set()
    for _ in range(15):
        lookup, ids = PromptLookupDrafter(4, max_ngram, min_ngram), list[int]()
        for _ in range(40):
            change = rng.random()
            if change < 0.2:
                ids = ids[: rng.randint(0, len(ids))]
            elif change < 0.3 and ids:
                ids = [*ids]
                ids[rng.randrange(len(ids))] = rng.randrange(alphabet)
            elif change < 0.35:
                ids = []
            ids = ids + [rng.randrange(alphabet) for _ in range(rng.randint(0, 4))]
            limit = rng.randint(0, 5)
            guess = list(lookup.propose(ids, limit, Sampling(), None).tokens)
            assert guess == searched(ids, min(4, limit), max_ngram, min_ngram), (ids, limit)
            found.add(len(guess))
    assert len(found) > 1 or (alphabet, min_ngram) == (20, 3)  # three tokens of twenty never come twice here


class Token(int):
    """Counts how often tokens are looked up."""

    hashed = 0

    def __hash__(self) -> int:
        Token.hashed += 1
        return super().__hash__()


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_new_token_costs_the_same_however_long_the_context_is(length, monkeypatch):
    lookup, rng = PromptLookupDrafter(), Random(0)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor of the whole context"))
    ids = [Token(rng.randrange(50)) for _ in range(length)]
    lookup.propose(ids, 6, Sampling(), None)
    for change in (lambda: ids.append(Token(3)), lambda: None, lambda: ids.pop()):
        Token.hashed = 0
        change()
        lookup.propose(ids, 6, Sampling(), None)
        assert Token.hashed <= 4 * (2 + 3 + 4), f"{Token.hashed} tokens looked up"
