"""Each rule keeps what its published definition keeps: a reference for each token, on the whole distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading
from parse_infer.judge.registry import RULES, find_rule
from parse_infer.judge.rules.rule import MOST_CHOICES, TokenRule
from parse_infer.settings.acceptance import maximal_valid_prefix

VOCABULARY, LENGTH = 60, 24
TOKEN_RULES = [name for name, rule in RULES.items() if issubclass(rule, TokenRule)]
Kept = Callable[[np.ndarray, list[int], int], bool]
"""Whether a definition keeps draft token i, given the target's probabilities [T, V] and the draft."""


def min_p(chances, draft, i, *, ratio):
    return chances[i, draft[i]] >= ratio * chances[i].max()


def relaxed_acceptance(chances, draft, i, *, relaxed_topk, relaxed_delta):
    for rank, token in enumerate(np.argsort(-chances[i], kind="stable")[: int(relaxed_topk)]):
        if rank and chances[i, token] < chances[i].max() - relaxed_delta:
            return False
        if token == draft[i]:
            return True
    return False


def coarse(chances):
    """The distribution that a server's 20 log-probabilities tell."""
    first = np.sort(chances)[::-1][:MOST_CHOICES]
    return np.array([*first, max(1 - first.sum(), 0)])


def at_temperature(chances, token, temperature):
    """The probability of a token, and the distribution, where the logits of `coarse` are divided by a temperature."""
    raised = coarse(chances) ** (1 / temperature)
    return chances[token] ** (1 / temperature) / raised.sum(), raised / raised.sum()


def accept_threshold(chances, draft, i, *, single, temperature):
    chance = chances[i, draft[i]] if temperature == 1 else at_temperature(chances[i], draft[i], temperature)[0]
    return chance >= single or draft[i] == chances[i].argmax()


def typical_acceptance(chances, draft, i, *, epsilon, delta, temperature):
    chance, all_chances = at_temperature(chances[i], draft[i], temperature)
    likely = chance > min(epsilon, delta * np.exp(-entropy(all_chances)))
    return likely or draft[i] == chances[i].argmax()


def fly(chances, draft, i, *, entropy, window):
    accepted = [draft[j] == chances[j].argmax() for j in range(len(draft))]
    if accepted[i]:
        return True
    first = np.sort(chances[i])[::-1][:3]
    if -(first * np.log(first)).sum() < entropy or i + window >= len(draft):
        return False
    return all(accepted[i + 1 : i + 1 + int(window)])


REFERENCES = {rule.__name__: rule for rule in (min_p, relaxed_acceptance, accept_threshold, typical_acceptance, fly)}
OPTIONS = {
    "min_p": ["", "ratio=0.4", "ratio=0.02"],
    "relaxed_acceptance": ["", "relaxed_topk=2", "relaxed_topk=20,relaxed_delta=0.1", "relaxed_delta=0"],
    "accept_threshold": ["", "single=0.05", "single=0.9", "temperature=0.6", "single=0.02,temperature=0.3"],
    "typical_acceptance": ["", "epsilon=0.3", "epsilon=0.02,delta=0.02", "epsilon=0.05,delta=1", "temperature=0.6"],
    "fly": ["", "entropy=0.9,window=2", "entropy=0.01,window=1", "entropy=0.6,window=4"],
}


