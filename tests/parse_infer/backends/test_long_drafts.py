"""A draft with thousands of cuts costs a bounded request, and is judged from its beginning to its end."""

from __future__ import annotations

import itertools

import pytest

from parse_infer.backends.replicas import ReplicaPool
from parse_infer.engine import ParseEngine
from parse_infer.events import Verified
from parse_infer.judge.cuts import CutPolicy
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.vllm_plugin import validity_requests
from tests.parse_infer.backends.conftest import CUTS

PROMPT = "Tom has 5 apples."
LINES = "1\n" * 16_000
MOST_IDS, MOST_PROMPTS = 2**20, 256  # of one request


class Asked(Exception):
    """The request that would have been sent."""


@pytest.fixture(params=["probe", "no probe", "zero-shot"])
def engine(request, make_engine, random_adapter) -> ParseEngine:
    """One for each kind of judge, with room for long drafts."""
    made = make_engine(cut_policy=CUTS)
    made.target.window = 40_000
    judge = made.backend.judge
    if request.param == "no probe":
        judge = random_adapter(made.target.model, probe_ids=())
    elif request.param == "zero-shot":
        judge = ZeroShotJudge(made.target.model, made.target.tokenizer, CUTS)
    return ParseEngine.from_models(made.target, made.draft, judge, cut_policy=CutPolicy("step"))


def test_a_draft_of_many_short_lines_is_one_request_of_bounded_size(engine, connect, monkeypatch):
    coordinator, _, _ = connect(engine, overlap=False)

    async def ask(self, body, *_, **__):
        raise Asked(body)

    monkeypatch.setattr(ReplicaPool, "ask", ask)
    with pytest.raises(Asked) as asked:
        coordinator.generate(PROMPT, draft_text=LINES, max_new_tokens=36_000)
    prompts = asked.value.args[0]["prompt"]
    assert len(prompts) <= MOST_PROMPTS and sum(map(len, prompts)) <= MOST_IDS
    assert max(map(len, prompts)) > 32_000, "the whole draft is always asked about"
    assert sum(map(len, prompts)) > MOST_IDS / 4, "far fewer than might be"


def test_a_long_draft_is_judged_at_even_distances(make_engine, connect, monkeypatch):
    """With smaller bounds, so that a small model answers; while the draft is written nothing else is asked."""
    monkeypatch.setattr(validity_requests, "MAX_PROMPTS", 5)
    engine = make_engine(cut_policy=CutPolicy("tokens", every=2))
    for overlap in (False, True):
        coordinator, (target,), _ = connect(engine, overlap=overlap)
        stream = coordinator.stream(PROMPT, threshold=0.0, max_new_tokens=40)
        (verified,) = (event for event in stream if isinstance(event, Verified))
        assert [segment.n_tokens for segment in verified.segments] == [8, 8, 8, 8, 8]
        assert (
            "".join(segment.text for segment in verified.segments)
            == engine.generate_draft(PROMPT, max_new_tokens=40).text
        )
        asked = [body["prompt"] for body in target.bodies if body.get("logprobs")]
        assert sum(map(len, asked)) <= 5 * 4, "a draft that grows is asked about again and again"


def test_which_cuts_are_asked_about_depends_on_what_lies_before_only(make_engine, connect):
    """What was found while the draft was written still serves at its end."""
    coordinator, _, _ = connect(make_engine(cut_policy=CUTS))
    asked = coordinator.backend._target.questions
    lengths = (10, 300, 1000, 3000, 9000)
    chosen = [set(asked.affordable(200, range(1, n + 1))) - {n} for n in lengths]
    for n, (shorter, longer) in zip(lengths, itertools.pairwise(chosen), strict=False):
        assert {cut for cut in longer if cut < n} <= shorter
    assert chosen[0] == set(range(1, 10)), "a draft of usual length is judged at all of its cuts"
