"""Prompts that only the draft model's chat template refuses: the target answers alone, in this process too."""

from __future__ import annotations

import copy
import logging

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.errors import PromptError
from parse_infer.request.events import Drafted
from tests.parse_infer.language_models import language_model, printable, word_tokenizer

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
NO_THINKING = "{% for m in messages %}[Q]{{ m.content.split('</think>')[-1] }}{% endfor %}"
USER = {"role": "user", "content": "How many?"}
REFUSED = {
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "thought": [USER, {"role": "assistant", "content": "<think>5</think>It is"}],
}


@pytest.fixture(params=["shared tokens", "other tokens"])
def engine(request, make_engine, make_model) -> ParseEngine:
    made = make_engine()
    draft = made.draft
    if request.param == "other tokens":
        words = word_tokenizer()
        model = printable(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words)
        draft = language_model(model, words, "draft")
    draft.tokenizer = copy.deepcopy(draft.tokenizer)
    draft.tokenizer.chat_template = NO_SYSTEM + NO_THINKING
    return ParseEngine.from_models(made.target, draft, made.backend.judge)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "settings", [{"threshold": 0.0}, {"mode": "exact"}, {"threshold": 0.0, "block_tokens": "whole"}]
)
def test_the_target_answers_what_the_draft_models_template_refuses(engine, caplog, name, settings):
    prompt = REFUSED[name]
    with caplog.at_level(logging.WARNING, "parse_infer.backends"):
        found = engine.generate(prompt, max_new_tokens=20, **settings)
    alone = engine.generate_target(prompt, max_new_tokens=20)
    assert (found.text, found.token_ids, found.fallback) == (alone.text, alone.token_ids, "draft_refused")
    assert found.stats.draft_tokens == 0 and {span.source for span in found.spans} == {"target"}
    (record,) = caplog.records
    assert "draft model refuses the prompt" in record.getMessage() and "brief" not in record.getMessage()
    events = list(engine.stream(prompt, max_new_tokens=20, **settings))
    assert not any(isinstance(event, Drafted) for event in events) and events[-1].generation.text == alone.text
    drafted = engine.generate([USER], max_new_tokens=20, **settings)
    assert drafted.fallback is None and drafted.stats.draft_tokens


def test_what_needs_the_draft_model_itself_is_refused(engine):
    with pytest.raises(PromptError, match="System role not supported"):
        engine.generate_draft(REFUSED["system"])
    engine.pair_wrapper = lambda pair, request: pair  # a measurement
    with pytest.raises(PromptError, match="System role not supported"):
        engine.generate(REFUSED["system"], threshold=0.0)


def test_a_prompt_that_the_targets_template_refuses_has_no_answer(engine):
    target = copy.copy(engine.target)
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = NO_SYSTEM + target.tokenizer.chat_template
    engine = ParseEngine.from_models(target, engine.draft, engine.backend.judge)
    with pytest.raises(PromptError, match="System role not supported"):
        engine.generate(REFUSED["system"], threshold=0.0)
