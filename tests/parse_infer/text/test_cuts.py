"""Cut policies on real token sequences."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parse_infer.text.cuts import CUT_RULES, CutPolicy, Segmenter, cut_rule

ANSWER = "There are 19 x 2 = 38.5 apples? Yes.\n\n1. So 3.5 it is.\n#### 90<|end|>"


def segments(tokenizer, text: str, **policy) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = Segmenter(tokenizer, CutPolicy(**policy)).cuts(ids)
    return [tokenizer.decode(ids[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]


def test_a_step_ends_after_its_newlines(tokenizer):
    assert segments(tokenizer, ANSWER) == [
        "There are 19 x 2 = 38.5 apples? Yes.\n\n",
        "1. So 3.5 it is.\n",
        "#### 90<|end|>",
    ]


def test_a_sentence_ends_at_a_mark_before_whitespace_not_in_a_decimal_or_list_number(tokenizer):
    assert segments(tokenizer, ANSWER, kind="sentence") == [
        "There are 19 x 2 = 38.5 apples?",
        " Yes.",
        "\n\n1. So 3.5 it is.",
        "\n#### 90<|end|>",
    ]
    assert segments(tokenizer, 'He said "no." Then 2.5!', kind="sentence") == ['He said "no."', " Then 2.5!"]


def test_a_mark_or_space_of_several_tokens_ends_a_sentence(tokenizer):
    text = "He said “no.” Then yes.\u3000So ‘it is.’\u00a0Well."
    assert segments(tokenizer, text, kind="sentence") == [
        "He said “no.”",
        " Then yes.",
        "\u3000So ‘it is.’",
        "\u00a0Well.",
    ]
    segmenter, ids = Segmenter(tokenizer, CutPolicy("sentence")), tokenizer.encode(text, add_special_tokens=False)
    ends = [segmenter.first_segment_end(ids[:n]) for n in range(len(ids))]
    assert {end for end in ends if end is not None} == {len("He said “no.”".encode())}


def test_every_few_tokens(tokenizer):
    assert segments(tokenizer, "abcdefgh", kind="tokens", every=3) == ["abc", "def", "gh"]
    assert segments(tokenizer, "abcdef", kind="tokens", every=3) == ["abc", "def"]


def test_whitespace_and_the_end_token_are_no_segments(tokenizer):
    assert segments(tokenizer, "\n\nfirst\nsecond\n<|end|>") == ["\n\nfirst\n", "second\n<|end|>"]
    assert segments(tokenizer, "first\n\n") == ["first\n\n"]
    assert segments(tokenizer, "<|end|>") == ["<|end|>"]


def test_an_empty_draft_has_no_cuts(tokenizer):
    for kind in CUT_RULES:
        assert Segmenter(tokenizer, CutPolicy(kind)).cuts([]) == []


@pytest.mark.parametrize("kind", sorted(CUT_RULES))
def test_cuts_increase_and_end_with_the_draft(tokenizer, kind):
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("ab 1.!?\n\né") for _ in range(rng.randint(1, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        cuts = Segmenter(tokenizer, CutPolicy(kind, every=5), rng.choice([0, 2])).cuts(ids)
        assert cuts[-1] == len(ids) and cuts[0] >= 1
        assert all(a < b for a, b in itertools.pairwise(cuts))


def test_labels_of_a_long_draft_stand_at_cuts_chosen_evenly():
    cuts = list(range(3, 304, 3))
    assert CutPolicy(max_cuts=101).even_subset(cuts) == cuts
    thin = CutPolicy(max_cuts=8).even_subset(cuts)
    assert len(thin) == 8 and thin[-1] == cuts[-1] and set(thin) <= set(cuts)
    gaps = [b - a for a, b in zip([0, *thin], thin, strict=False)]
    assert max(gaps) - min(gaps) <= 3


@pytest.mark.parametrize("kind", ["step", "sentence", "tokens"])
def test_without_appended_tokens_every_cut_is_judged(tokenizer, kind):
    ids = tokenizer.encode("This is so.\n" * 300, add_special_tokens=False)
    cuts = Segmenter(tokenizer, CutPolicy(kind, every=12, max_cuts=4)).cuts(ids)
    assert len(cuts) >= 300 and max(b - a for a, b in zip([0, *cuts], cuts, strict=False)) <= 13


@pytest.mark.parametrize("tokens_per_cut", [1, 2, 30])
@pytest.mark.parametrize("max_cuts", [1, 32])
def test_cuts_with_appended_tokens_are_dense_first_then_a_root_of_their_depth_apart(
    tokenizer, tokens_per_cut, max_cuts
):
    """So a longer draft loses a smaller share of itself to one bad line, and to its questions."""
    policy = CutPolicy("tokens", every=5, max_cuts=max_cuts)
    segmenter = Segmenter(tokenizer, policy, tokens_per_cut)
    for n in (1, 5, 150, 160, 161, 165, 1000, 8000):
        everything = Segmenter(tokenizer, policy).cuts(range(n))
        cuts = segmenter.cuts(range(n))
        assert cuts[: max_cuts - 1] == everything[: max_cuts - 1] and cuts[-1] == n and set(cuts) <= set(everything)
        for before, cut in zip(cuts[max_cuts - 1 :], cuts[max_cuts:], strict=False):
            distance = (tokens_per_cut * cut) ** 0.5
            assert (cut == n or cut - before >= distance) and cut - before < distance + 5, (before, cut)
        assert len(cuts) <= max_cuts + 2 * (n / tokens_per_cut) ** 0.5 + 1
    assert len(cuts) > max_cuts + 0.8 * (n / max(tokens_per_cut, 5)) ** 0.5


def test_a_draft_that_grows_keeps_the_cuts_that_it_had(tokenizer):
    """So that they may be judged while it is written, and the whole draft has the same ones."""
    segmenter = Segmenter(tokenizer, CutPolicy("step", max_cuts=3), tokens_per_cut=2)
    ids = tokenizer.encode("".join(f"{'so ' * (i % 5)}{i}\n" for i in range(200)), add_special_tokens=False)
    whole = segmenter.cuts(ids)
    for n in range(1, len(ids), 7):
        assert segmenter.cuts(ids[:n])[:-1] == [cut for cut in whole if cut < n][: len(segmenter.cuts(ids[:n])) - 1]
        assert set(segmenter.cuts(ids[:n])[:-1]) <= set(whole)
        assert {cut for cut in whole if cut < n} <= set(segmenter.cuts(ids[:n]))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("step", "one step", None),
        ("step", "one step\n", "one step\n"),
        ("step", "\none\ntwo\n", "\none\n"),
        ("sentence", "It is 3.5", None),
        ("sentence", "It is 3.5.", None),  # could still become 3.5.1
        ("sentence", "It is 3.5. And", "It is 3.5."),
        ("tokens", "abc", None),
        ("tokens", "abcdef", "abcd"),
    ],
)
def test_first_segment_of_a_text_being_written(tokenizer, kind, text, expected):
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = Segmenter(tokenizer, CutPolicy(kind, every=4)).first_segment_end(ids)
    assert (None if end is None else tokenizer.decode(ids[:end])) == expected


def test_tokens_that_carry_their_space_in_front():
    """Sentencepiece-style decoders drop the space of a text's first token; it must not get lost between sentences."""
    words = ["▁a", "a", "▁It", "▁is", "▁so.", "▁And", "▁3.5", "▁more."]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer.encode("It is so. And 3.5 more.", add_special_tokens=False)
    assert Segmenter(tokenizer, CutPolicy("sentence")).cuts(ids) == [3, 6]


