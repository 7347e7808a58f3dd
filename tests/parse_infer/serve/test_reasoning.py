"""Thinking is split off from the content, streamed and whole, as vLLM's reasoning parsers do."""

from __future__ import annotations

import json
import re

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.errors import SettingsError
from parse_infer.serve.app import create_app
from parse_infer.serve.reasoning import ReasoningSplitter
from parse_infer.serve.settings import ApiSettings
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.text.thinking import Thinking, ThinkingMarks
from tests.parse_infer.serve.conftest import Running, running

MARKS = ThinkingMarks("<think>", "</think>", 1, 2)
TEXTS = [
    (True, "Hm.</think>\n\n4", ("Hm.", "\n\n4")),
    (True, "\n<think>Hm.</think>4", ("Hm.", "4")),  # a second mark
    (True, "Hm, </thin", ("Hm, </thin", "")),
    (True, "</think>4", ("", "4")),
    (True, "a</think>b</think>c <think>d", ("a", "b</think>c <think>d")),
    (True, "", ("", "")),
    (None, "<think>\nHm.\n</think>\n\n4", ("\nHm.\n", "\n\n4")),
    (None, "\n<think>Hm.</think>4", ("Hm.", "4")),
    (None, "<think>Hm", ("Hm", "")),
    (None, "<think>", ("", "")),
    (None, "<thi", ("", "<thi")),
    (None, " 4 < 5 <think>", ("", " 4 < 5 <think>")),
    (False, "<think>a</think>b", ("", "<think>a</think>b")),
]


@pytest.mark.parametrize(("begun", "text", "expected"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_of_any_size_are_split_alike(begun, text, expected, size):
    splitter, reasoning, content = ReasoningSplitter(Thinking(MARKS, begun)), "", ""
    pieces = [text[i : i + size] for i in range(0, len(text), size)] + [""]
    for i, piece in enumerate(pieces):
        new = splitter.add(piece, last=i == len(pieces) - 1)
        assert not (new.reasoning and content), "reasoning comes first"
        reasoning, content = reasoning + new.reasoning, content + new.content
    assert (reasoning, content) == expected


def test_text_is_held_back_only_while_it_may_be_a_mark():
    splitter = ReasoningSplitter(Thinking(MARKS, True))
    assert splitter.add("Hm. 3 <", last=False).reasoning == "Hm. 3 "
    assert splitter.add(" 4", last=False).reasoning == "< 4"
    assert splitter.add("</think>5", last=False).content == "5"
    assert splitter.add("</thin", last=False).content == "</thin"


def test_without_thinking_all_is_content():
    assert ReasoningSplitter(None).add("<think>a</think>", last=False).content == "<think>a</think>"


@pytest.fixture
def thinking(make_thinking_engine) -> Running:
    def engine() -> ParseEngine:
        return make_thinking_engine("abc</think>xyz", "aBc</think>xYz")

    with running(ThreadRunner(engine()), engine()) as served:
        yield served


def split(text: str) -> tuple[str | None, str | None]:
    reasoning, mark, content = text.partition("</think>")
    return reasoning, content if mark else None


FIELDS = [{}, {"max_tokens": 2}, {"parse": {"strict_answer": True}}, {"stop": "z"}, {"n": 2}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_streamed_and_whole_answers_have_reasoning(thinking, fields):
    fields = {"max_tokens": 12, **fields, "parse": {"threshold": 0.0, **fields.get("parse", {})}}
    n, stop = fields["max_tokens"], fields.get("stop", ())
    own = thinking.engine.generate("?", max_new_tokens=n, stop=stop, **fields["parse"])
    expected = split(own.text.removesuffix(stop or "\0"))
    whole = thinking.chat("?", **fields).json()["choices"]
    for choice in whole:
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == expected
        assert message["reasoning_content"] == message["reasoning"]
        assert "</think>" in "".join(span["text"] for span in choice["parse"]["spans"]) or expected[1] is None
    deltas = []
    for line in re.findall("data: ({.*)", thinking.chat("?", **fields, stream=True).text):
        deltas += [choice["delta"] for choice in json.loads(line)["choices"] if choice["index"] == 0]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    for name, text in zip(("reasoning", "content"), expected, strict=True):
        assert "".join(delta.get(name) or "" for delta in deltas) == (text or "")
    assert all(deltas[1:-1]), "no empty chunk but the last"


@pytest.mark.slow
def test_openais_client_reads_the_reasoning(thinking):
    with thinking.client as client:
        chat = {"model": "target", "messages": [{"role": "user", "content": "?"}], "max_tokens": 12}
        message = client.chat.completions.create(**chat).choices[0].message
        assert message.reasoning and message.reasoning_content and message.content
        closed = {"chat_template_kwargs": {"closed": True}}
        assert client.chat.completions.create(**chat, extra_body=closed).choices[0].message.reasoning is None


def test_plain_completions_keep_the_marks(thinking):
    body = {"prompt": "<|assistant|><think>", "max_tokens": 12, "parse": {"threshold": 0.0}}
    (choice,) = thinking.post("/v1/completions", body).json()["choices"]
    assert "</think>" in choice["text"]


def test_strict_answer_needs_a_model_that_thinks(served):
    refused = served.chat(parse={"strict_answer": True})
    assert refused.status_code == 400
    assert "strict_answer is for models that think" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_an_operator_chooses_what_is_the_targets_own(make_thinking_engine):
    def engine() -> ParseEngine:
        return make_thinking_engine("abc</think>xyz", "aBc</think>xYz")

    def thought(server: Running, **parse: object) -> tuple[str, str]:
        message = server.chat("?", max_tokens=7, parse={"threshold": 0.0, **parse}).json()["choices"][0]["message"]
        return message["reasoning"], message["content"]

    with running(ThreadRunner(engine()), engine(), strict_answer=True, strict_tokens=3) as strict:
        assert thought(strict) == ("abc", "xyz")
        assert thought(strict, strict_tokens=0) == ("aBc", "xyz")
        assert thought(strict, strict_tokens=0, strict_answer=False) == ("aBc", "xYz")
        assert thought(strict, draft_text="aBc</think>xYz") == ("aBc", "xyz")
        assert thought(strict, mode="target") == ("abc", "xyz")


def test_strict_answer_is_checked_before_the_server_starts(served):
    with pytest.raises(SettingsError, match="omit --strict-answer, or name them with --thinking-marks"):
        create_app(served.runner, ApiSettings(strict_answer=True))
