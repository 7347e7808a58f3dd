"""`parse-infer plan`: the simulation agrees with closed forms and with a server that is simulated step by step."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import replace
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from parse_infer.cli.app import main
from parse_infer.evaluation.capacity_plan import default_rates, plan, plan_summary
from parse_infer.evaluation.serving_costs import Costs, Curve
from parse_infer.evaluation.serving_simulation import alone, parse, simulate

FILE: dict[str, Any] = {
    "target_token_s": {"1": 0.011, "8": 0.016, "32": 0.039},
    "draft_token_s": {"1": 0.002, "8": 0.003, "32": 0.008},
    "read_token_s": 0.0002,
    "prompt_tokens": 200,
    "answer_tokens": 200,
    "draft_tokens": 64,
    "kept_tokens": 50,
}


def costs(**fields: Any) -> Costs:
    given = FILE | fields
    return Costs(**{k: Curve.of(k, v) if k.endswith("_s") else float(v) for k, v in given.items()})


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.slow
def test_requests_in_turns_are_the_queue_m_m_1(load):
    """Mean response time 1 / (mu - lambda) under processor sharing."""
    own = costs(target_token_s=0.01, prompt_tokens=0, answer_tokens=400)
    mu = 1 / (400 * 0.01)
    found = simulate(own, alone, load * mu, 1, requests=30_000)
    assert found.mean_s == pytest.approx(1 / (mu - load * mu), rel=0.08) and not found.overloaded


@pytest.mark.parametrize("rate", [0.5, 2.0, 3.5])
@pytest.mark.slow
def test_requests_in_batches_are_a_birth_death_process(rate):
    """Its stationary distribution is known: p(n) ~ rate^n / (m(1) ... m(n)) with m(n) = n / (t(n) length)."""
    own = costs(prompt_tokens=0, answer_tokens=200)

    def completion_rate(n: int) -> float:
        return n / (own.target_token_s.at(n) * own.answer_tokens)

    weights = list(accumulate(range(1, 400), lambda weight, n: weight * rate / completion_rate(n), initial=1.0))
    mean_number = sum(n * weight for n, weight in enumerate(weights)) / sum(weights)
    found = simulate(own, alone, rate, 1, requests=30_000)
    assert found.mean_s == pytest.approx(mean_number / rate, rel=0.05)  # Little's law
    assert found.answers_per_s == pytest.approx(rate, rel=0.03)


def test_reads_in_order_are_the_queue_m_d_1():
    """Mean waiting time of the Pollaczek-Khinchine formula, rho s / (2 (1 - rho))."""
    rho, own = 0.6, costs(read_token_s=0.001)
    found = simulate(own, lambda *_: iter([("target", "read", 200)]), rho / 0.2, 1, requests=10_000)
    assert found.mean_s == pytest.approx(0.2 + rho * 0.2 / (2 * (1 - rho)), rel=0.06)


def test_models_that_share_a_server_answer_at_the_pace_that_was_measured_for_the_whole():
    own = costs(parse_token_s={"1": 0.005, "8": 0.02})
    for clients, pace in ((1, 0.005), (8, 0.02)):
        (shared,) = plan(own, [clients], 1, 0, 3000, closed=True)
        assert shared.parse.answers_per_s == pytest.approx(clients / (200 * pace), rel=0.06)
        assert shared.parse.mean_s == pytest.approx(200 * pace, rel=0.06)
    (apart,), (as_before,) = (plan(each, [8], 2, 1, 300, closed=True) for each in (own, costs()))
    assert apart == as_before, "measured with one server for both"


def test_lengths_are_the_measured_ones(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(FILE | {"prompt_tokens": 0, "target_token_s": 0.01, "answer_lengths": [100, 300]}))
    found = simulate(Costs.read(file), alone, None, 1, clients=1, requests=500)
    assert found.p99_s == pytest.approx(3.0)
    assert found.mean_s == pytest.approx(2.0, rel=0.1)
    assert Costs.read(file, answer_tokens=50).answer_lengths == ()
    file.write_text(json.dumps(FILE | {"answer_lengths": [100, "many"]}))
    with pytest.raises(ValueError, match=r"answer_lengths is .* give a list of numbers of tokens"):
        Costs.read(file)


def test_a_pace_that_was_measured_with_other_answers_is_not_used(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(FILE | {"parse_token_s": {"1": 0.005}}))
    assert Costs.read(tmp_path / "costs.json").parse_token_s is not None
    for name in ("kept_tokens", "draft_tokens", "target_tokens", "prompt_tokens", "answer_tokens"):
        assert Costs.read(tmp_path / "costs.json", **{name: 64}).parse_token_s is None, name


@pytest.mark.parametrize("kept", [0.0, 3.0, 20.0, 50.0, 64.0])
def test_as_many_tokens_are_kept_as_were_measured(kept):
    own, random = costs(kept_tokens=kept), Random(3)
    works = list(parse(own, 200_000, random))
    drafts = sum(work[0] == "draft" for work in works)
    written = sum(tokens for model, kind, tokens in works if (model, kind) == ("target", "write"))
    assert (200_000 - written) / drafts == pytest.approx(kept, rel=0.05, abs=0.01)


def serve_in_steps(own: Costs, rate: float, n: int) -> tuple[float, float]:
    """Median and 99th percentile of `n` answers with PARSE on a target server and a draft server, in steps of their
    engines: a step of the target reads whole what has come, and writes a token for each of the others."""
    arrivals, lengths, errors = Random(7), Random(8), Random(9)
    due = list(accumulate(arrivals.expovariate(rate) for _ in range(n)))
    works = [deque(parse(own, max(1.0, lengths.expovariate(1 / own.answer_tokens)), errors)) for _ in range(n)]
    here: dict[str, dict[int, list[float]]] = {"target": {}, "draft": {}}  # request: tokens left
    clocks, ends, begun = {"target": 0.0, "draft": 0.0}, dict[int, float](), 0
    ready: dict[str, list[tuple[float, int]]] = {"target": [], "draft": []}

    def go_on(request: int, now: float) -> None:
        if works[request]:
            ready[works[request][0][0]].append((now, request))
        else:
            ends[request] = now

    while len(ends) < n:
        model = min(clocks, key=clocks.__getitem__)
        now = clocks[model]
        while begun < n and due[begun] <= now:
            go_on(begun, due[begun])
            begun += 1
        for at, request in [each for each in ready[model] if each[0] <= now]:
            ready[model].remove((at, request))
            here[model][request] = [works[request][0][2]]
        running = here[model]
        if not running:
            busy = [clocks[other] for other in clocks if here[other] or ready[other]]
            clocks[model] = max(now + 0.0005, min([*due[begun : begun + 1], *busy]))
            continue
        reads = [request for request in running if works[request][0][1] == "read"]
        step = sum(running[request][0] for request in reads) * own.read_token_s.at(1)
        if len(running) > len(reads):
            curve = own.target_token_s if model == "target" else own.draft_token_s
            step += curve.at(len(running) - len(reads))
        clocks[model] = now = now + step
        for request in list(running):
            running[request][0] -= math.inf if request in reads else 1
            if running[request][0] <= 0:
                del running[request]
                works[request].popleft()
                go_on(request, now)
    times = sorted(ends[request] - due[request] for request in range(n // 5, n))
    return times[len(times) // 2], times[len(times) * 99 // 100]


@pytest.mark.parametrize("rate", [0.5, 3.0])
@pytest.mark.slow
def test_a_server_that_works_in_steps_answers_as_predicted(rate):
    p50, p99 = serve_in_steps(costs(), rate, 2500)
    found = simulate(costs(), parse, rate, 1, 1, requests=2500)
    assert found.p50_s == pytest.approx(p50, rel=0.1)
    assert found.p99_s == pytest.approx(p99, rel=0.2)


def test_the_same_seed_gives_the_same_plan_and_more_gpus_a_quicker_one():
    first, again = (simulate(costs(), parse, 3.0, 2, 1, requests=300, seed=5) for _ in range(2))
    assert first == again != simulate(costs(), parse, 3.0, 2, 1, requests=300, seed=6)
    assert simulate(costs(), parse, 3.0, 4, 2, requests=300, seed=5).mean_s < first.mean_s


def test_a_server_behind_its_arrivals_is_overloaded_and_answers_what_it_can():
    own = costs(prompt_tokens=0)
    most = 32 / (0.039 * 200)
    found = simulate(own, alone, 3 * most, 1, requests=4000)
    assert found.overloaded and found.answers_per_s == pytest.approx(most, rel=0.1)
    assert default_rates(own, 2)[-1] > 2 * most > default_rates(own, 2)[0]


def test_the_summary_names_the_rate_at_which_parse_stops_paying():
    kept_little = replace(costs(), kept_tokens=16.0, read_token_s=Curve.of("", 0.0004))
    rows = plan(kept_little, [0.1, 1.0, 2.0, 3.0], 1, 0, requests=400)
    paid = [row.pays for row in rows]
    assert paid == sorted(paid, reverse=True) and True in paid and False in paid
    stops = paid.index(False)
    text = f"PARSE pays up to {rows[stops - 1].load:g} arrivals/s and stops paying by {rows[stops].load:g}"
    assert plan_summary(rows).startswith(text)
    assert plan_summary(rows[stops : stops + 1]).startswith(f"PARSE does not pay at {rows[stops].load:g} arrivals/s")
    assert plan_summary(rows[:1]).endswith("the highest load here.")


def test_the_summary_names_the_loads_between_which_parse_pays():
    ended = SimpleNamespace(overloaded=False)
    rows = [SimpleNamespace(load=n, unit="clients", pays=n in (2, 3), alone=ended, parse=ended) for n in range(1, 6)]
    assert plan_summary(rows) == "PARSE pays from 2 to 3 clients and stops paying by 4."
    assert plan_summary(rows[:3]) == "PARSE pays from 2 to 3 clients, the highest load here."
    assert plan_summary(rows[3:]) == "PARSE does not pay at 4 to 5 clients."


@pytest.mark.parametrize("gpus", [1, 4])
def test_half_of_the_capacity_overloads_no_number_of_servers(gpus):
    large = replace(costs(), target_token_s=Curve.of("", {"1": 0.011, "32": 0.02, "256": 0.04}))
    rate = default_rates(large, gpus)[4]
    (row,) = plan(large, [rate], gpus, 0, requests=100)
    assert not row.alone.overloaded and row.alone.answers_per_s == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("clients", [1, 5, 32, 64])
def test_clients_that_wait_keep_a_server_at_their_number(clients):
    own = costs(prompt_tokens=0)
    found = simulate(own, alone, None, 1, requests=1500, clients=clients)
    assert found.answers_per_s == pytest.approx(clients / (200 * own.target_token_s.at(clients)), rel=0.06)
    assert found.answers_per_s * found.mean_s == pytest.approx(clients, rel=0.06), "Little's law"
    assert not found.overloaded


def test_one_client_drafts_and_reads_in_turn():
    own = costs(kept_tokens=64, target_tokens=0)
    found = simulate(own, parse, None, 1, requests=4000, clients=1)
    assert found.mean_s == pytest.approx(200 * 0.0002 + 200 * (0.002 + 0.0002), rel=0.05)
    assert found.answers_per_s == pytest.approx(1 / found.mean_s, rel=0.01)


@pytest.mark.parametrize(("load", "seconds"), [(0.5, 0.011), (1, 0.011), (4.5, 0.0135), (8, 0.016), (64, 0.078)])
def test_costs_lie_on_lines_between_those_measured(load, seconds):
    assert costs().target_token_s.at(load) == pytest.approx(seconds)


def run(file: dict[str, Any], tmp_path: Any, *arguments: str) -> int:
    (tmp_path / "costs.json").write_text(json.dumps(file))
    return main(["plan", str(tmp_path / "costs.json"), "--requests", "100", *arguments])


def test_the_command_prints_a_table(tmp_path, capsys):
    assert run(FILE, tmp_path, "--gpus", "2", "--rate", "1", "--rate", "0.5") == 0
    out = capsys.readouterr().out
    assert "1 for the target and 1 for drafts" in out and "PARSE pays up to 1 arrivals/s" in out
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()][1:] == ["0.5", "1"]


def test_the_command_takes_clients_instead_of_arrivals(tmp_path, capsys):
    assert run(FILE, tmp_path, "--clients", "8", "--clients", "1") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()][1:] == ["1", "8"]
    assert "clients" in out and "arrivals" not in out and "PARSE pays up to 8 clients, the highest load here." in out


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"kept_tokens": None}, "", "has no kept_tokens: give it there, or --kept-tokens"),
        ({"kept_tokens": 65}, "", "kept_tokens (65) exceed draft_tokens (64)"),
        ({"kept_tokens": "many"}, "", "kept_tokens is 'many'"),
        ({"target_token_s": {"1": -1}}, "", "target_token_s is {'1': -1}"),
        ({"target_token_s": {}}, "", "target_token_s is {}"),
        ({"draft_token_s": None}, "", "has no draft_token_s: give it there"),
        ({"kept_tokens": 0, "target_tokens": 0}, "", "no answer would grow"),
        ({}, "--gpus 2 --draft-gpus 2", "leaves none for the target"),
        ({}, "--rate 0", "--rate 0 is no arrival rate"),
        ({}, "--rate 1 --clients 2", "--rate and --clients are two kinds of load: give one"),
        ({}, "--answer-tokens 0", "answer_tokens and draft_tokens must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(change, arguments, message, tmp_path, capsys):
    file = {name: value for name, value in (FILE | change).items() if value is not None}
    assert run(file, tmp_path, *arguments.split()) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error, error


def test_a_file_without_costs_is_refused(tmp_path, capsys):
    (tmp_path / "costs.json").write_text("[]")
    assert main(["plan", str(tmp_path / "costs.json")]) == 2
    assert "write it with `parse-infer cost --output`" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", str(tmp_path / "none.json")]) == 2


@pytest.mark.slow
def test_what_cost_writes_is_read(tmp_path, capsys):
    file = tmp_path / "costs.json"
    words = "cost --target zoo:target --draft zoo:draft --context 20 --draft-tokens 16 --rounds 1 --output"
    assert main([*words.split(), str(file)]) == 0
    assert main(["plan", str(file), "--kept-tokens", "12", "--requests", "100"]) == 0
    assert "arrivals/s" in capsys.readouterr().out
    assert Costs.read(file, kept_tokens=12.0).prompt_tokens == 20