def test_a_policy_of_ones_own_is_one_function(tokenizer, monkeypatch):
    """As docs/reference/extending.md shows; tests/test_pages.py runs its code."""
    monkeypatch.setattr("parse_infer.text.cuts.CUT_RULES", dict(CUT_RULES))

    @cut_rule("paragraph")
    def paragraph_ends(texts, every):
        return [i for i in range(1, len(texts) + 1) if "".join(texts[:i]).endswith("\n\n")]

    text = "\n\nOne.\nTwo.\n\n\nThree.\n\n"
    assert segments(tokenizer, text, kind="paragraph") == ["\n\nOne.\nTwo.\n\n", "\nThree.\n\n"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = Segmenter(tokenizer, CutPolicy.parse("paragraph")).first_segment_end(ids)
    assert tokenizer.decode(ids[:end]) == "\n\nOne.\nTwo.\n\n"


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("sentence", CutPolicy("sentence")),
        ("tokens", CutPolicy("tokens")),
        ("tokens:4", CutPolicy("tokens", 4)),
        ("word", "unknown cut policy 'word'"),
        ("step:4", "the cut policy 'step:4' has no whole number of tokens"),
        ("tokens:", "the cut policy 'tokens:' has no whole number of tokens"),
        ("tokens:0", "every must be a whole number of at least 1"),
    ],
)
def test_names_of_policies(name, policy):
    if isinstance(policy, CutPolicy):
        assert CutPolicy.parse(name) == policy
        return
    with pytest.raises(ValueError, match=policy):
        CutPolicy.parse(name)


def test_policies_survive_json(tokenizer):
    policy = CutPolicy("tokens", every=7, max_cuts=5)
    assert CutPolicy.from_dict(policy.to_dict()) == policy
    assert CutPolicy.from_dict({}) == CutPolicy()


@pytest.mark.parametrize(
    ("values", "named"),
    [({"kind": "line"}, "line"), ({"every": 0}, "every"), ({"max_cuts": 1.5}, "max_cuts"), ({"delta": 3}, "delta")],
)
def test_a_wrong_policy_is_named(values, named):
    with pytest.raises(ValueError, match=named):
        CutPolicy.from_dict(values)
