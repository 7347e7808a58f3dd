"""Text from a draft model with other tokens: no character is repeated, lost or broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations

import pytest
from transformers import PreTrainedTokenizerFast

from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft
from parse_infer.engine import ParseEngine
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.judge import Verdict
from parse_infer.models.loading import LanguageModel, load_tokenizer
from parse_infer.request.events import Accepted, Drafted, Resumed
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.detokenizer import decode, encode_continuation
from parse_infer.text.prompts import open_turn
from tests.parse_infer.language_models import (
    crossing_tokenizer,
    cycling,
    language_model,
    sentencepiece_tokenizer,
    word_tokenizer,
)


class JudgeByChance:
    """A judge of segments, as the target's own cycle would pass any other."""

    config, fingerprint, tokens_per_cut = ValidityConfig(target={}), "chance", 0
    k, by_token, first_tokens = 0, False, 0

    def __init__(self):
        self._numbers = random.Random(0)

    def scorer(self, tokenizer, end_ids, model):
        return self

    def trailing(self, reading, carried, device):
        return None

    def score(self, reading, carried):
        return Verdict(cuts=reading.cuts, validity=[self._numbers.random() for _ in reading.cuts])


TEXT = "It costs 5€ more:\n\n12 × 38 = 456; “naïve” 日本語 🙂🙈, étéé, ធធធ."
PROMPT = "How much?"
CYCLE = "5ធ€ü🙈 "  # bytes that all differ; one of the tokens of "crossing" ends a character and begins the next
KINDS = ("bytes", "words", "sentencepiece", "smollm2", "crossing")


@pytest.fixture(scope="module")
def tokenizers(tokenizer) -> dict[str, PreTrainedTokenizerFast]:
    """Byte-level without merges, with merges, as SmolLM2's with single digits; and SentencePiece with bytes."""
    made = (tokenizer, word_tokenizer(), sentencepiece_tokenizer(), load_tokenizer("zoo:smollm2-draft"))
    made += (crossing_tokenizer(),)
    return dict(zip(KINDS, made, strict=True))


@pytest.fixture
def reads(make_model, tokenizers) -> Callable[[str], LanguageModel]:
    def make(kind: str) -> LanguageModel:
        own = tokenizers[kind]
        return language_model(make_model(vocab_size=len(own), eos_token_id=own.eos_token_id), own, kind)

    return make


@pytest.mark.parametrize(("target", "draft"), permutations(KINDS, 2))
def test_answer_and_draft_are_the_draft_models_text_after_any_token(reads, target, draft):
    target, draft = reads(target), reads(draft)
    ids = target.tokenizer.encode(TEXT, add_special_tokens=False)
    drafted = 0
    for end in range(len(ids) + 1):
        writing = CrossTokenizerDraft(draft, target, False, "Hi").begin(ids[:end], 500)
        so_far = decode(target.tokenizer, ids[:end])
        whole = TEXT.startswith(so_far)
        meant = TEXT[len(so_far) if whole else len(so_far.rstrip("\ufffd")) :]
        continued = []
        if writing is not None:
            writing.add(encode_continuation(draft.tokenizer, open_turn("Hi", draft.tokenizer) + so_far, meant))
            continued = writing.draft().ids
        joined = decode(target.tokenizer, ids[:end] + continued)
        if whole:
            assert joined == TEXT, f"behind {so_far!r}"
            drafted += 1
        else:
            assert joined in (TEXT, so_far), f"behind {so_far!r}, inside a character"
    assert drafted > 30


@pytest.mark.parametrize(
    "kinds",
    [
        *(("bytes", "words"), ("words", "bytes"), ("sentencepiece", "words"), ("bytes", "smollm2")),
        *(("crossing", "words"), ("crossing", "sentencepiece")),
    ],
)
@pytest.mark.parametrize(("every", "threshold"), [(1, 0.6), (2, 1.0), (3, 0.0), (5, 0.6)])
def test_the_draft_resumes_after_whole_characters(make_model, tokenizers, kinds, every, threshold):
    def model(kind: str) -> LanguageModel:
        own = tokenizers[kind]
        made = make_model(vocab_size=len(own), eos_token_id=own.eos_token_id, hidden_size=64)
        return language_model(cycling(made, own, CYCLE, PROMPT), own, kind)

    target, draft = (model(kind) for kind in kinds)
    engine = ParseEngine.from_models(target, draft, JudgeByChance(), cut_policy=CutPolicy("tokens", every))
    settings = {"threshold": threshold, "block_tokens": 8, "keep_greedy_match": False, "max_new_tokens": 40}
    answer, drafts = "", 0
    for event in engine.stream(PROMPT, **settings):
        if isinstance(event, Drafted) and event.n_tokens:
            joined = (answer + event.text).rstrip("\ufffd")  # the budget may end inside a character
            assert (CYCLE * 20).startswith(joined), f"a draft behind {answer!r} is {event.text!r}"
            drafts += 1
        elif isinstance(event, (Accepted, Resumed)):
            answer += event.text
    assert (CYCLE * 20).startswith(answer.rstrip("\ufffd")) and len(answer) > 8
    assert drafts > 2 or threshold < 1, "the draft model must have taken over several times"
