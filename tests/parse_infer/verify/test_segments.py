"""Cut policies on real token sequences."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parse_infer.verify.segments import CutPolicy, Segmenter

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


def test_every_few_tokens(tokenizer):
    assert segments(tokenizer, "abcdefgh", kind="tokens", every=3) == ["abc", "def", "gh"]
    assert segments(tokenizer, "abcdef", kind="tokens", every=3) == ["abc", "def"]


def test_whitespace_and_the_end_token_are_no_segments(tokenizer):
    assert segments(tokenizer, "\n\nfirst\nsecond\n<|end|>") == ["\n\nfirst\n", "second\n<|end|>"]
    assert segments(tokenizer, "first\n\n") == ["first\n\n"]
    assert segments(tokenizer, "<|end|>") == ["<|end|>"]


def test_an_empty_draft_has_no_cuts(tokenizer):
    for kind in ("step", "sentence", "tokens"):
        assert Segmenter(tokenizer, CutPolicy(kind)).cuts([]) == []


@pytest.mark.parametrize("kind", ["step", "sentence", "tokens"])
def test_cuts_increase_and_end_with_the_draft(tokenizer, kind):
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("ab 1.!?\n\né") for _ in range(rng.randint(1, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        limit = rng.choice([1, 3, 32])
        cuts = Segmenter(tokenizer, CutPolicy(kind, every=5, max_cuts=limit)).cuts(ids)
        assert 1 <= len(cuts) <= limit
        assert cuts[-1] == len(ids) and cuts[0] >= 1
        assert all(a < b for a, b in zip(cuts, cuts[1:], strict=False))


def test_too_many_cuts_are_thinned_evenly(tokenizer):
    ids = list(range(100))
    full = Segmenter(tokenizer, CutPolicy("tokens", every=1, max_cuts=100)).cuts(ids)
    thin = Segmenter(tokenizer, CutPolicy("tokens", every=1, max_cuts=8)).cuts(ids)
    assert len(full) == 100 and len(thin) == 8
    gaps = [b - a for a, b in zip([0, *thin], thin, strict=False)]
    assert set(thin) <= set(full) and max(gaps) - min(gaps) <= 1


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
