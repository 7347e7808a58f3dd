"""Never slower than the target alone, by measurement: simulated answers, and the local engine."""

from __future__ import annotations

import pytest

from parse_infer.controller import EXPLORE, TRIALS, Controller
from parse_infer.generation import GenerationSettings


def simulate(
    controller: Controller, n: int, with_draft: float, alone: float = 1.0, load: int = 1
) -> tuple[float, int]:
    """Seconds that `n` answers of 100 tokens take, and how many had a draft."""
    seconds, drafted = 0.0, 0
    for _ in range(n):
        chosen = controller.drafts(load)
        cost = with_draft if chosen else alone
        controller.note(chosen, cost, 100, load)
        seconds, drafted = seconds + cost, drafted + chosen
    return seconds, drafted


def test_a_draft_that_doubles_the_cost_costs_less_than_three_per_cent():
    controller = Controller()
    simulate(controller, 2 * TRIALS, with_draft=2.0)
    seconds, drafted = simulate(controller, 1000, with_draft=2.0)
    assert 1000 / seconds > 0.97 and 0 < drafted <= 1000 / EXPLORE + 1


def test_a_draft_that_pays_is_used_and_one_that_begins_to_pay_is_found():
    controller = Controller()
    assert simulate(controller, 1000, with_draft=0.4)[1] > 970
    simulate(controller, 100, with_draft=2.0)  # another kind of prompt
    assert simulate(controller, 100, with_draft=2.0)[1] <= 2
    later = [simulate(controller, 100, with_draft=0.4)[1] for _ in range(10)]
    assert later[-1] > 95


def test_each_load_has_its_own_measure():
    controller = Controller()
    for _ in range(50):
        simulate(controller, 4, with_draft=0.5, load=1)
        simulate(controller, 4, with_draft=1.5, load=32)
    assert simulate(controller, 60, with_draft=0.5, load=1)[1] >= 59
    assert simulate(controller, 60, with_draft=1.5, load=40)[1] <= 1, "40 is about as many as 32"


def test_the_local_engine_gives_up_a_useless_draft(make_engine):
    engine = make_engine()
    settings = GenerationSettings(20, threshold=1.01, exact_tail=False, adaptive=True)
    controller = engine.controller
    for drafted, seconds in ((True, 9.0), (False, 0.1)) * TRIALS:  # as if measured
        controller.drafts()
        controller.note(drafted, seconds, 20)
    found = [engine.generate("Tom has 5 apples.", settings) for _ in range(4)]
    alone = engine.generate_target("Tom has 5 apples.", max_new_tokens=20)
    assert all(g.token_ids == alone.token_ids and not g.stats.draft_tokens for g in found)
    given = engine.generate("Tom has 5 apples.", settings, draft_text="He has 5.")
    assert given.stats.draft_tokens, "a draft that is given is used"
    before = controller.pace(drafted=False)
    engine.generate("Tom has 5 apples.", settings)
    assert controller.pace(drafted=False) != pytest.approx(before)
