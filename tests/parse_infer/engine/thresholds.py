"""Thresholds at which an engine with random models keeps a part of its draft, and the target's own tokens."""

from __future__ import annotations

import itertools

from parse_infer.engine import ParseEngine
from parse_infer.models.decoder import Decoder
from parse_infer.settings.acceptance import maximal_valid_prefix

PROMPT = "Tom has 5 apples."


def greedy(engine: ParseEngine, ids: list[int], n: int) -> list[int]:
    """The target's greedy continuation of any context, by a decoder of its own."""
    decoder = Decoder(engine.target.model, engine.target.eos_ids)
    decoder.seek(ids)
    return list(decoder.decode(n))


def partial_threshold(engine: ParseEngine, rule: str = "first_failure", **options) -> float:
    """A threshold at which the engine keeps some segments of its first draft, but not all."""
    options = {"max_new_tokens": 40, "block_tokens": "whole", **options}
    _, verified, *_ = itertools.islice(engine.stream(PROMPT, **options), 2)
    validity = [segment.validity for segment in verified.segments]
    for threshold in sorted(validity):
        if 0 < maximal_valid_prefix(validity, threshold, rule) < len(validity):
            return threshold
    raise AssertionError(f"no threshold splits {validity}: choose another seed")


def threshold_of_both(engine: ParseEngine, **options) -> float:
    """A threshold at which target and draft model both write a part of the answer."""
    _, verified, *_ = itertools.islice(engine.stream(PROMPT, **{**options, "block_tokens": "whole"}), 2)
    thresholds = sorted(segment.validity for segment in verified.segments)
    for threshold in thresholds:
        spans = engine.generate(PROMPT, threshold=threshold, **options).spans
        if {span.source for span in spans} == {"draft", "target"}:
            return threshold
    raise AssertionError(f"one of the two writes everything at each of {thresholds}: choose another seed")
