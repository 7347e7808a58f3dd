"""The benchmark with many clients: every cell measured once, a table and a figure of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from parse_infer.bench.clients import check_ways, run_clients, server_options
from parse_infer.generation import GenerationSettings


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    reference: str = ""


def test_every_way_answers_at_every_load_and_a_second_run_measures_nothing_again(engine, connect, tmp_path):
    coordinator, (target,), _ = connect(engine)
    connected: list[dict[str, object]] = []

    class Connection:
        def __enter__(self):
            return coordinator

        def __exit__(self, *_: object) -> None:
            pass

    checked = ["p0"]

    def run(ways: list[str], folder: Path = tmp_path, n: int = 6) -> dict[str, object]:
        return run_clients(
            lambda options: connected.append(options) or Connection(),
            ways,
            [1, 3],
            [Problem(f"p{n}", f"Tom has {n} apples.") for n in range(n)],
            lambda problem, text: None if None in checked else problem.id in checked,
            folder,
            GenerationSettings(12, 0.5),
            {"target": "tiny"},
        )

    results = run(["target", "parse", "parse:hand_back", "parse:adaptive"])
    assert connected == [{"speculative_config": None}, {}], "the target alone has a plain server"
    cells = {(cell["way"], cell["clients"]): cell for cell in results["cells"]}
    assert len(cells) == 8 and all(cell["answers"] == 6 for cell in cells.values())
    assert cells["target", 3]["speedup"] == 1 and cells["parse", 1]["speedup"] > 0
    assert cells["parse", 1]["accuracy"] == pytest.approx(1 / 6) and 0 <= cells["parse", 1]["acceptance_rate"] <= 1
    salts = {body["cache_salt"] for body in target.bodies}
    assert len(salts) == 16, "warming up has a cache of its own too"
    with Image.open(tmp_path / "clients.png") as image:
        assert image.size[0] > 500
    assert (tmp_path / "clients.md").read_text().count("| PARSE |") == 2
    assert json.loads((tmp_path / "clients.json").read_text())["cells"] == json.loads(json.dumps(results["cells"]))
    run(["target", "parse"])
    checked = [None]
    open_ended = run(["parse"], tmp_path / "open")["cells"][0]
    assert open_ended["accuracy"] is None and "0.0 %" not in (tmp_path / "open" / "clients.md").read_text()
    with pytest.raises(ValueError, match="with problems"):
        run(["parse"], tmp_path / "open", n=5)
    assert connected == [{"speculative_config": None}, {}, {}], "what is there is not measured again"


def test_ways_are_checked():
    with pytest.raises(ValueError, match="unknown mode 'eagle'"):
        check_ways(["eagle"], "zoo:target")
    with pytest.raises(ValueError, match="unknown mode 'target\\+ngram:tokens=0'"):
        check_ways(["target+ngram:tokens=0"], "zoo:target")
    check_ways(["target+ngram:tokens=5", "target+parallel:tokens=4"], "zoo:target")
    speculation = server_options("target+ngram:tokens=5")["speculative_config"]
    assert speculation == {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5}
    with pytest.raises(ValueError, match="no head of 'zoo:smollm2'"):
        check_ways(["target+eagle3"], "zoo:smollm2")
    with pytest.raises(ValueError, match="needs a server of its own"):
        check_ways(["target+ngram"], "zoo:target", starts=False)
