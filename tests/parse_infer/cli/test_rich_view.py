"""What a terminal shows of an answer is the answer, split by author."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from parse_infer.cli.rich_view import AnswerView, coloured_spans, legend, score_table
from parse_infer.engine import ParseEngine
from parse_infer.models.loading import LanguageModel
from parse_infer.request.events import Accepted, Drafted, Resumed, Verified
from parse_infer.request.output import Score, Segment, Span


def shown(renderable, **options) -> str:
    console = Console(file=io.StringIO(), width=80, **options)
    console.print(renderable)
    return console.file.getvalue()


SEGMENTS = [Segment("one\n", 2, 0.9), Segment("two\n", 2, 0.8), Segment("three\n", 3, 0.1)]


def test_a_view_splits_the_draft_where_it_was_kept():
    view = AnswerView(0.5)
    view.update(Drafted(1, "one\ntwo\nthree\n", 7))
    assert [row.kind for row in view._pending] == ["pending"]
    view.update(Verified(1, SEGMENTS))
    view.update(Accepted(1, "one\ntwo\nth", 5, "ree\n"))
    view.update(Resumed(1, "irty", 3))
    view.update(Resumed(1, " one\nand", 4))
    assert [(r.kind, r.text, r.validity) for r in view.rows] == [
        ("accepted", "one\n", 0.9),
        ("accepted", "two\n", 0.8),
        ("exact", "th", None),
        ("rejected", "ree\n", 0.1),
        ("target", "irty one\n", None),
        ("target", "and", None),
    ]
    lines = shown(view).splitlines()
    assert lines[0].split() == ["draft", "✓", "0.90", "one"]
    assert lines[3].split() == ["draft", "✗", "0.10", "ree"]
    assert lines[4].split() == ["target", "irty", "one"]


def test_text_that_was_kept_below_the_threshold_is_the_targets_own_choice():
    view = AnswerView(0.85)
    view.update(Verified(1, SEGMENTS))
    view.update(Accepted(1, "one\ntwo\n", 4, "three\n"))
    assert [row.kind for row in view.rows] == ["accepted", "exact", "rejected"]


def test_three_colours():
    view = AnswerView(0.5)
    view.update(Verified(1, SEGMENTS))
    view.update(Accepted(1, "one\ntwo\n", 4, "three\n"))
    view.update(Resumed(1, "3", 5))
    text = shown(view, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[32mone" in text and "\x1b[31mthree" in text and "\x1b[36m3" in text
    assert "written by the target" in shown(legend())


@pytest.mark.parametrize("block_tokens", ["whole", 6])
def test_the_view_of_a_real_stream_holds_exactly_the_answer(make_model, tokenizer, random_adapter, block_tokens):
    target, draft = make_model("llama", seed=0), make_model("llama", seed=5)
    engine = ParseEngine.from_models(
        LanguageModel("t", target, tokenizer),
        LanguageModel("d", draft, tokenizer),
        random_adapter(target),
    )
    for threshold in (0.0, 0.5, 1.1):
        view = AnswerView(threshold)
        for event in engine.stream("Hello", max_new_tokens=24, threshold=threshold, block_tokens=block_tokens):
            view.update(event)
        written = [row.instead if row.kind == "corrected" else row.text for row in view.rows if row.kind != "rejected"]
        assert "".join(written) == event.generation.text
        assert not view._pending
        kinds = {row.kind for row in view.rows}
        assert threshold != 0.0 or kinds <= {"accepted", "target"}
        assert threshold != 1.1 or "accepted" not in kinds


def test_spans_without_colours_are_the_answer():
    spans = [Span("a [b] ", "draft", 2, 0.9), Span("c\n", "target", 1)]
    assert coloured_spans(spans).plain == "a [b] c\n"


def test_a_score_marks_the_first_error():
    lines = shown(score_table(Score(SEGMENTS, 0.5))).splitlines()
    assert lines[0].split() == ["✓", "0.90", "one"]
    assert lines[2].split() == ["✗", "first", "error", "0.10", "three"]
