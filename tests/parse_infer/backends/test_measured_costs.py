"""`tools.measure_servers costs`: what it measures is what `parse-infer plan` reads."""

from __future__ import annotations

import pytest

from parse_infer.cli.app import main
from parse_infer.evaluation.serving_costs import Costs
from tools.measure_servers import costs


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
