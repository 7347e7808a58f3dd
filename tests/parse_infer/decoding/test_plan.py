"""Settings, judge and source of drafts decide what kind of request it is: one table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parse_infer.decoding.block_length import LONGEST, REPLAYED
from parse_infer.decoding.plan import Plan, SourceKind
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling

TEXT = SourceKind(lossless=True)
MODEL = SourceKind(is_model=True, blocks=True, confidences=True, lossless=True)
SEGMENTS = SourceKind(is_model=True, one_segment=True, blocks=True, confidences=True, lossless=True)
SILENT = SourceKind(is_model=True, blocks=True, lossless=True)  # a server that returns no probabilities
CHAT = SourceKind(is_model=True, lossless=True)  # and one that cannot stop after a number of tokens
SAMPLED = Sampling(temperature=0.7)

# settings, judge, source -> judged, block, ends_early, after_rejection, the rule in statistics
TABLE = [
    ({}, "token", MODEL, "token", LONGEST, True, "token", "auto"),
    ({}, "cut", MODEL, "cut", None, False, "rest", "whole"),
    ({}, "token", SILENT, "token", None, False, "token", "auto"),
    ({}, "cut", SILENT, "cut", None, False, "rest", "whole"),
    ({}, "token", TEXT, "cut", None, False, "rest", "whole"),
    ({}, "token", SEGMENTS, "cut", None, False, "segment", None),
    ({"block_tokens": 8}, "token", MODEL, "token", 8, False, "token", 8),
    ({"block_tokens": 8}, "cut", MODEL, "cut", 8, False, "segment", 8),
    ({"block_tokens": 8}, "token", CHAT, "token", None, False, "token", "auto"),
    ({"block_tokens": 8}, "cut", CHAT, "cut", None, False, "rest", "whole"),
    ({"block_tokens": 8}, "token", TEXT, "cut", None, False, "rest", "whole"),
    ({"block_tokens": "whole"}, "token", MODEL, "cut", None, False, "rest", "whole"),
    ({"mode": "exact"}, None, MODEL, None, LONGEST, True, "token", "auto"),
    ({"mode": "exact"}, "cut", MODEL, None, LONGEST, True, "token", "auto"),
    ({"mode": "exact", "block_tokens": "whole"}, "token", MODEL, None, None, False, "rest", "whole"),
    ({"mode": "exact"}, None, TEXT, None, None, False, "rest", "whole"),
    ({"threshold": 2.0}, "token", MODEL, None, LONGEST, True, "token", "auto"),
    ({"threshold": 2.0, "block_tokens": "whole"}, "token", MODEL, "cut", None, False, "rest", "whole"),
    ({"threshold": 2.0, "resume_sampling": SAMPLED}, "token", MODEL, "cut", None, False, "rest", None),
    ({"threshold": 2.0, "keep_greedy_match": False}, None, MODEL, None, None, False, "rest", None),
    ({"resume_sampling": SAMPLED}, "token", MODEL, "token", LONGEST, True, "token", "auto"),
]


def plan(settings: dict, judging, source: SourceKind, **facts) -> Plan:
    given = GenerationSettings(**{"threshold": 0.5, **settings})
    return Plan.of(given, source, judging=judging, **facts)


@pytest.mark.parametrize(("settings", "judging", "source", *"jbeas"), TABLE)
def test_settings_judge_and_source_decide(settings, judging, source, j, b, e, a, s):
    found = plan(settings, judging, source)
    assert (found.judged, found.block, found.ends_early, found.after_rejection, found.block_tokens) == (j, b, e, a, s)
    assert found.continues == (a != "rest")
    assert found.lossless == (settings.get("mode") == "exact" or found.threshold > 1)


@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_where_drafts_bring_nothing_above_one_there_are_none(threshold):
    settings = GenerationSettings(threshold=threshold)
    found = Plan.of(settings, replace(MODEL, lossless=False), judging="token")
    assert found.drafts == (threshold <= 1) and found.continues == found.drafts


def test_no_measured_time_decides_about_a_replay_or_a_promise():
    assert plan({}, "token", MODEL, pauses=True).pauses
    assert plan({"mode": "exact", "risk": None}, "token", MODEL, pauses=True).pauses
    for settings in ({"risk": 0.1}, {"adaptive": False}):
        assert not plan(settings, "token", MODEL, pauses=True).pauses
    replayed = plan({}, "token", MODEL, pauses=True, replayed=True)
    assert replayed.block == REPLAYED
    assert not (replayed.ends_early or replayed.pauses or replayed.falls_back)


def test_thresholds_are_measured_with_their_like():
    assert plan({}, "token", MODEL).measured_as != plan({"threshold": 0.99}, "token", MODEL).measured_as
    assert plan({"mode": "exact"}, None, MODEL).measured_as == plan({"threshold": 2.0}, None, MODEL).measured_as
