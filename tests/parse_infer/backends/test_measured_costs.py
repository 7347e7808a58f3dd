"""`tools.measure_servers costs`: what it measures is what `parse-infer plan` reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parse_infer.cli.app import main
from parse_infer.evaluation.capacity_plan import plan
from parse_infer.evaluation.serving_costs import Costs
from parse_infer.request.output import Generation, Statistics, Timings
from parse_infer.settings.generation import GenerationSettings
from tools import measure_servers
from tools.measure_servers import costs

READ_S, TOKEN_S, PROMPT, ANSWER = 0.0005, 0.01, 2000, 200


class KnownCosts:
    """An engine whose target takes `READ_S` for a prompt token and `TOKEN_S` for one of its own."""

    backend = SimpleNamespace(parallel=1)
    target = SimpleNamespace(render=lambda prompt: [0] * PROMPT)

    def clear_caches(self) -> None:
        pass

    def events(self, prompt: object, settings: GenerationSettings, alone: bool = False, streamed: bool = True):
        if alone:
            n = settings.max_new_tokens
            taken, counts = Timings(resume_s=PROMPT * READ_S + n * TOKEN_S), Statistics()
        else:
            n, taken = ANSWER, Timings(draft_s=0.1, verify_s=0.1, resume_s=0.1)
            counts = Statistics(draft_tokens=64, accepted_tokens=50, rounds=1)
        return Generation("", [0] * n, [], "length", counts, taken)

    def collect(self, found):
        return found


def test_the_read_of_the_prompt_is_no_part_of_a_written_token(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_servers, "prompts", lambda n: list(range(n)))
    costs(KnownCosts(), str(tmp_path / "costs.json"), loads=(1,), tokens=ANSWER)
    found = Costs.read(tmp_path / "costs.json")
    assert found.target_token_s.at(1) == pytest.approx(TOKEN_S)
    assert found.read_token_s.at(1) == pytest.approx(READ_S, rel=0.02)
    (row,) = plan(found, [1], 1, 0, 200, closed=True)
    assert row.alone.p50_s == pytest.approx(PROMPT * READ_S + ANSWER * TOKEN_S, rel=0.02)


@pytest.mark.slow
def test_costs_at_several_loads_are_planned_with(engine, connect, tmp_path, capsys):
    coordinator, _, _ = connect(engine)
    file = tmp_path / "costs.json"
    coordinator.threshold = 0.5
    assert costs(coordinator, str(file), loads=(1, 2), tokens=24).endswith(f"parse-infer plan {file}")
    found = Costs.read(file)
    assert [load for load, _ in found.target_token_s.points] == [1, 2] == [n for n, _ in found.draft_token_s.points]
    assert found.parse_token_s is not None and [n for n, _ in found.parse_token_s.points] == [1, 2]
    assert 0 <= found.kept_tokens <= found.draft_tokens <= 24 and found.answer_tokens <= 24 < found.prompt_tokens
    assert found.kept_tokens + found.target_tokens > 0
    assert main(["plan", str(file), "--requests", "100"]) == 0
    assert "arrivals/s" in capsys.readouterr().out
