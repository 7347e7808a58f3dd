"""A reduced vocabulary and its base: tokens go over by their string, and back as the same bytes."""

from __future__ import annotations

import json
from random import Random

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parse_infer.models.loading import resolve
from parse_infer.models.token_map import TokenMap, TranslatedContext, token_map
from tests.parse_infer.language_models import pruned_tokenizer, word_tokenizer

TEXT = "There are 19 x 2 = 38 students in the other room. So they share the rest.\n#### 38"


@pytest.fixture(scope="module")
def base() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("zoo:target"))


@pytest.fixture(scope="module")
def small(base) -> PreTrainedTokenizerFast:
    return pruned_tokenizer(base, TEXT, 400)


@pytest.fixture(scope="module")
def words(small, base) -> TokenMap:
    found = token_map(small, base)
    assert found is not None
    return found


def test_the_same_tokenizer_is_the_identity(base, tokenizer):
    for one in (base, tokenizer):
        words = token_map(one, one)
        assert words is not None and words.is_identity
        assert list(words.draft_ids) == list(words.target_ids) == list(range(len(one)))
        assert words.from_target(17) == (17,)


def test_every_draft_token_is_the_target_token_of_its_name(words, small, base):
    assert not words.is_identity
    assert list(words.draft_ids) == list(range(len(small)))
    assert base.convert_ids_to_tokens(words.target_ids) == small.convert_ids_to_tokens(words.draft_ids)
    for draft_id, target_id in zip(words.draft_ids, words.target_ids, strict=True):
        assert words.from_target(target_id) == (draft_id,)


def test_every_target_token_reaches_the_draft_model_with_the_same_bytes(words, small, base):
    for token in range(len(base)):
        ids = words.from_target(token)
        assert "".join(small.convert_ids_to_tokens(ids)) == base.convert_ids_to_tokens(token)
    assert words.from_target(len(base) + 3) == ()  # padding


def test_a_prompt_of_the_target_is_the_draft_models_own(words, small, base):
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Überall 38."}]
    messages.append({"role": "user", "content": "So?"})
    ids, own = (t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for t in (base, small))
    translated = TranslatedContext(words).follow(ids)
    assert translated == own
    assert base.eos_token_id in ids and small.eos_token_id in translated


def test_a_context_is_translated_as_it_grows_and_shrinks(words, base):
    rng, context, ids = Random(0), TranslatedContext(words), []
    for _ in range(200):
        ids = ids[: rng.randint(0, len(ids))] + [rng.randrange(len(base) + 2) for _ in range(rng.randint(0, 6))]
        assert context.follow(ids) == [i for token in ids for i in words.from_target(token)]


def test_an_unchanged_context_is_not_translated_again(words, base):
    asked = []

    class Counting:
        def from_target(self, token: int) -> tuple[int, ...]:
            asked.append(token)
            return words.from_target(token)

    ids = base.encode(TEXT * 3)
    context = TranslatedContext(Counting())
    context.follow(ids)
    del asked[:]
    context.follow([*ids, 300, 301])
    context.follow([*ids, 300, 302])
    assert asked == [300, 301, 302]


def test_a_special_token_that_was_not_kept_is_read_as_text(base):
    small = pruned_tokenizer(base, TEXT, 400, specials=["<|user|>", "<|end|>"])
    words = token_map(small, base)
    assert words is not None
    ids = words.from_target(base.convert_tokens_to_ids("<|assistant|>"))
    assert small.decode(ids) == "<|assistant|>" and len(ids) > 3


def test_end_tokens_of_different_names_are_the_same(base):
    small = pruned_tokenizer(base, TEXT, 400, specials=["<|user|>"])
    small.add_special_tokens({"eos_token": "[done]"})
    words = token_map(small, base)
    assert words is not None
    assert words.from_target(base.eos_token_id) == (small.eos_token_id,)
    assert dict(zip(words.draft_ids, words.target_ids, strict=True))[small.eos_token_id] == base.eos_token_id


def test_padding_of_its_own_is_no_token_of_the_target(base):
    small = pruned_tokenizer(base, TEXT, 400)
    small.add_special_tokens({"pad_token": "[pad]"})
    words = token_map(small, base)
    assert words is not None and small.pad_token_id not in words.draft_ids


def test_other_tokenizers_are_refused(small, base, tokenizer):
    assert token_map(base, small) is None  # the smaller one lacks tokens
    assert token_map(word_tokenizer(), base) is None
    assert token_map(tokenizer, base) is None  # the bytes are there, but words are split in another way
    other = pruned_tokenizer(base, TEXT, 400)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert token_map(other, base) is None
    other = pruned_tokenizer(base, TEXT, 400)
    other.add_tokens(["flibbertigibbet"])
    assert token_map(other, base) is None


def test_other_merges_are_refused(small, base):
    """The tokens are the base's, but words are put together in another way."""
    description = json.loads(small.backend_tokenizer.to_str())
    description["model"]["merges"] = description["model"]["merges"][::2]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)))
    assert token_map(other, base) is None
