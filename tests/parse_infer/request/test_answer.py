"""Text of growing token lists, and where an answer ends."""

from __future__ import annotations

import random

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.judge.rules.min_p import MinP
from parse_infer.request.answer import Answer
from parse_infer.request.events import Accepted, Resumed
from parse_infer.settings.sampling import Sampling
from parse_infer.text.detokenizer import Detokenizer, complete_text, encode_continuation
from parse_infer.text.prompts import Verbatim, left_context
from tests.parse_infer.language_models import (
    crossing_tokenizer,
    language_model,
    llama_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)


def test_text_is_exact_however_the_tokens_arrive(tokenizer):
    rng = random.Random(0)
    for words in (tokenizer, word_tokenizer()):
        for _ in range(200):
            ids = [rng.randrange(len(words)) for _ in range(rng.randint(1, 40))]  # mostly broken characters
            ids += words.encode("é 数学 {x²} ", add_special_tokens=False)[: rng.randint(0, 12)]
            detokenizer, text, i = Detokenizer(words), "", 0
            while i < len(ids):
                step = rng.choice([1, 1, 2, 7])
                text += detokenizer.add(ids[i : i + step])
                i += step
            text += detokenizer.flush()
            assert text == detokenizer.text == words.decode(ids, skip_special_tokens=True)


def test_a_character_is_held_back_until_it_is_complete(tokenizer):
    ids = tokenizer.encode("a数b")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([i]) for i in ids] == ["a", "", "", "数", "b"]
    assert Detokenizer(tokenizer).add(ids[:3]) == "a"  # several tokens at once: what is complete comes out
    assert complete_text(tokenizer, ids[:3]) == "a"


def test_an_answer_is_complete_where_its_last_character_is(tokenizer):
    for words in (tokenizer, word_tokenizer(), sentencepiece_tokenizer()):
        ids = [*words.encode("aé数 🙂", add_special_tokens=False), words.eos_token_id]
        for end in range(len(ids) + 1):
            answer = Answer(words, {-1}, (), 99)
            answer.add(ids[:end], "draft")
            text = words.decode(ids[:end], skip_special_tokens=True)
            assert answer.complete == (not text.endswith("\ufffd")), repr(text)
            assert answer.text == text or not answer.complete


def test_a_continuation_keeps_its_own_spaces(tokenizer):
    for words in (tokenizer, word_tokenizer()):
        for text in ("38 students", " students", "\n\nSo"):
            assert words.decode(encode_continuation(words, "There are", text)) == text


def test_a_continued_text_keeps_its_first_space():
    text, words = "Once upon a time there was", llama_tokenizer()
    ids = words.encode(text)
    for n in range(1, len(ids)):
        before = left_context(Verbatim("Once"), ids[:n], words)
        answer = Answer(words, {0}, ["was"], 99, before)
        assert words.decode(ids[:n]) + "".join(answer.preview(ids[n:], [len(ids) - n])) == text
        for token in ids[n:]:
            answer.add([token], "target")
        assert words.decode(ids[:n]) + answer.text == text and answer.finish_reason == "stop"
    words.chat_template = "{{ messages[0].content }}"
    assert list(left_context("Once", ids, words)) == []  # a turn of its own begins without a space


def test_nothing_after_the_end_of_a_draft_is_kept(tokenizer):
    answer = Answer(tokenizer, {258}, ["o."], max_tokens=20)
    ids = tokenizer.encode("One two. Three")
    assert tokenizer.decode(answer.truncate(ids, 99)) == "One two."
    assert answer.truncate(ids, 5) == ids[:5]
    assert answer.truncate([*ids[:3], 258, 65], 99) == [*ids[:3], 258]
    assert answer.truncate(ids * 3, 99) == answer.truncate(ids, 99)
    assert len(Answer(tokenizer, {258}, [], 20).truncate(ids * 3, 99)) == 20
    assert answer.truncate(ids, -1) == [] and answer.ids == [] and not answer.is_finished


def test_a_stop_string_ends_the_text_inside_a_token():
    words = word_tokenizer()
    word = words.encode(" students", add_special_tokens=False)
    assert len(word) == 1
    answer = Answer(words, {0}, ["dents", "ude"], max_tokens=20)
    assert answer.add(word, "target") == " stude"
    assert (answer.text, answer.finish_reason, answer.spans[0].text) == (" stude", "stop", " stude")


def test_the_stop_string_that_is_complete_first_counts(tokenizer):
    answer = Answer(tokenizer, {258}, ["two. T", "o.", "One three"], max_tokens=50)
    answer.add(answer.truncate(tokenizer.encode("One two. Three"), 50), "draft", 0.9)
    assert answer.text == "One two."


def test_what_is_held_back_comes_out_at_the_end(tokenizer):
    half = tokenizer.encode("a数")[:3]
    budget = Answer(tokenizer, {258}, [], max_tokens=3)
    assert budget.add(half[:2], "draft", 0.9) == "a"
    budget.add(half[2:], "target")
    assert budget.finish_reason == "length"
    assert "".join(s.text for s in budget.spans) == budget.text == tokenizer.decode(half)
    ended = Answer(tokenizer, {258}, [], max_tokens=9)
    ended.add([*half, 258], "draft", 0.9)
    assert (ended.finish_reason, ended.text) == ("eos", tokenizer.decode(half))


@pytest.mark.parametrize(("target", "draft"), [("crossing", "crossing"), ("crossing", "words"), ("bytes", "crossing")])
@pytest.mark.slow
def test_an_answers_text_is_that_of_its_tokens_whoever_wrote_them(make_model, tokenizer, target, draft):
    """The weights are random, so most characters are broken."""
    made = {"crossing": crossing_tokenizer(), "words": word_tokenizer(), "bytes": tokenizer}
    pair = [
        language_model(make_model("llama", seed=i, vocab_size=len(made[kind]), eos_token_id=None), made[kind], kind)
        for i, kind in enumerate((target, draft))
    ]
    words, prompt = pair[0].tokenizer, Verbatim("ធុ 툠")
    for lm in pair:
        lm.eos_ids = set()
    engine = ParseEngine.from_models(*pair, MinP(0.3).load(words))
    for settings in ({"block_tokens": 3}, {"block_tokens": 8, "stop": ("\ufffd",)}, {"threshold": 2.0}):
        for sampling in (Sampling(), Sampling(1.0, seed=1), Sampling(1.0, seed=2)):
            sampled = {"draft_sampling": sampling, "resume_sampling": sampling}
            *events, done = engine.stream(prompt, max_new_tokens=40, **settings, **sampled)
            found, expected = done.generation, words.decode(done.generation.token_ids, skip_special_tokens=True)
            sent = "".join(event.text for event in events if isinstance(event, (Accepted, Resumed)))
            assert "".join(span.text for span in found.spans) == found.text == sent
            assert expected.startswith(sent) if found.finish_reason == "stop" else expected == sent
            assert found.finish_reason != "stop" or found.text.endswith("\ufffd")
