"""Models that think before they answer: where the thinking ends, and `strict_answer`."""

from __future__ import annotations

import pytest

from parse_infer.errors import ModelError, SettingsError
from parse_infer.text.prompts import Chat
from parse_infer.text.thinking import Thinking, find_marks, thinking_of
from tests.parse_infer.language_models import thinking_tokenizer

TARGET, DRAFT = "abc</think>xyz", "aBc</think>xYz"
LOOSE = {"max_new_tokens": 12, "threshold": 0.0}
LENGTHS = (1, 3, "auto", "whole")


@pytest.mark.parametrize("block_tokens", LENGTHS)
def test_a_judge_decides_about_the_thinking_only(make_thinking_engine, block_tokens):
    engine = make_thinking_engine(TARGET, DRAFT)
    loose = engine.generate("?", **LOOSE, block_tokens=block_tokens)
    assert loose.text.startswith("aBc</think>xYz"), "the judge keeps all"
    strict = engine.generate("?", **LOOSE, block_tokens=block_tokens, strict_answer=True)
    assert strict.text == "aBc</think>xyzabc</think>x", "thinking of the draft model, answer of the target"
    assert len(strict.token_ids) == 12 and not strict.lossless


@pytest.mark.parametrize("block_tokens", [1, "auto"])
def test_drafts_of_the_answer_are_kept_token_for_token(make_thinking_engine, block_tokens):
    engine = make_thinking_engine(TARGET, "aBc</think>xyz")
    strict = engine.generate("?", **LOOSE, block_tokens=block_tokens, strict_answer=True)
    assert strict.text.startswith("aBc</think>xyza") and strict.stats.exact_tail_tokens >= 4
    sampled = engine.generate("?", **LOOSE, strict_answer=True, draft_temperature=0, temperature=1e-3, seed=1)
    assert sampled.text.startswith("aBc</think>xyza") and sampled.stats.exact_tail_tokens == 0


def test_an_answer_that_does_not_think_is_the_targets_own(make_thinking_engine):
    engine = make_thinking_engine("abcdefghijkl", "aBcdefghijkl", opened=False)
    own = engine.generate_target("?", max_new_tokens=12).token_ids
    assert engine.generate("?", **LOOSE, strict_answer=True).token_ids == own
    assert engine.generate("?", **LOOSE).token_ids != own
    closed = Chat([{"role": "user", "content": "?"}], {"closed": True})
    found = make_thinking_engine("abc</think>", "aBc</think>").generate(closed, **LOOSE, strict_answer=True)
    assert found.stats.accepted_tokens == found.stats.exact_tail_tokens


def test_a_given_draft_is_judged_up_to_the_end_of_its_thinking(make_thinking_engine):
    engine = make_thinking_engine(TARGET, DRAFT)
    found = engine.generate("?", **LOOSE, strict_answer=True, draft_text="Mmm</think>no")
    assert found.text == "Mmm</think>xyzabc</think>x"


def test_strict_answer_needs_a_model_that_thinks(make_engine, make_thinking_engine):
    with pytest.raises(SettingsError, match="strict_answer is for models that think, but 'target' has no marks"):
        make_engine().generate("?", strict_answer=True)


def test_marks_are_tokens_of_the_target(tokenizer):
    own = thinking_tokenizer(tokenizer)
    marks = find_marks(own)
    assert marks is not None and (marks.start, marks.end) == ("<think>", "</think>")
    assert own.convert_ids_to_tokens([marks.start_id, marks.end_id]) == ["<think>", "</think>"]
    assert find_marks(tokenizer) is None and find_marks(own, "none") is None
    assert find_marks(own, "<think> a").end == "a"
    for wrong in ("<think>", "<think> <think>", "a b c", ""):
        with pytest.raises(ModelError, match="give two different marks, as in '<think> </think>', or 'none'"):
            find_marks(own, wrong)
    for wrong in ("<think> <|end|>", "<seed:think> </think>"):  # without a text; no token
        with pytest.raises(ModelError, match="which is no token with a text"):
            find_marks(own, wrong)


@pytest.mark.parametrize(
    ("opened", "messages", "options", "begun"),
    [
        (True, [("user", "?")], {}, True),
        (True, [("user", "?")], {"closed": True}, False),
        (False, [("user", "?")], {}, None),
        (False, [("user", "What does <think> mean?")], {}, None),
        (False, [("user", "?"), ("assistant", "<think>Hm</think>No."), ("user", "<think>")], {}, None),
        (False, [("user", "?"), ("assistant", "<think>Hm")], {}, True),
        (False, [("user", "?"), ("assistant", "<think>Hm</think>No")], {}, False),
    ],
)
def test_where_a_prompt_ends(tokenizer, make_model, opened, messages, options, begun):
    own = thinking_tokenizer(tokenizer, opened)
    prompt = Chat([{"role": role, "content": text} for role, text in messages], options)
    from parse_infer.text.prompts import render_prompt

    found = thinking_of(own, find_marks(own), prompt, render_prompt(own, prompt, {}))
    assert found.begun is begun


@pytest.mark.parametrize(
    ("begun", "ids", "kept"),
    [
        (True, "ab", 2), (True, "a.b", 2), (True, ".", 1), (True, "<.b", 2),
        (None, "<a.b", 3), (None, "<ab", 3), (None, "ab", 0), (None, "", 0), (None, ".a", 0),
    ],
)  # fmt: skip
def test_the_tokens_of_the_thinking(tokenizer, begun, ids, kept):
    """ "<" and "." stand for the marks."""
    marks = find_marks(thinking_tokenizer(tokenizer))
    thinking = Thinking(marks, begun)
    draft = [{"<": marks.start_id, ".": marks.end_id}.get(one, ord(one)) for one in ids]
    assert thinking.tokens_of(draft, ()) == kept
    ended = [n for n in range(len(draft) + 1) if thinking.ended(draft[:n])]
    expected = [kept] if ids and (kept == 0 or draft[kept - 1] == marks.end_id) else []
    assert ended[:1] == [max(1, n) for n in expected]
