"""Never slower than the target alone, by measurement: simulated answers, and the local engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from parse_infer.decoding.adaptive import CLEAR_SPEEDUP, EXPLORE_EVERY, MIN_SAMPLES, Controller
from parse_infer.settings.generation import GenerationSettings
from parse_infer.token_drafters.registry import load_token_drafter

BURST = MIN_SAMPLES + 2 * 31  # of 32 requests


def simulate(
    controller: Controller, n: int, with_draft: float, alone: float = 1.0, load: int = 1, kept: int | None = None
) -> tuple[float, int]:
    """Seconds that `n` answers of 100 tokens take one after the other, and how many had a draft."""
    seconds, drafted = 0.0, 0
    for _ in range(n):
        with controller.answering(load) as answer:
            cost = with_draft if answer.drafted else alone
            controller.note(answer, cost, 100, load, kept)
        seconds, drafted = seconds + cost, drafted + answer.drafted
    return seconds, drafted


@dataclass
class Client:
    """One answer of 40 to 300 tokens after the other.

    Attributes:
        kept: share of the drafts that hold whole; of another one a part holds, of any length (0: nothing holds).
        begun, ready: when its answer began, and when the draft is written.
        read, write: what the server still has to do for it, in tokens.
        end: leaves the controller's `with`.
    """

    controller: Controller
    lengths: random.Random
    kept: float

    def begin(self, now: float, running: int, load: int, slowdown: float) -> None:
        with ExitStack() as stack:
            self.answer = stack.enter_context(self.controller.answering(running, load))
            self.end = stack.pop_all().close
        drafted, self.tokens = self.answer.drafted, self.lengths.randint(40, 300)
        part = 1.0 if self.lengths.random() < self.kept else self.lengths.random()
        self.holds = round(self.tokens * part) if self.kept else 0
        self.begun, self.ready = now, now + 0.005 * self.tokens * drafted * slowdown
        self.read, self.write = 200 + self.tokens * drafted, 1 + self.tokens - self.holds * drafted


class Never(Controller):
    def _choose(self, load: int, running: int) -> bool:
        return False


class Always(Controller):
    def _choose(self, load: int, running: int) -> bool:
        return True


def serve(
    controller: Controller,
    n: int,
    clients: int,
    kept: float,
    reading: float = 0.002,
    seed: int = 0,
    others: Callable[[float], int] = lambda now: 0,
    crowding: float = 0.0,
    load_is_known: bool = True,
    shared: float = 0.0,
) -> float:
    """Tokens a second of `n` answers to so many clients. A step of the server reads what is to be read, `reading`
    seconds a token, and writes a token for each of the others; a draft is written elsewhere, or on the same cores.

    Args:
        others: requests of other clients at a time, for which a step writes a token each.
        crowding: each of them slows the draft server by this share.
        load_is_known: the controller knows them.
        shared: each draft that is being written slows the server by this share.
    """

    def load() -> int:
        return clients + load_is_known * others(now)

    now, done, tokens = 0.0, 0, 0
    lengths = random.Random(seed)
    busy = [Client(controller, lengths, kept) for _ in range(clients)]
    for running, one in enumerate(busy, 1):
        one.begin(now, running, running + load() - clients, 1 + crowding * others(now))
    while True:
        ready = [one for one in busy if one.ready <= now]
        step = 0.05 + 0.003 * others(now) + sum(reading * one.read if one.read else 0.003 for one in ready)
        now += step * (1 + shared * (clients - len(ready)))
        for one in ready:
            one.read, one.write = 0, one.write - (one.read == 0)
            if one.write:
                continue
            controller.note(one.answer, now - one.begun, one.tokens, load(), one.holds)
            one.end()
            done, tokens = done + 1, tokens + one.tokens
            if done == n:
                for other in busy:
                    if other is not one:
                        other.end()
                return tokens / now
            one.begin(now, clients, load(), 1 + crowding * others(now))


@pytest.mark.parametrize("clients", [1, 8, 32])
def test_answers_that_share_a_server_are_not_slower_for_drafts_that_are_useless(clients):
    controller = Controller()
    serve(controller, 8 * clients, clients, kept=0.0)
    assert serve(controller, 3000, clients, kept=0.0) / serve(Never(), 3000, clients, kept=0.0) > 0.97


@pytest.mark.parametrize(
    ("clients", "kept", "reading", "shared"),
    [(8, 0.5, 0.006, 0.8), (8, 0.7, 0.006, 0.5), (32, 0.3, 0.004, 0.1), (32, 0.5, 0.003, 0.2), (32, 0.7, 0.005, 0.3)],
)
def test_answers_are_not_slower_where_drafts_take_the_servers_cores(clients, kept, reading, shared):
    """Drafts that hold save most of an answer, and the others cost more, so the quick answers alone would say that
    drafts pay. The target's first answers would too, which wait until all prompts are read."""
    server = {"reading": reading, "shared": shared}
    never, always = (serve(way(), 2000, clients, kept, **server) for way in (Never, Always))
    assert always / never < 0.9, "the test is about drafts that do not pay"
    controller = Controller()
    serve(controller, 40 * clients, clients, kept, seed=99, **server)
    assert serve(controller, 2000, clients, kept, **server) / never > 0.97


