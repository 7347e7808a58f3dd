"""Sequential verification, one step at a time, as SpecReason does it (arXiv 2504.07891): what PARSE is compared with.

The draft model writes one segment; the target reads and judges it; a segment that is judged valid stays, any other one
the target writes itself. Everything else is PARSE's: the loop, the judge, the caches, the exact tail, the guesses from
a rejected segment and from the token drafter. Only the order of work differs: one target forward for each segment, and
the draft model waits for each.
"""

from __future__ import annotations

import sys

from parse_infer.drafters.draft_model import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.settings import GenerationSettings


def sequential_engine(engine: ParseEngine) -> ParseEngine:
    """The same loaded parts, with a drafter that proposes one segment at a time.

    Raises:
        ValueError: the engine has no draft model or no judge.
    """
    if engine.draft is None or engine.backend.judge is None:
        raise ValueError("sequential verification needs a draft model and an adapter: give both")
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


def sequentially(settings: GenerationSettings) -> GenerationSettings:
    """These settings with the draft model taking over after every segment, however many there are."""
    return settings.override(resume="hand_back", max_rounds=sys.maxsize)
