"""Token drafters change the cost of an answer and nothing else."""

from __future__ import annotations

import re

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.engine.thresholds import PROMPT, partial_threshold


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("name", ["lookup", "draft", "draft:tokens=4"])
def test_token_drafters_change_no_span(engine, name, block_tokens):
    settings = {"max_new_tokens": 60, "block_tokens": block_tokens, "threshold": partial_threshold(engine)}
    plain = engine.generate(PROMPT, **settings)
    faster = ParseEngine.from_models(
        engine.target,
        engine.draft,
        engine.backend.judge,
        target_drafter=load_token_drafter(name, engine.target, engine.draft),
    )
    for _ in range(2):  # also with everything that a first answer left in the caches
        ours = faster.generate(PROMPT, **settings)
        assert [(s.text, s.source, s.n_tokens) for s in ours.spans] == [
            (s.text, s.source, s.n_tokens) for s in plain.spans
        ]
        validity = [s.validity for s in plain.spans if s.validity is not None]
        assert [s.validity for s in ours.spans if s.validity is not None] == pytest.approx(validity, abs=1e-4)
    alone = engine.generate_target(PROMPT, max_new_tokens=60)
    guided = faster.generate_target(PROMPT, max_new_tokens=60, speculate=True)
    assert guided.token_ids == alone.token_ids
    if name == "draft:tokens=4":  # else measured times decide about the length
        assert guided.stats.target_forwards < alone.stats.target_forwards
        assert guided.stats.drafter_forwards > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_drafter": "lokup"}, "target_drafter is 'lokup'; did you mean 'lookup'?"),
        ({"target_drafter": "draft:tokens=2.5", "draft": "zoo:draft"}, "must be a whole number, not 2.5"),
        ({"target_drafter": ":tokens=3"}, "target_drafter is ''; known: lookup, draft"),
        ({"target_drafter": "draft"}, "which needs a draft model"),
        ({"target_drafter": "eagle3"}, "target_drafter is 'eagle3': give the folder of a trained"),
        ({"target_drafter": "lookup:tokens=x"}, "'tokens=x' in the token drafter 'lookup:tokens=x' is not KEY=NUMBER"),
    ],
)
def test_a_wrong_token_drafter_is_reported_before_models_are_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(
        "parse_infer.backends.local.load.load_language_model", lambda *a, **k: pytest.fail("a model was loaded")
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        ParseEngine.from_pretrained("zoo:target", **arguments)
