"""Thresholds, scores and the zero-shot judge."""

from __future__ import annotations

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.text.cuts import CutPolicy
from tests.parse_infer.engine.thresholds import PROMPT


def test_the_threshold_comes_from_the_adapter_unless_given(make_engine):
    engine = make_engine()
    engine.backend.judge.config.threshold = 0.25
    parts = engine.target, engine.draft, engine.backend.judge
    assert ParseEngine.from_models(*parts).threshold == 0.25
    assert ParseEngine.from_models(*parts, threshold=0.75).threshold == 0.75
    engine.backend.judge.config.threshold = None
    assert ParseEngine.from_models(*parts).threshold == 0.5
    with pytest.raises(ValueError, match="-1"):
        ParseEngine.from_models(*parts, threshold=-1)
    strict = ParseEngine.from_models(*parts, threshold=2.0)
    assert strict.generate(PROMPT, max_new_tokens=8, keep_greedy_match=False).stats.accepted_tokens == 0
    assert strict.generate(PROMPT, max_new_tokens=8, threshold=0.0).stats.accepted_tokens == 8


def test_score_judges_a_response_as_a_draft_is_judged(engine):
    response = "There are 2 x 3 = 6.\nSo é 6."
    _, verified, *_ = engine.stream(PROMPT, draft_text=response, threshold=0.0)
    score = engine.score(PROMPT, response)
    assert [s.validity for s in score.segments] == pytest.approx([s.validity for s in verified.segments], abs=1e-5)
    assert "".join(s.text for s in score.segments) == response
    assert score.validity == score.segments[-1].validity and score.threshold == 0.5
    below = [i for i, s in enumerate(score.segments) if s.validity < 0.5]
    assert score.first_error == (below[0] if below else None)
    lines = engine.score(PROMPT, response, cut_policy=CutPolicy("step"))
    assert [s.text for s in lines.segments] == ["There are 2 x 3 = 6.\n", "So é 6."]
    assert lines.validity == pytest.approx(score.validity, abs=1e-5)
    assert engine.score(PROMPT, response, cut_policy="step") == lines
    with pytest.raises(ValueError, match="steps"):
        engine.score(PROMPT, response, cut_policy="steps")


def test_a_judge_of_tokens_scores_the_end_of_a_finished_response(engine, random_adapter):
    judged = ParseEngine.from_models(engine.target, engine.draft, random_adapter(engine.target.model))
    finished, unfinished = (judged.score(PROMPT, "Six.", finished=finished).validity for finished in (True, False))
    assert finished != pytest.approx(unfinished, abs=1e-3)


def test_score_refuses_what_it_cannot_judge(engine):
    with pytest.raises(ValueError, match="context window of 'target'"):
        engine.score(PROMPT, "x" * 2100)
    with pytest.raises(ValueError, match="response is ''"):
        engine.score(PROMPT, "")
    with pytest.raises(ValueError, match="has no judge"):
        ParseEngine.from_models(engine.target, engine.draft).score(PROMPT, "Fine.")


def test_zero_shot_needs_no_adapter(engine):
    judge = ZeroShotJudge(engine.target.model, engine.target.tokenizer, words=("yes", "no"))
    zero = ParseEngine.from_models(engine.target, engine.draft, judge)
    assert zero.threshold == 0.5
    result = zero.generate(PROMPT, draft_text="One.\nTwo.\nThree.", threshold=0.0)
    assert [s.text for s in result.spans] == ["One.\n", "Two.\n", "Three."]
    assert all(0 < s.validity < 1 for s in result.spans)
    alone = zero.generate_target(PROMPT, max_new_tokens=12)
    assert zero.generate(PROMPT, max_new_tokens=12, threshold=1.5).token_ids == alone.token_ids
