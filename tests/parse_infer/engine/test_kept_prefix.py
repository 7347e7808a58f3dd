"""The kept prefix of a draft, and the tokens that follow."""

from __future__ import annotations

import pytest

from parse_infer.settings.acceptance import maximal_valid_prefix
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.engine.thresholds import PROMPT, greedy, partial_threshold


@pytest.mark.parametrize("rule", ["first_failure", "longest"])
def test_the_target_resumes_after_the_maximal_valid_prefix(engine, rule):
    draft = engine.generate_draft(PROMPT, max_new_tokens=36 if rule == "longest" else 40).token_ids
    text = engine.target.tokenizer.decode(draft)
    threshold = partial_threshold(engine, rule, draft_text=text, max_new_tokens=50)
    options = {"max_new_tokens": 50, "keep_greedy_match": False, "acceptance": rule, "threshold": threshold}
    _, verified, accepted, *_, done = engine.stream(PROMPT, draft_text=text, **options)
    kept = maximal_valid_prefix([s.validity for s in verified.segments], threshold, rule)
    cut = sum(s.n_tokens for s in verified.segments[:kept])
    assert 0 < cut < len(draft) and accepted.n_tokens == cut
    result = done.generation
    assert result.token_ids[:cut] == draft[:cut]
    prompt = engine.target.render(PROMPT)
    assert result.token_ids[cut:] == greedy(engine, prompt + draft[:cut], 50 - cut)
    assert [span.validity for span in result.spans[:kept]] == [s.validity for s in verified.segments[:kept]]
    assert (result.spans[kept].source, result.spans[kept].validity) == ("target", None)


def test_the_rules_differ_for_a_failure_in_the_middle(engine):
    *_, done = engine.stream(PROMPT, max_new_tokens=40, threshold=0.0)
    validity = [span.validity for span in done.generation.spans]
    threshold = validity[-1]  # the whole draft holds
    assert min(validity) < threshold
    first = engine.generate(PROMPT, max_new_tokens=40, threshold=threshold, keep_greedy_match=False)
    longest = engine.generate(
        PROMPT, max_new_tokens=40, threshold=threshold, keep_greedy_match=False, acceptance="longest"
    )
    assert first.stats.accepted_tokens < longest.stats.accepted_tokens == 40


def test_a_draft_accepted_as_a_whole_costs_one_forward(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40)
    ours = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert ours.token_ids == draft.token_ids and ours.text == draft.text
    assert (ours.stats.target_forwards, ours.stats.acceptance_rate) == (1, 1.0)


def test_the_exact_tail_changes_no_token_and_saves_forwards(engine):
    own = engine.generate_target(PROMPT, max_new_tokens=40).text
    text = own[:38] + ("x" if own[38] != "x" else "y")  # the target's own answer but for its last letter
    threshold = partial_threshold(engine, draft_text=text)
    settings = GenerationSettings(max_new_tokens=40, threshold=threshold)
    without = engine.generate(PROMPT, settings.override(keep_greedy_match=False), draft_text=text)
    with_tail = engine.generate(PROMPT, settings, draft_text=text)
    saved = 38 - without.stats.accepted_tokens
    assert 0 < saved < 38 and with_tail.stats.exact_tail_tokens == saved
    assert with_tail.stats.accepted_tokens == 38
    assert with_tail.token_ids == without.token_ids
    assert with_tail.stats.target_forwards <= without.stats.target_forwards - saved
    tail = next(span for span in with_tail.spans if span.validity is None)
    assert (tail.source, tail.n_tokens) == ("draft", saved)


def test_no_exact_tail_where_the_target_samples(engine):
    sampled = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.5, resume_sampling=Sampling(temperature=1.0, seed=3)
    )
    assert sampled.stats.accepted_tokens == 0
