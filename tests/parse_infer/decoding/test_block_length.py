"""The length of a block: the cost model against simulation, and the rule against the best fixed length."""

from __future__ import annotations

import random

import pytest

from parse_infer.decoding import block_length
from parse_infer.decoding.block_length import EDGES, BlockLength, Costs, expected_pace, pays, threshold_class

PAUSE = BlockLength.next_pause


@pytest.fixture(autouse=True)
def _pauses(monkeypatch):
    monkeypatch.setattr(BlockLength, "next_pause", PAUSE)  # tests/conftest.py disables it


COSTS = [  # a large target, one whose reading costs as much as drafting, and one that reads almost for free
    Costs(draft_s=0.0025, forward_s=0.030, read_s=0.0018),
    Costs(draft_s=0.0004, forward_s=0.003, read_s=0.0004),
    Costs(draft_s=0.006, forward_s=0.030, read_s=0.0001),
]


def simulated_pace(survivals: list[float], costs: Costs, blocks: int, numbers: random.Random) -> float:
    """Seconds per token of many blocks of one length."""
    seconds, tokens = 0.0, 0
    for _ in range(blocks):
        accepted = next((i for i, s in enumerate(survivals) if numbers.random() >= s), len(survivals))
        seconds += costs.forward_s + len(survivals) * costs.per_token
        tokens += accepted + (accepted < len(survivals))
    return seconds / tokens


def best_pace(survival: float, costs: Costs) -> float:
    return min(expected_pace([survival] * n, costs) for n in range(1, 300))


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("survival", [0.3, 0.8, 0.97, 0.999])
def test_the_expected_pace_is_that_of_a_simulation(survival, costs):
    numbers = random.Random(1)
    for length in (1, 4, 16, 64):
        survivals = [survival**0.5 if i % 2 else survival for i in range(length)]
        simulated = simulated_pace(survivals, costs, 20_000, numbers)
        assert simulated == pytest.approx(expected_pace(survivals, costs), rel=0.04), length


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("survival", [0.5, 0.8, 0.97, 0.995])
def test_the_rule_finds_the_best_length(survival, costs):
    """Ending a block where one more token stops paying, at the pace that this gives, is the best fixed length."""
    pace = 2 * costs.per_token
    for _ in range(50):
        length = 1
        while length < 300 and pays(survival**length, costs, pace):
            length += 1
        pace = expected_pace([survival] * length, costs)
    assert pace == pytest.approx(best_pace(survival, costs), rel=1e-6)


class Process:
    """Blocks whose tokens survive with a probability that depends on their confidence."""

    def __init__(self, costs: Costs, survival_of: dict[float, float], seed: int = 2) -> None:
        self.costs, self.survival_of, self.numbers = costs, survival_of, random.Random(seed)
        self.alone_s = costs.forward_s + costs.read_s
        self.seconds, self.tokens, self.lengths = 0.0, 0, []

    def run(self, rule: BlockLength, tokens: int) -> float:
        """Write so many tokens; return the seconds per token."""
        seconds, start = self.seconds, self.tokens
        while self.tokens - start < tokens:
            if rule.pause:
                spent = rule.pause * self.alone_s
                self.tokens, self.seconds = self.tokens + rule.pause, self.seconds + spent
                rule.note_alone(spent, rule.pause)
            else:
                self.block(rule)
        return (self.seconds - seconds) / (self.tokens - start)

    def block(self, rule: BlockLength) -> None:
        confidences, survival = [], 1.0
        while True:
            confidences.append(self.numbers.choice(list(self.survival_of)))
            survival *= rule.survival_of(confidences[-1])
            if rule.end_after(survival) or len(confidences) == 256:
                break
        survived = [self.numbers.random() < self.survival_of[c] for c in confidences]
        accepted, n = (survived.index(False) if False in survived else len(survived)), len(survived)
        draft_s, read_s = n * self.costs.draft_s, self.costs.forward_s + n * self.costs.read_s
        rule.note(confidences, accepted, accepted < n, draft_s, read_s, n)
        self.seconds, self.tokens = self.seconds + draft_s + read_s, self.tokens + accepted + (accepted < n)
        self.lengths.append(n)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("survival", [0.8, 0.97, 0.995])
def test_a_measured_length_is_nearly_the_best(survival, costs):
    process, rule = Process(costs, {0.9: survival}), BlockLength()
    process.run(rule, 2000)
    assert process.run(rule, 20_000) <= 1.06 * min(best_pace(survival, costs), process.alone_s)


