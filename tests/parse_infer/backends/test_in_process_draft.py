"""A draft model in the coordinator's process: rows come and go, and what goes wrong hurts nobody else."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from parse_infer.backends.pool.retries import Unavailable
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.target import server_settings
from parse_infer.models.batch_decoder import Batch, BatchDecoder
from parse_infer.settings.sampling import Sampling
from tests.parse_infer.backends.conftest import WAIT_S, Connect

GREEDY = Sampling()
IDS = [list(range(10, 10 + n)) for n in (5, 9, 2, 7, 4)]


@pytest.fixture
def draft(engine):
    local = InProcessDraft(engine.draft, rows=2)
    yield local
    local.close()
    assert "parse-draft" not in {thread.name for thread in threading.enumerate()}


async def read(local: InProcessDraft, ids, max_tokens=50, sampling=GREEDY, end_ids=frozenset()) -> list[int]:
    pieces = local.written(ids, max_tokens, server_settings(sampling, end_ids, "draft", 1))
    return [token async for piece in pieces for token in piece]


def test_more_drafts_than_rows_equal_single_drafts(engine, draft):
    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(draft, ids) for ids in IDS))

    wanted = []
    for ids in IDS:
        engine.draft.decoder.seek(ids)
        wanted.append(list(engine.draft.decoder.decode(50)))
    assert asyncio.run(all_of_them()) == wanted
    assert asyncio.run(all_of_them()) == wanted, "another event loop"
    assert any(len(tokens) > 20 for tokens in wanted), "none has more than one piece"


def test_a_draft_ends_with_the_tokens_and_the_budget_of_its_request(draft):
    whole = asyncio.run(read(draft, IDS[0]))
    end = next(i for i in range(3, len(whole)) if whole[i] not in whole[:i])
    assert asyncio.run(read(draft, IDS[0], end_ids={whole[end]})) == whole[: end + 1]
    assert asyncio.run(read(draft, IDS[0], max_tokens=7)) == whole[:7]


def test_a_few_free_slots_wait_for_the_next_draft(engine, monkeypatch):
    """Taking them away copies the keys and values of all others."""
    local, shares, shrunk = InProcessDraft(engine.draft, rows=8), [], []
    step, compact = Batch.step, Batch.compact
    monkeypatch.setattr(Batch, "step", lambda b: (shares.append(len(b.free) / max(1, len(b.runs))), step(b)))
    monkeypatch.setattr(Batch, "compact", lambda b: (shrunk.append(len(b.free)), compact(b)))

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(local, IDS[0], max_tokens=10 * n) for n in range(1, 9)))

    lengths = [len(tokens) for tokens in asyncio.run(all_of_them())]
    local.close()
    assert lengths == [10 * n for n in range(1, 9)]
    assert max(shares) == 1 / 4, "free seats were taken away at once, or too late"
    assert sum(shrunk) == 8 and len(shrunk) < 6


def test_sampled_drafts_follow_their_seed(draft):
    sampled = [Sampling(1.0, seed=seed) for seed in (1, 1, 2, None, None)]
    texts = [tuple(asyncio.run(read(draft, IDS[0], sampling=sampling))) for sampling in sampled]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_a_cancelled_draft_leaves_the_batch(draft):
    async def look_at_the_first_piece() -> None:
        pieces = draft.written(IDS[0], 10_000, server_settings(Sampling(), set()))
        await anext(pieces)
        await pieces.aclose()
        await read(draft, IDS[1], max_tokens=5)

    asyncio.run(look_at_the_first_piece())
    steps = draft._decoder.steps
    time.sleep(0.1)
    assert draft._decoder.steps == steps, "somebody is still written for"


@pytest.mark.parametrize("step", ["prefill", "_next"])
def test_a_failure_is_reported_and_the_next_draft_is_written(draft, monkeypatch, step):
    wanted = asyncio.run(read(draft, IDS[0]))
    with monkeypatch.context() as patch:

        def fail(*_):
            raise torch.OutOfMemoryError("no memory")

        patch.setattr(BatchDecoder, step, fail)
        with pytest.raises(Unavailable, match="draft model failed: no memory"):
            asyncio.run(read(draft, IDS[0]))
    assert asyncio.run(read(draft, IDS[0])) == wanted


def test_closing_ends_all_drafts(draft):
    async def closed_meanwhile() -> list[object]:
        reading = [asyncio.create_task(read(draft, ids, max_tokens=10_000)) for ids in IDS]  # more than rows
        await asyncio.sleep(0.1)
        draft.close()
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*reading, return_exceptions=True)

    found = asyncio.run(closed_meanwhile())
    assert [str(error) for error in found] == ["the draft model failed: it was closed"] * len(IDS)


@pytest.mark.slow
def test_answers_of_many_requests_at_once(engine, connect: Connect):
    coordinator, _, draft = connect(engine, local_rows=2)
    prompts = [f"Tom has {n} apples." for n in range(12)]
    found = coordinator.generate(prompts, threshold=0.0, max_new_tokens=40)
    wanted = [engine.generate(prompt, threshold=0.0, keep_greedy_match=False, max_new_tokens=40) for prompt in prompts]
    assert [g.token_ids for g in found] == [g.token_ids for g in wanted] and not draft.bodies


@pytest.mark.parametrize("local_rows", [0, 2])
def test_a_draft_is_verified_once(engine, connect: Connect, local_rows):
    coordinator, (target,), _ = connect(engine, local_rows=local_rows)
    answer = coordinator.generate("Tom has 5 apples.", threshold=0.0, max_new_tokens=40, block_tokens="whole")
    assert answer.stats.accepted_tokens == 40 and len(target.bodies) == 1