def now_and_then(seconds: float) -> Callable[[float], int]:
    """No requests of other clients for so long, then 31 as long."""
    return lambda now: 31 * (int(now // seconds) % 2)


@pytest.mark.parametrize("seconds", [100, 400])
@pytest.mark.parametrize(("kept", "reading", "crowding"), [(0.3, 0.003, 2.0), (0.5, 0.0005, 3.0)])
@pytest.mark.parametrize("clients", [1, 8, 32])
@pytest.mark.slow
def test_answers_are_not_slower_for_drafts_that_pay_at_one_load_only(clients, kept, reading, crowding, seconds):
    n = min(400 * clients, 3000)
    server = {"reading": reading, "crowding": crowding, "others": now_and_then(seconds)}
    controller = Controller()
    serve(controller, n, clients, kept, **server)
    alone = serve(Never(), n, clients, 0.0, seed=1, **server)
    assert serve(controller, n, clients, kept, seed=1, **server) / alone > 0.97


def test_the_load_of_other_clients_is_part_of_what_was_learnt():
    speeds = []
    for known in (False, True):
        server = {"reading": 0.0005, "crowding": 3.0, "others": now_and_then(100), "load_is_known": known}
        controller = Controller()
        serve(controller, 400, 1, 0.5, **server)
        speeds.append(serve(controller, 400, 1, 0.5, seed=1, **server))
    assert speeds[1] > 1.5 * speeds[0]


@pytest.mark.parametrize("clients", [8, 32])
def test_and_hardly_slower_from_the_first_answer_on(clients):
    alone, adaptive = (serve(way(), 8 * clients, clients, kept=0.0) for way in (Never, Controller))
    assert adaptive / alone > 0.9


def test_at_first_a_few_answers_have_a_draft_however_many_begin():
    controller = Controller()
    with ExitStack() as stack:
        begun = [stack.enter_context(controller.answering(n + 1)) for n in range(32)]
    assert sum(answer.drafted for answer in begun) == MIN_SAMPLES


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_local_engine_tells_what_was_kept(make_engine, monkeypatch, threshold):
    engine, told = make_engine(), []
    monkeypatch.setattr(engine.controller, "note", lambda *_, kept=0: told.append(kept))
    found = engine.generate(
        "Tom has 5 apples.", max_new_tokens=20, threshold=threshold, keep_greedy_match=False, adaptive=True
    )
    assert found.stats.draft_tokens and told == [found.stats.accepted_tokens]


def test_what_is_not_kept_is_given_up_before_it_was_compared_and_looked_at_again():
    controller = Controller()
    assert simulate(controller, 60, with_draft=2.0, load=32, kept=4)[1] == MIN_SAMPLES
    assert simulate(controller, BURST * (EXPLORE_EVERY - 1), with_draft=2.0, load=32, kept=4)[1] == 0
    assert simulate(controller, 2 * BURST, with_draft=2.0, load=32, kept=4)[1] == BURST
    assert simulate(controller, BURST * EXPLORE_EVERY, with_draft=2.0, load=32, kept=4)[1] == 0, "twice the cost"
    controller = Controller()
    assert simulate(controller, 200, with_draft=0.5, load=32, kept=6)[1] > 120, "5 % and more is worth a comparison"
    controller = Controller()
    assert simulate(controller, 200, with_draft=0.5, load=32, kept=None)[1] > 120, "as guesses"


@pytest.mark.parametrize("clients", [1, 8, 32])
def test_and_drafts_that_are_kept_are_found_to_pay(clients):
    controller = Controller()
    serve(controller, 8 * clients, clients, kept=1.0)
    assert serve(controller, 1000, clients, kept=1.0) / serve(Never(), 1000, clients, kept=0.0) > 1.3


@pytest.mark.parametrize("kept", [0.1, 0.7])
@pytest.mark.parametrize("clients", [1, 8, 32])
def test_answers_of_any_length_do_not_hide_what_pays(clients, kept):
    adaptive, always = (
        sum(serve(way(), 1280, clients, kept, seed=seed) for seed in range(3)) for way in (Controller, Always)
    )
    assert adaptive / always > 0.9, "learning included"


@pytest.mark.parametrize("seed", range(10))
def test_the_first_comparison_is_of_more_than_chance(seed):
    drafts = serve(Always(), 320, 1, 0.1, seed=seed) / serve(Never(), 320, 1, 0.1, seed=seed)
    assert serve(Controller(), 320, 1, 0.1, seed=seed) / serve(Never(), 320, 1, 0.1, seed=seed) > 0.9 * drafts > 1.3


def test_drafts_that_pay_clearly_at_a_low_load_are_used_at_a_high_one_and_compared_early():
    controller = Controller()
    simulate(controller, 64, with_draft=0.6, load=16)
    assert simulate(controller, 2 * BURST, with_draft=1.1, load=32)[1] == 2 * BURST
    simulate(controller, 4 * BURST, with_draft=1.1, load=32)
    assert simulate(controller, 2 * BURST, with_draft=1.1, load=32)[1] == 0
    for speedup, load in ((1.4, 16), (2.0, 8)):  # not as clearly, or not at nearly as high a load
        controller = Controller()
        simulate(controller, 64, with_draft=1 / speedup, load=load)
        assert simulate(controller, 2 * BURST, with_draft=1.1, load=32)[1] == BURST


@pytest.mark.parametrize(
    ("kinds", "ended_at", "counts"),
    [((True, True), 2, True), ((True, False), 2, False), ((True, True), 1, False), ((False, False), 3, True)],
)
def test_an_answer_counts_among_its_own_kind_and_at_one_load(monkeypatch, kinds, ended_at, counts):
    controller, chosen = Controller(), iter(kinds)
    monkeypatch.setattr(controller, "_choose", lambda *_: next(chosen))
    with controller.answering(2), controller.answering(2) as answer:
        controller.note(answer, 1.0, 100, ended_at)
    assert bool(controller.pace(answer.drafted, 2)) is counts


def test_under_load_as_many_begin_alike_as_push_the_others_out():
    controller = Controller()
    assert simulate(controller, MIN_SAMPLES, with_draft=1.0, load=32)[1] == MIN_SAMPLES
    assert simulate(controller, BURST, with_draft=1.0, load=32)[1] == 0


def test_what_holds_at_a_low_load_is_not_tried_again_at_a_high_one():
    controller = Controller()
    simulate(controller, 2 * MIN_SAMPLES, with_draft=2.0, load=1)
    assert simulate(controller, 60, with_draft=2.0, load=32)[1] == 0
    controller = Controller()
    simulate(controller, 200, with_draft=0.5, load=32)
    assert simulate(controller, 200, with_draft=0.5, load=1)[1] >= 200 - 2 * MIN_SAMPLES
    assert controller.pace(False, 1), "but compared early"


def test_a_draft_that_doubles_the_cost_costs_less_than_three_per_cent():
    controller = Controller()
    simulate(controller, 2 * MIN_SAMPLES, with_draft=2.0)
    seconds, drafted = simulate(controller, 1000, with_draft=2.0)
    assert 1000 / seconds > 0.97 and 0 < drafted <= 1000 / EXPLORE_EVERY + 1


def test_a_draft_that_pays_is_used_and_one_that_begins_to_pay_is_found():
    controller = Controller()
    assert simulate(controller, 1000, with_draft=0.4)[1] > 970
    simulate(controller, 100, with_draft=2.0)  # another kind of prompt
    assert simulate(controller, 100, with_draft=2.0)[1] <= MIN_SAMPLES
    later = [simulate(controller, 100, with_draft=0.4)[1] for _ in range(10)]
    assert later[-1] > 95


@pytest.mark.parametrize(("speedup", "alone"), [(1.6, MIN_SAMPLES), (1.1 * CLEAR_SPEEDUP, 1), (6.0, 1)])
def test_a_clear_speedup_needs_one_slow_answer_and_is_checked_less_often(speedup, alone):
    controller = Controller()
    assert simulate(controller, 60, with_draft=1 / speedup)[1] == 60 - alone
    n = round(EXPLORE_EVERY * speedup)
    assert n - simulate(controller, n, with_draft=1 / speedup)[1] == 1
    simulate(controller, 3 * MIN_SAMPLES, with_draft=1.5)
    assert simulate(controller, 30, with_draft=1.5)[1] < MIN_SAMPLES, "drafts that no longer pay are given up"


def test_drafts_that_hardly_pay_are_left_alone():
    controller = Controller()
    assert simulate(controller, 60, with_draft=0.98)[1] == MIN_SAMPLES


def test_a_comparison_that_decides_is_repeated_soon():
    controller = Controller()
    simulate(controller, 3 * BURST, with_draft=0.5, load=32)
    assert 10 * BURST - simulate(controller, 10 * BURST, with_draft=0.5, load=32)[1] == BURST


def test_where_the_load_changes_too_fast_to_count_kinds_take_turns():
    controller, drafted = Controller(), 0
    for _ in range(200):
        with controller.answering(4) as answer:
            controller.note(answer, 1.0, 100, 32)
        drafted += answer.drafted
    assert 80 < drafted < 120


def test_each_load_has_its_own_measure():
    controller = Controller()
    for _ in range(50):
        simulate(controller, 4, with_draft=0.5, load=1)
        simulate(controller, 40, with_draft=1.5, load=32)
    assert simulate(controller, 60, with_draft=0.5, load=1)[1] >= 60 - MIN_SAMPLES
    assert simulate(controller, 60, with_draft=1.5, load=40)[1] <= 1, "40 is about as many as 32"


def test_the_local_engine_gives_up_a_useless_draft(make_engine):
    engine = make_engine()
    settings = GenerationSettings(20, threshold=1.0, keep_greedy_match=False, adaptive=True)
    controller = engine.controller
    simulate(controller, 2 * MIN_SAMPLES, with_draft=9.0, alone=0.1)
    found = [engine.generate("Tom has 5 apples.", settings) for _ in range(4)]
    alone = engine.generate_target("Tom has 5 apples.", max_new_tokens=20)
    assert all(g.token_ids == alone.token_ids and not g.stats.draft_tokens for g in found)
    given = engine.generate("Tom has 5 apples.", settings, draft_text="He has 5.")
    assert given.stats.draft_tokens, "a draft that is given is used"
    before = controller.pace(drafted=False)
    engine.generate("Tom has 5 apples.", settings)
    assert controller.pace(drafted=False) != pytest.approx(before)


@pytest.mark.parametrize("own_threshold", [None, 1.01])
@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_lossless_speculation_leaves_nothing_to_choose(make_engine, monkeypatch, own_threshold, block_tokens):
    """Where the draft model guesses tokens and no draft is written, both ways of the controller are the same one."""
    engine = make_engine(threshold=own_threshold)
    engine.backend.target_drafter = load_token_drafter("draft:tokens=4", engine.target, engine.draft)
    threshold = 1.01 if own_threshold is None else None
    settings = GenerationSettings(20, threshold, block_tokens=block_tokens, adaptive=True)
    lossless = engine.generate_target("Tom has 5 apples.", settings, speculate=True)
    begun = []
    monkeypatch.setattr(engine.controller, "_choose", lambda load, _: begun.append(load) or True)
    for _ in range(MIN_SAMPLES + 1):
        found = engine.generate("Tom has 5 apples.", settings)
        assert found.token_ids == lossless.token_ids and found.stats.draft_tokens == 0
        assert found.stats.target_forwards == lossless.stats.target_forwards
    assert not begun, "the controller explores what it can never learn"
    kept = engine.generate("Tom has 5 apples.", settings, threshold=0.0)
    assert kept.stats.draft_tokens and len(begun) == 1, "where drafts are written there is a choice"
    exact = engine.generate("Tom has 5 apples.", settings, mode="exact", threshold=1.01)
    assert exact.stats.draft_tokens and len(begun) == 2


def test_a_stream_that_is_left_open_does_not_count(make_engine):
    engine = make_engine()
    settings = GenerationSettings(8, threshold=1.0, keep_greedy_match=False, adaptive=True)
    left = engine.stream("Tom has 5 apples.", settings)
    next(left)  # and never again: it gets a draft
    for _ in range(2 * MIN_SAMPLES + 1):
        engine.generate("Tom has 5 apples.", settings)
    assert engine.controller.pace(drafted=False) and engine.controller.pace(drafted=True)
    with pytest.raises(RuntimeError, match="has been given another request"):
        list(left)
