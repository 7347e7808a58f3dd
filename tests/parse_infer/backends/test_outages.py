"""Outages under load: no answer is wrong, doubled or lost, and without drafts none is slower than the target alone.

`PARSE_ANSWERS` sets the number of answers of the long test. Times are checked from 2000 on, on a machine that does
nothing else; smaller runs print them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.request.events import Done
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.backends.fake_server import serving
from tests.parse_infer.backends.scripted_server import Always, ScriptedServer

ANSWERS = int(os.environ.get("PARSE_ANSWERS", "200"))
CLIENTS = 32
TOKENS = 60
PAUSE_S = 0.1  # of the target, for three tokens
SETTLED_S = 5.0  # after an outage


@pytest.fixture
def scripted(make_engine, connect) -> Callable[..., tuple[ParseEngine, list[ScriptedServer], ScriptedServer]]:
    def make(**options):
        models = make_engine()
        engine = ParseEngine.from_models(models.target, models.draft)
        coordinator, targets, draft = connect(engine, server_type=ScriptedServer, parallel=CLIENTS, **options)
        draft.wrong_every = 10
        return coordinator, targets, draft

    return make


async def answer(coordinator: ParseEngine, number: int, alone: bool = False) -> tuple[float, float, list[int]]:
    """Begin, end and tokens of the answer to a prompt of its own."""
    begun, tokens = time.monotonic(), list[int]()
    prompt = f"Tom has {number} apples."
    async for event in coordinator.events(prompt, GenerationSettings(TOKENS, ignore_eos=True), alone=alone):
        if isinstance(event, Done):
            tokens = event.generation.token_ids
    return begun, time.monotonic(), tokens


def rule(coordinator: ParseEngine, server: ScriptedServer, number: int) -> list[int]:
    prompt = coordinator.target.render(f"Tom has {number} apples.")
    return list(server._write(prompt, {"max_tokens": TOKENS}))


def under_load(
    coordinator: ParseEngine, until: Callable[[], bool], alone: bool = False
) -> list[tuple[int, float, float, list[int]]]:
    """Number, begin, end and tokens of the answers that `CLIENTS` clients get, one after the other, until then."""
    found: list[tuple[int, float, float, list[int]]] = []
    numbers = iter(range(10**6))

    async def client() -> None:
        while not until():
            number = next(numbers)
            found.append((number, *await answer(coordinator, number, alone)))

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    coordinator.backend.run(clients())
    return found


def kill(draft: ScriptedServer) -> None:
    draft.offline = True


def hang(draft: ScriptedServer) -> None:
    draft.faults = Always("hangs")  # type: ignore[assignment]


def fail(draft: ScriptedServer) -> None:
    draft.faults = Always("500")  # type: ignore[assignment]


@pytest.mark.parametrize("how", [kill, hang, fail])
@pytest.mark.slow
def test_without_its_draft_server_no_answer_is_wrong_or_slow(scripted, how):
    coordinator, (target,), draft = scripted()
    target.pause, draft.pause = PAUSE_S, PAUSE_S / 10
    start = time.monotonic()
    alone = max(
        end - begun for _, begun, end, _ in under_load(coordinator, lambda: time.monotonic() > start + 1, True)
    )
    start = time.monotonic()
    outage = start + 2

    def broken() -> bool:
        if time.monotonic() > outage and not (draft.offline or isinstance(draft.faults, Always)):
            how(draft)
        return time.monotonic() > outage + SETTLED_S + 8

    found = under_load(coordinator, broken)
    assert all(tokens == rule(coordinator, target, number) for number, *_, tokens in found)
    late = [end - begun for _, begun, end, _ in found if begun > outage + SETTLED_S]
    slowest = max(late, default=0.0)
    print(f"{how.__name__}: {len(found)} answers; alone at most {alone:.2f} s, {len(late)} late ones {slowest:.2f} s")
    assert ANSWERS < 2000 or 0 < slowest < 1.1 * alone


@pytest.mark.slow
def test_servers_that_are_killed_in_turn_and_replicas_that_come_and_go_lose_nothing(scripted, quick_checks):
    """Each of four servers is killed five times in the middle of its streams; a fifth comes and goes twice."""
    coordinator, targets, draft = scripted(n_targets=3, patience_s=60.0)
    for target in targets:
        target.pause = PAUSE_S / 5
    draft.pause = PAUSE_S / 20
    pool = coordinator.backend._target.servers
    numbers, found, lost = iter(range(ANSWERS)), list[tuple[int, list[int]]](), list[Exception]()
    begun = [len(target.bodies) for target in targets]
    events = Counter[str]()

    async def client() -> None:
        for number in numbers:
            try:
                found.append((number, (await answer(coordinator, number))[2]))
            except Exception as error:
                lost.append(error)

    async def answered(share: float) -> None:
        while len(found) + len(lost) < share * ANSWERS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def outages(spare: ScriptedServer) -> None:
        urls = [target.url for target in targets]
        servers = [*targets, draft] * 5
        for n, server in enumerate(servers):
            await answered(0.9 * n / len(servers))
            if n % 5 == 0:
                events["came" if spare.url not in urls else "gone"] += 1
                urls = [url for url in urls if url != spare.url] if spare.url in urls else [*urls, spare.url]
                pool._set_members(urls)
            server.offline = True
            server.break_off()
            events["killed"] += 1
            await asyncio.sleep(0.2)
            server.offline = False

    async def run(spare: ScriptedServer) -> None:
        await asyncio.gather(outages(spare), *(client() for _ in range(CLIENTS)))

    with ExitStack() as stack:
        spare = stack.enter_context(serving(ScriptedServer(targets[0].lm)))
        spare.pause = targets[0].pause
        coordinator.backend.run(run(spare))
        broken = sum(server.broken for server in (*targets, draft, spare))
        spare_asked = len(spare.bodies)
    assert not lost, lost[:3]
    assert sorted(number for number, _ in found) == list(range(ANSWERS)), "none doubled"
    assert all(tokens == rule(coordinator, targets[0], number) for number, tokens in found)
    assert events["killed"] == 20 and events["came"] == 2 == events["gone"] and spare_asked
    assert broken >= 10, "streams broke off"
    print(f"{len(found)} answers, none wrong, doubled or lost; {broken} streams broke off; {dict(events)}")
    assert all(len(target.bodies) > before for target, before in zip(targets, begun, strict=True))
