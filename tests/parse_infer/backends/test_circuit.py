"""Circuits: a server whose requests fail gets fewer of them, whatever its health check says."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, defaultdict
from contextlib import ExitStack
from email.utils import formatdate

import pytest
from prometheus_client.parser import text_string_to_metric_families

from parse_infer.backends.pool import circuit, retries
from parse_infer.backends.pool.circuit import Begun, Circuit
from parse_infer.backends.pool.client import Client, RequestRejected
from parse_infer.backends.pool.observer import PoolObserver
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.retries import Failing, Unavailable
from parse_infer.backends.pool.retry_after import LONGEST_S, read_retry_after
from parse_infer.backends.servers import pair as server_pair
from parse_infer.serve.loop_runner import LoopRunner
from tests.parse_infer.backends.conftest import first, soon
from tests.parse_infer.backends.fake_server import FakeServer, serving
from tests.parse_infer.backends.test_answers_over_servers import PROMPT
from tests.parse_infer.backends.text_server import TextServer
from tests.parse_infer.serve.conftest import running

SETTINGS = {"max_new_tokens": 12, "threshold": 0.0}
BODY = {"prompt": [1], "max_tokens": 1, "temperature": 0, "stop_token_ids": []}


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(one: Circuit, times: int = 1, limit: int = 1) -> list[bool]:
    return [one.fail(one.begin(), limit) for _ in range(times)]


def test_pauses_double_and_one_trial_decides(clock):
    one = Circuit(clock)
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert one.admits and fail(one) == [True] and one.pause_s == pause_s
        clock.now += pause_s - 0.1
        assert not one.admits
        clock.now += 0.2
    assert one.begin() is Begun.TRIAL and not one.admits and one.begin() is Begun.LAST_RESORT
    one.succeed(Begun.TRIAL)
    assert one.admits and not one.is_open


def test_a_trial_whose_client_leaves_decides_nothing(clock):
    one = Circuit(clock)
    fail(one)
    clock.now += 1
    begun = one.begin()
    assert not one.admits
    one.leave(begun)
    assert one.is_open and one.admits


def test_requests_that_began_before_the_opening_change_nothing(clock):
    one = Circuit(clock)
    begun = [one.begin() for _ in range(64)]
    assert [one.fail(each, 1) for each in begun].count(True) == 1 and one.pause_s == 1
    one.succeed(begun[0])
    assert one.is_open


def test_a_server_that_fails_again_and_again_waits_longer_each_time(clock):
    """Its trials succeed and its other requests fail."""
    one, pauses = Circuit(clock), []
    for _ in range(4):
        fail(one)
        pauses.append(one.pause_s)
        clock.now += one.pause_s
        one.succeed(one.begin())
    assert pauses == [1, 2, 4, 8]
    for _ in range(4):
        one.succeed(one.begin())
    assert fail(one) == [True] and one.pause_s == 1, "it works again"


@pytest.mark.parametrize(("share", "opens"), [(1.0, True), (0.8, True), (0.2, False), (0.0, False)])
def test_more_failures_than_successes_open_it(clock, share, opens):
    one, draw = Circuit(clock), random.Random(0)
    for _ in range(200):
        begun = one.begin()
        if draw.random() < share:
            one.fail(begun)
        else:
            one.succeed(begun)
        if one.is_open:
            break
    assert one.is_open == opens


def test_a_shorter_retry_after_does_not_replace_a_longer_one(clock):
    one = Circuit(clock)
    one.fail(one.begin(), rest_s=5.0)
    one.fail(one.begin(), rest_s=1.0)
    clock.now += 4
    assert not one.is_open and not one.admits and one.rest_s == pytest.approx(1)
    clock.now += 1
    assert one.admits


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("9" * 400, LONGEST_S),
        (formatdate(1007, usegmt=True), 7.0),
        ("Thu, 01 Jan 1970 00:16:47 GMT", 7.0),
        ("Thursday, 01-Jan-70 00:16:47 GMT", 7.0),
        ("Thu Jan  1 00:16:47 1970", 7.0),
        ("Thu, 01 Jan 1970 02:16:47 +0200", 7.0),
        (formatdate(1e9, usegmt=True), LONGEST_S),
        (formatdate(5, usegmt=True), 0.0),
        ("", None),
        ("-3", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("٣", None),
        ("Thu, 99 Foo 1970 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value, seconds):
    assert read_retry_after(value, now=1000.0) == seconds


@pytest.fixture
def pool(engine, clock):
    """`pool(n)`: a pool of n servers of the target, and these servers; equally busy ones in a fixed order."""
    with ExitStack() as stack:

        def make(n: int, **options):
            servers = [stack.enter_context(serving(FakeServer(engine.target))) for _ in range(n)]
            options = {"clock": clock, "choose": first, "back_off_s": 0.0, "patience_s": 0.0} | options
            replicas = ReplicaPool("target", [server.url for server in servers], Client(), **options)
            replicas.observer = Recorder()
            return replicas, servers

        yield make


def ask(pool: ReplicaPool, times: int = 1) -> None:
    """One request after the other, each of an answer of its own."""

    async def send() -> None:
        try:
            await pool.handshake()
            for server in pool.members:
                server.healthy = True
            for _ in range(times):
                with pool.acquire() as lease:
                    await pool.ask(BODY, lease)
        finally:
            await pool.aclose()

    asyncio.run(send())


class Recorder(PoolObserver):
    """Counts outcomes, retries and ejections by address."""

    def __init__(self) -> None:
        self.outcomes, self.retries, self.ejections = (defaultdict(Counter) for _ in range(3))

    def ended(self, url: str, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes[url][outcome] += 1

    def retried(self, url: str) -> None:
        self.retries[url]["retried"] += 1

    def ejected(self, url: str, reason: str) -> None:
        self.ejections[url][reason] += 1


def shares(pool: ReplicaPool, servers) -> list[Counter[str]]:
    return [pool.observer.outcomes[server.url] for server in servers]


@pytest.mark.parametrize("fault", ["500", "half", "gone"])
def test_a_replica_that_fails_fast_does_not_attract_the_traffic(pool, fault):
    replicas, servers = pool(3)
    servers[0].faults.extend([fault] * 1000)
    ask(replicas, 30)
    bad, *good = shares(replicas, servers)
    assert bad == {"failed": circuit.FAILURES}
    assert sum((one["ok"] for one in good), 0) == 30
    assert replicas.members[0].healthy, "its health check is fine"
    failed, *others = (server.url for server in servers)
    assert replicas.observer.ejections == {failed: {"failing": 1}}
    assert sum(replicas.observer.retries[url]["retried"] for url in others) == circuit.FAILURES
    assert failed not in replicas.observer.retries


@pytest.mark.parametrize("status", [401, 403])
def test_a_replica_that_refuses_our_key_does_not_either(pool, status):
    replicas, servers = pool(2)
    ask(replicas)
    servers[0].key, servers[0].refusal = "other", status

    async def send() -> None:
        for _ in range(20):
            with replicas.acquire() as lease:
                await replicas.ask(BODY, lease)
        await replicas.aclose()

    asyncio.run(send())
    bad, good = shares(replicas, servers)
    assert bad["refused"] <= circuit.FAILURES and good["ok"] == 20


@pytest.mark.parametrize("n", [2, 6])  # fewer and more than the attempts
def test_a_request_that_all_replicas_refuse_is_refused(pool, n):
    replicas, servers = pool(n)
    ask(replicas)
    for server in servers:
        server.key = "other"

    async def send() -> None:
        with replicas.acquire() as lease:
            await replicas.ask(BODY, lease)

    with pytest.raises(RequestRejected, match=r"\(401\)"):
        asyncio.run(send())


def test_an_invalid_request_is_no_failure_of_its_server(pool):
    replicas, servers = pool(2)
    servers[0].faults.extend(["refused"] * 3)
    for _ in range(3):
        with pytest.raises(RequestRejected, match="this is refused"):
            ask(replicas)
    assert shares(replicas, servers) == [{"rejected": 3}, {}]
    assert not replicas.members[0].circuit.is_open


def test_the_last_replica_is_used_though_its_circuit_is_open(pool, clock):
    replicas, (server,) = pool(1)
    server.faults.extend(["500"] * 8)
    for _ in range(2):
        with pytest.raises(Failing, match="failed 4 times"):
            ask(replicas)
    assert replicas.members[0].circuit.is_open
    ask(replicas)
    assert not replicas.members[0].circuit.is_open, "it works again"


def test_equally_busy_replicas_are_chosen_at_random(pool):
    replicas, servers = pool(4, choose=random.Random(0).choice)
    ask(replicas, 80)
    assert all(10 <= one["ok"] <= 30 for one in shares(replicas, servers)), shares(replicas, servers)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_of_a_server_is_respected(pool, clock, status):
    replicas, servers = pool(2)
    servers[0].faults.append((status, {"Retry-After": "7"}))
    ask(replicas, 10)
    assert shares(replicas, servers) == [{"rate_limited" if status == 429 else "failed": 1}, {"ok": 10}]
    clock.now += 7.1
    ask(replicas, 1)
    assert shares(replicas, servers)[0]["ok"] == 1


def test_a_request_waits_for_resting_servers(pool, clock):
    replicas, (server,) = pool(1, patience_s=30.0)
    server.faults.append((429, {"Retry-After": "7"}))
    waits = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds

    replicas._health.wait_for_recovery = wait
    ask(replicas)
    assert sum(waits) == pytest.approx(7.0) and len(server.bodies) == 2


def test_the_client_gets_the_retry_after_of_resting_servers(engine, connect):
    coordinator, (target,), _ = connect(engine)
    with running(LoopRunner(coordinator), engine) as served:
        coordinator.backend._target.servers.patience_s = 0.0
        target.faults.append((429, {"Retry-After": "33"}))
        answer = served.chat(PROMPT, max_tokens=4, parse={"mode": "target"})
        assert answer.status_code == 503 and 30 <= int(answer.headers["Retry-After"]) <= 33
        assert len(target.bodies) == 1


@pytest.mark.parametrize("server_type", [None, TextServer])
@pytest.mark.parametrize("fault", ["500", "hangs", "gone", 402])
def test_a_draft_server_that_fails_costs_one_short_try(engine, connect, fault, server_type, clock, monkeypatch):
    """Its health is fine all the time."""
    monkeypatch.setattr(server_pair, "DRAFT_SILENCE_S", 1.0 if fault == "hangs" else 30.0)
    monkeypatch.setattr(retries, "TRIAL_SILENCE_S", 1.0 if fault == "hangs" else 30.0)
    draft = None if server_type is None else server_type(engine.draft)
    coordinator, _, draft = connect(engine, draft=draft, clock=clock)
    draft.faults.extend([(fault, {}) if isinstance(fault, int) else fault] * 1000)
    for n in range(1, 4):
        found = [coordinator.generate(PROMPT, **SETTINGS) for _ in range(3)]
        assert all(one.fallback in ("no_draft", "draft_refused") for one in found)
        alone = engine.generate_target(PROMPT, max_new_tokens=12).token_ids
        assert [one.token_ids for one in found] == [alone] * 3
        assert soon(coordinator, lambda: not coordinator.backend._drafts[0]._trials)
        assert len(draft.bodies) == n, "one request of three tried"
        clock.now += 2 ** (n - 1)
    draft.faults.clear()
    for module, limit in ((server_pair, "DRAFT_SILENCE_S"), (retries, "TRIAL_SILENCE_S")):
        monkeypatch.setattr(module, limit, 30.0)  # a busy machine is no fault
    clock.now += 60
    assert coordinator.generate(PROMPT, **SETTINGS).fallback == "no_draft", "no answer waits for a trial"
    (server,) = coordinator.backend._drafts[0].members
    assert soon(coordinator, lambda: not server.circuit.is_open)
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.fallback is None and found.stats.accepted_tokens


def test_a_draft_server_that_sends_no_completions_fails_too(engine, connect, clock):
    coordinator, _, draft = connect(engine, draft=TextServer(engine.draft), clock=clock)
    draft.faults.extend(["odd"] * 9)
    for _ in range(3):
        assert coordinator.generate(PROMPT, **SETTINGS).fallback == "no_draft"
    assert len(draft.bodies) == 1


def test_a_trial_is_short(engine, connect, clock, monkeypatch):
    monkeypatch.setattr(retries, "TRIAL_SILENCE_S", 1.0)
    monkeypatch.setattr(server_pair, "DRAFT_SILENCE_S", 100.0)
    coordinator, _, draft = connect(engine, clock=clock)
    draft.faults.extend(["500", "hangs"])
    assert coordinator.generate(PROMPT, **SETTINGS).fallback == "no_draft"
    clock.now += 1
    assert coordinator.generate(PROMPT, **SETTINGS).fallback == "no_draft"
    (server,) = coordinator.backend._drafts[0].members
    assert soon(coordinator, lambda: server.circuit.pause_s == 2) and len(draft.bodies) == 2


def test_an_incomplete_draft_is_verified(engine, connect, clock):
    coordinator, _, draft = connect(engine, clock=clock)
    draft.faults.append("cut")
    found = coordinator.generate(PROMPT, max_new_tokens=24, threshold=0.0, block_tokens="whole")
    assert 0 < found.stats.accepted_tokens < 24 and len(draft.bodies) == 1
    assert len(found.token_ids) == 24 and found.fallback is None


def test_where_drafts_are_measured_a_failed_one_is_tried_again(engine, connect):
    coordinator, _, draft = connect(engine)
    coordinator.backend.falls_back = False
    draft.faults.extend(["500", "500"])
    assert coordinator.generate(PROMPT, **SETTINGS).stats.accepted_tokens
    draft.faults.extend(["500"] * 4)
    with pytest.raises(Unavailable, match="the draft servers failed 4 times"):
        coordinator.generate(PROMPT, **SETTINGS)


def test_requests_to_servers_are_counted(engine, connect, clock):
    coordinator, (target,), draft = connect(engine, clock=clock)
    with running(LoopRunner(coordinator), engine) as served:
        draft.faults.append("500")
        target.faults.append("500")
        for _ in range(2):
            assert served.chat(PROMPT, max_tokens=8, parse={"mode": "target"}).status_code == 200
        assert served.chat(PROMPT, max_tokens=8, parse={"threshold": 0.0}).status_code == 200
        families = list(text_string_to_metric_families(served.metrics))
    found = {
        (sample.name.removeprefix("parse_upstream_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if re.fullmatch(r"parse_upstream_(\w+_total|\w+_count|ejected)", sample.name)
    }
    by_target, by_draft = ("target", target.url), ("draft", draft.url)
    assert found == {
        ("requests_total", "failed", *by_draft): 1,
        ("requests_total", "failed", *by_target): 1,
        ("requests_total", "ok", *by_target): 3,
        ("request_seconds_count", *by_target): 4,
        ("request_seconds_count", *by_draft): 1,
        ("retries_total", *by_target): 1,
        ("ejections_total", "failing", *by_draft): 1,  # one failure of an optional request is enough
        ("ejected", *by_target): 0,
        ("ejected", *by_draft): 1,
    }
