"""Requests and answers, without a server."""

from __future__ import annotations

import math

import pytest

from parse_infer.vllm_plugin.compatibility import check_version
from parse_infer.vllm_plugin.probe_ids import ProbeIds
from parse_infer.vllm_plugin.validity_requests import (
    TrainedQuestions,
    ZeroShotQuestions,
    read_completion,
    validity_of,
)


def config(adapter, **changes):
    for key, value in changes.items():
        setattr(adapter.config, key, value)
    return adapter.config


def test_each_number_of_draft_tokens_and_hidden_end_has_an_id_of_its_own():
    ids = ProbeIds(100, (7, 9), end_ids=(2, 5), counts=True)
    suffixes = {tuple(ids.suffix(n, end)) for n in range(11) for end in (None, 2, 5)}
    assert {first for first, _ in suffixes} == {100}
    assert {last for _, last in suffixes} == set(range(ids.closing, 100 + ids.size(10)))
    assert ProbeIds(100, (7, 9)).suffix(3) == ProbeIds(100, (7, 9)).suffix(4) == [100, 101]
    assert ProbeIds(100, (), counts=True).suffix(3) == [103]


def test_a_draft_is_asked_about_at_each_cut_without_an_end_token_that_the_probe_writes_itself(
    make_model, random_adapter
):
    plain = TrainedQuestions.of(config(random_adapter(make_model())), [4])
    assert plain.about([1, 2], [3, 5, 4], [0, 2, 3]).prompts == [
        [1, 2, 260, 261],
        [1, 2, 3, 5, 260, 263],
        [1, 2, 3, 5, 4, 260, 264],
    ]
    closing = TrainedQuestions.of(config(random_adapter(make_model()), closes_turn=True), [4])
    asked = closing.about([1, 2], [3, 5, 4], [2, 3])
    assert asked.prompts == [[1, 2, 3, 5, 260, 265], [1, 2, 3, 5, 260, 266]]
    assert asked.top == 2
    for context, cuts in (([], [1]), ([1], [2, 2]), ([1], [4])):
        with pytest.raises(ValueError, match=r"cuts must increase|context"):
            plain.about(context, [3, 5, 4], cuts)


def test_without_a_probe_one_prompt_asks_about_all_cuts_as_far_as_the_window_has_room(make_model, random_adapter):
    questions = TrainedQuestions.of(config(random_adapter(make_model(), probe_ids=())), [1])
    assert questions.answers[:2] == [(0, 2), (3, 4)]
    asked = questions.about([1, 2], [3, 5, 4, 6], [1, 3, 4])
    assert asked.prompts == [[1, 2, 3, 5, 4, 6, 261, 263, 264]] and asked.sizes == [3] and asked.top == 6
    narrow = questions.about([1, 2], [3, 5, 4, 6], [1, 3, 4], window=9)
    assert narrow.prompts == [[1, 2, 3, 5, 4, 261, 263], [1, 2, 3, 5, 4, 6, 264]] and narrow.sizes == [2, 1]
    assert questions.about([1, 2], [3, 5, 4, 6], [1, 3, 4], window=8).sizes == [1, 1, 1]
    assert questions.about([1], list(range(300)), list(range(300))).sizes == [128, 128, 44]

    def told(*validities):
        return {
            token: math.log(p / len(validities))
            for pair, v in zip(questions.answers, validities, strict=False)
            for token, p in zip(pair, (v, 1 - v), strict=True)
        }

    assert asked.logits([told(0.9, 0.5, 0.2)]) == pytest.approx([math.log(9), 0, math.log(0.25)])
    assert narrow.logits([told(0.9, 0.5), told(0.2)]) == pytest.approx([math.log(9), 0, math.log(0.25)])
    for wrong in (told(0.9, 0.5), told(0.9, 0.5, 0.2, 0.7)):
        with pytest.raises(ValueError, match="lacks the PARSE plugin"):
            asked.logits([wrong])


def test_validity_is_read_from_the_two_answers_and_becomes_a_probability_as_in_the_local_engine(
    make_model, random_adapter
):
    adapter = random_adapter(make_model())
    found = {0: math.log(0.8), 1: math.log(0.2)}
    assert TrainedQuestions.of(adapter.config, [4]).logits(found, 1) == pytest.approx([math.log(4)])
    assert validity_of(math.log(4)) == pytest.approx(0.8) and validity_of(-1e9) < 1e-200
    fitted = TrainedQuestions.of(config(adapter, probability={"scale": 2.0, "shift": -1.0}), [4])
    assert fitted.logits(found, 1) == pytest.approx([2 * math.log(4) - 1])
    with pytest.raises(ValueError, match="lacks the PARSE plugin"):
        fitted.logits({0: math.log(0.3), 1: math.log(0.2)}, 1)
    assert TrainedQuestions.of(adapter.config, [0, 1, 3]).answers == [(2, 4)]


def test_the_zero_shot_judge_asks_any_server(tokenizer):
    questions = ZeroShotQuestions.of(tokenizer, [258])
    (first, last) = questions.about([1], [3, 258], [1, 2]).prompts
    assert first == last, "the suffix ends the turn itself"
    text = tokenizer.decode(first[2:])
    assert text.startswith("<|end|><|user|>Is the solution so far correct?") and text.endswith("<|assistant|>")
    ((yes, no),) = questions.answers
    assert questions.logits({yes: -1.0, no: -3.0, 9: -0.5}, 1) == [2.0]
    assert questions.logits({yes: -1.0, 9: -4.0}, 1) == [3.0], "an answer that is not listed is no likelier than those"
    with pytest.raises(ValueError, match="neither answer"):
        questions.logits({9: -0.5}, 1)


def test_answers_over_http_are_read_by_index_and_refused_where_they_are_not_complete():
    answer = {
        "choices": [
            {"index": 1, "logprobs": {"top_logprobs": [{"token_id:7": -1.0, "token_id:9": -2.0}]}},
            {"index": 0, "logprobs": {"top_logprobs": [{"Yes": -0.5, "a": -3.0}]}},
        ]
    }
    assert read_completion(answer, 2, {"Yes": 4}) == [{4: -0.5, -2: -3.0}, {7: -1.0, 9: -2.0}]
    for wrong in ({}, [], None, {"choices": answer["choices"][:1]}, {"choices": [{"index": 0, "logprobs": None}] * 2}):
        with pytest.raises(ValueError, match="lacks the log-probabilities"):
            read_completion(wrong, 2)


def test_an_unknown_vllm_is_refused():
    check_version("0.32.1+cpu")
    with pytest.raises(ValueError, match=r"vLLM 0\.40\.0.*supports only vLLM 0\.32"):
        check_version("0.40.0")
