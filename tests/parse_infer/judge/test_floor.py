"""A floor below a trained judge, in this process; `test_judge_registry.py` compares it with servers."""

from __future__ import annotations

from typing import Any

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.judge.floor import FlooredJudge
from parse_infer.judge.registry import find_rule
from parse_infer.text.cuts import CutPolicy

EVERY = CutPolicy("tokens", every=1)
TEXT = "Tom has 5 apples."


@pytest.mark.parametrize(
    "parts",
    [{}, {"stream": True}, {"stream": True, "layers": (1,), "second": False}],
    ids=["head", "stream", "layers"],
)
@pytest.mark.parametrize("rule", ["min_p:ratio=0.6", "typical_acceptance", "fly:window=1"])
def test_a_floor_takes_nothing_from_what_it_lets_pass(make_engine, random_adapter, parts: dict[str, Any], rule: str):
    """The judge reads fewer first choices than some rules, and may read hidden states or a second stream."""
    given, floor = make_engine(noise=0.3), find_rule(rule)
    adapter = random_adapter(given.target.model, **parts)
    judges = (adapter, floor.load(given.target.tokenizer), FlooredJudge(adapter, floor))
    engines = [ParseEngine.from_models(given.target, given.draft, judge) for judge in judges]
    text = engines[0].generate(TEXT, max_new_tokens=24, threshold=0.0, block_tokens="whole").text
    own, allowed, both = ([s.validity for s in e.score(TEXT, text, cut_policy=EVERY).segments] for e in engines)
    passing = [value >= floor.threshold for value in allowed]
    assert both == [
        pytest.approx(value, abs=1e-6) if passes else 0.0 for value, passes in zip(own, passing, strict=True)
    ]
    assert any(passing) and not all(passing), "the test must say something"
    assert len({judge.fingerprint for judge in judges}) == 3