def test_confidence_tells_where_a_block_ends():
    """One token in ten is doubtful: blocks that end there beat every fixed length."""
    costs = COSTS[0]
    process = Process(costs, dict.fromkeys((0.91, 0.92, 0.93, 0.94, 0.96, 0.97, 0.985, 0.992, 0.998), 1.0))
    process.survival_of[0.4] = 0.5
    rule = BlockLength()
    process.run(rule, 3000)
    mean = (9 + 0.5) / 10
    assert process.run(rule, 20_000) < 0.97 * best_pace(mean, costs)


@pytest.mark.parametrize("costs", COSTS)
def test_useless_drafts_cost_little(costs):
    """Nothing survives: the target soon writes nearly all tokens alone."""
    process, rule = Process(costs, {0.9: 0.02}), BlockLength()
    process.run(rule, 1000)
    assert process.run(rule, 20_000) <= 1.03 * process.alone_s


def test_a_change_of_the_task_shows_soon():
    process, rule = Process(COSTS[0], {0.9: 0.02}), BlockLength()
    process.run(rule, 5000)
    process.survival_of = {0.95: 0.99}
    process.run(rule, 5000)
    assert process.run(rule, 5000) <= 1.1 * best_pace(0.99, COSTS[0])


@pytest.mark.parametrize("costs", COSTS)
def test_blocks_shorten_where_a_judge_rejects_more_within_an_answer(costs):
    """The draft model is as confident at the end of each answer as at its start, but less of it survives there."""
    process, rule = Process(costs, {0.999: 0.99}), BlockLength()
    best = (best_pace(0.99, costs) + min(best_pace(0.85, costs), process.alone_s)) / 2
    for _ in range(150):
        for process.survival_of[0.999] in (0.99, 0.85):
            process.run(rule, 150)
    assert process.seconds / process.tokens < 1.12 * best  # 1.14 without recent rejections


def test_rejections_fewer_than_usual_do_not_lengthen_blocks():
    """They are mostly luck: without this, lossless speculation of three pairs wasted 3 to 10 % of its time."""
    rule = BlockLength()
    for _ in range(20):
        rule.note([0.6] * 4, 4, False, 0.01, 0.1, 4)
    class_of = rule._survival[2]
    assert rule._rejected < rule._expected and rule.survival_of(0.6) == class_of.value


def test_the_targets_own_token_after_a_block_is_gained_too():
    with_it, without = BlockLength(), BlockLength()
    for rule, added in ((with_it, 1), (without, None)):
        for n in (3, 5, 4):
            rule.note([0.99] * n, n, False, 0.01 * n, 0.1 + 0.001 * n, n, added)
    assert with_it._pace.rate == pytest.approx(without._pace.rate * 12 / 15, rel=1e-3)


@pytest.mark.parametrize(("token_s", "longest"), [(0.002, 256), (0.01, 100), (0.3, 16)])
def test_a_block_takes_no_longer_than_a_reader_waits(monkeypatch, token_s, longest):
    monkeypatch.setattr(block_length, "LONGEST_S", 1.0)
    rule = BlockLength()
    assert rule.longest == 256
    for n in (3, 5, 4):
        rule.note([0.99] * n, n, False, token_s * n, 0.1 + 0.001 * n, n)
    assert abs(rule.longest - longest) <= 1


def test_one_bad_block_begins_no_pause():
    rule, pauses = BlockLength(), []
    for _ in range(9):
        rule.note([0.9] * 8, 0, True, 0.08, 0.1, 8)
        pauses.append(rule.pause)
    assert pauses == [0] * 7 + [16, 32]


def test_costs_are_those_of_the_blocks():
    process, rule = Process(COSTS[0], {0.3: 0.7, 0.99: 0.99}), BlockLength()
    assert rule.costs is None
    process.run(rule, 3000)
    found = rule.costs
    for name in ("draft_s", "forward_s", "read_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS[0], name), rel=1e-3)


def test_every_confidence_has_a_class():
    rule = BlockLength()
    assert all(0 < rule.survival_of(confidence) < 1 for confidence in (0.0, *EDGES, 0.5, 1.0))


def test_alike_thresholds_share_a_class():
    assert threshold_class(0.78) == threshold_class(0.7) != threshold_class(0.99)
    classes = [threshold_class(t) for t in (0.0, 0.01, 0.3, 0.5, 0.9, 0.99, 0.9999, 1.0, 1.0001)]
    assert classes == sorted(classes) and classes[-1] > classes[-2]
    assert len({threshold_class(i / 10_000) for i in range(10_002)}) <= 20  # requests cannot add states without end