def random_reading(seed: int, sharpness: float) -> tuple[Reading, np.ndarray, list[int]]:
    """A draft of likely tokens, most of them the first choices, with the reading of its target."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(LENGTH, VOCABULARY, generator=generator) * sharpness
    ranks = torch.multinomial(torch.tensor([0.8, 0.1, 0.05, 0.05]), LENGTH, True, generator=generator)
    draft = hidden.argsort(-1, descending=True).gather(-1, ranks[:, None])[:, 0].tolist()
    chances = softmax(hidden.double().numpy(), axis=-1)
    return Reading(draft, None, hidden=hidden, logits=lambda states: states), chances, draft


@pytest.mark.parametrize(("name", "options"), [(n, o) for n in REFERENCES for o in OPTIONS[n]])
def test_a_rule_keeps_what_its_definition_keeps(tokenizer, name: str, options: str):
    rule = find_rule(f"{name}:{options}")
    judge, kept_others, rejected = rule.load(tokenizer), 0, 0
    for seed in range(30):
        reading, chances, draft = random_reading(seed, sharpness=(0.5, 1.5, 3.0)[seed % 3])
        wanted = [bool(REFERENCES[name](chances, draft, i, **asdict(rule))) for i in range(LENGTH)]
        found = (-rule.doubts(reading.logprobs(rule.k))).exp() >= rule.threshold - 1e-7
        assert found.tolist() == wanted, (seed, options)
        verdict = judge.scorer(tokenizer, ()).score(reading, Carried())
        n = maximal_valid_prefix(verdict.validity, rule.threshold - 1e-7)
        assert n == (wanted.index(False) if False in wanted else LENGTH)
        kept_others += sum(w and chances[i].argmax() != draft[i] for i, w in enumerate(wanted))
        rejected += wanted.count(False)
    assert rejected and (kept_others or options in ("relaxed_delta=0", "single=0.9")), "the test must say something"


def test_the_rules_of_the_registry_all_have_a_reference():
    assert list(REFERENCES) == TOKEN_RULES


def test_typical_acceptance_keeps_at_most_what_the_whole_entropy_keeps(tokenizer):
    """And 20 first choices are nearly all of a distribution as sharp as a language model's."""
    rule, differing = find_rule("typical_acceptance"), 0
    for seed in range(30):
        reading, chances, draft = random_reading(seed, sharpness=2.0)
        found = (-rule.doubts(reading.logprobs(rule.k))).exp() >= rule.threshold
        for i, kept in enumerate(found.tolist()):
            exact = chances[i, draft[i]] > min(rule.epsilon, rule.delta * np.exp(-entropy(chances[i])))
            assert exact >= kept
            differing += exact != kept
    assert differing < 30 * LENGTH / 100


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.9])
def test_at_a_temperature_a_rule_keeps_at_most_what_the_whole_distribution_keeps(tokenizer, temperature: float):
    """And nearly all of it, where a distribution is as sharp as a language model's."""
    rule, differing = find_rule(f"accept_threshold:single=0.1,temperature={temperature}"), 0
    for seed in range(30):
        reading, _, draft = random_reading(seed, sharpness=2.0)
        exact = (reading.hidden / temperature).softmax(-1)
        found = (-rule.doubts(reading.logprobs(rule.k))).exp() >= rule.threshold
        for i, kept in enumerate(found.tolist()):
            keeps = exact[i, draft[i]] >= rule.single or draft[i] == exact[i].argmax()
            assert keeps >= kept
            differing += bool(keeps) != kept
    assert differing < 30 * LENGTH / 100


@pytest.mark.parametrize("name", TOKEN_RULES)
def test_a_laxer_threshold_keeps_more_and_one_keeps_first_choices(tokenizer, name: str):
    rule = find_rule(name)
    scorer = rule.load(tokenizer).scorer(tokenizer, ())
    for seed in range(20):
        reading, chances, draft = random_reading(seed, sharpness=1.5)
        validity = scorer.score(reading, Carried()).validity
        kept = [maximal_valid_prefix(validity, threshold) for threshold in (1.0, 0.6, 0.2, 0.05, 0.0)]
        same = [draft[i] == chances[i].argmax() for i in range(LENGTH)]
        assert kept == sorted(kept) and kept[0] == same.index(False) and kept[-1] == LENGTH


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        (
            "relaxed_acceptance:relaxed_topk=0",
            "the relaxed_topk of relaxed_acceptance is 0; it must be",
        ),
        ("relaxed_acceptance:relaxed_topk=2.5", "is 2.5; it must be a whole number from 1 to 20"),
        ("relaxed_acceptance:relaxed_delta=1", "is 1.0; it must be at least 0 and below 1"),
        ("accept_threshold:single=0", "the single of accept_threshold is 0.0; it must be above 0 and at most 1"),
        (
            "accept_threshold:temperature=1.5",
            "the temperature of accept_threshold is 1.5; it must be above 0",
        ),
        ("typical_acceptance:delta=nan", "the delta of typical_acceptance is nan"),
        ("fly:window=0", "the window of fly is 0; it must be a whole number from 1 to 1000"),
        ("fly:entropy=1.2", "the entropy of fly is 1.2; it must be above 0 and at most 1.09"),
        ("accept_threshold:acc=0.5", "'acc' is no option of the judge accept_threshold"),
    ],
)
def test_options_out_of_range_are_refused(judge: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        find_rule(judge)


def test_a_fingerprint_changes_with_what_a_threshold_does_not_set():
    same = [("min_p", "min_p:ratio=0.5"), ("fly", "fly:entropy=0.9"), ("typical_acceptance",) * 2]
    same.append(("typical_acceptance:epsilon=0.25,delta=0.5", "typical_acceptance"))
    for one, other in same:
        assert find_rule(one).fingerprint == find_rule(other).fingerprint
    for name in ("accept_threshold", "typical_acceptance"):
        assert find_rule(name).fingerprint == find_rule(f"{name}:temperature=1").fingerprint
        assert find_rule(name).fingerprint != find_rule(f"{name}:temperature=0.6").fingerprint
    for one, other in [("fly", "fly:window=5"), ("relaxed_acceptance", "relaxed_acceptance:relaxed_topk=2")]:
        assert find_rule(one).fingerprint != find_rule(other).fingerprint
    assert find_rule("typical_acceptance:delta=0.5").fingerprint != find_rule("typical_acceptance").fingerprint
    assert replace(find_rule("min_p")).fingerprint == "min-p", "calibrations made before there were other rules hold"
