"""Sequential verification, one step at a time, as in SpecReason (arXiv 2504.07891): a baseline of PARSE.

The draft model writes one segment and the target judges it. The target rewrites a rejected segment. Everything else is
PARSE's: loop, judge, caches, greedy match and token proposers. Only the order differs: one target forward per segment,
for which the draft model waits.
"""

from __future__ import annotations

from parse_infer.drafters.draft_model import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError


def sequential_engine(engine: ParseEngine) -> ParseEngine:
    """Build an engine of the same parts whose drafter proposes one segment at a time.

    Raises:
        ValueError: the engine has no draft model or no judge.
    """
    if engine.draft is None or engine.backend.judge is None:
        raise ParseError("sequential verification needs a draft model and an adapter: give both")
    policy = engine.backend.segmenter.policy
    return ParseEngine.from_models(
        engine.target,
        engine.draft,
        engine.backend.judge,
        drafter=ModelDrafter(engine.draft, engine.target, one_segment=policy),
        target_drafter=engine.backend.target_drafter,
        threshold=engine.threshold,
        cut_policy=policy,
    )
