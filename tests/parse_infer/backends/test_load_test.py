"""The benchmark with many clients: every cell measured once, a table and a figure of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from parse_infer.backends.pool.retries import Unavailable
from parse_infer.evaluation.load_test import LoadTest, check_server_modes, run_clients, server_of
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.token_drafters.test_eagle import make_head
from tests.parse_infer.token_drafters.test_medusa import make_heads
from tools.medusa_for_vllm import convert


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    reference: str = ""


@pytest.mark.slow
def test_every_mode_is_measured_at_every_load_and_only_once(engine, connect, tmp_path):
    coordinator, (target,), _ = connect(engine)
    connected: list[tuple[bool, dict[str, object]]] = []

    class Connection:
        def __enter__(self):
            return coordinator

        def __exit__(self, *_: object) -> None:
            pass

    checked = ["p0"]

    def run(ways: list[str], folder: Path = tmp_path, n: int = 6) -> dict[str, object]:
        return run_clients(
            lambda stock, options: connected.append((stock, options)) or Connection(),
            LoadTest(ways, [1, 3], GenerationSettings(12, 0.5)),
            [Problem(f"p{n}", f"Tom has {n} apples.") for n in range(n)],
            lambda problem, text: None if None in checked else problem.id in checked,
            folder,
            {"target": "tiny"},
        )

    results = run(["target", "parse", "parse:12", "parse:adaptive"])
    assert connected == [(True, {}), (False, {})], "the target alone has a stock server"
    cells = {(cell["mode"], cell["clients"]): cell for cell in results["cells"]}
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
    assert connected == [(True, {}), (False, {}), (False, {})], "what is there is not measured again"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.slow
def test_modes_alternate_and_the_spread_is_reported(engine, connect, tmp_path, together):
    coordinator, _, _ = connect(engine)
    happened: list[str] = []

    class Connection:
        def __init__(self, stock: bool, options: dict[str, object]) -> None:
            self.name = "plain" if stock else "drafting"

        def __enter__(self):
            happened.append(f"{self.name} up")
            return coordinator

        def __exit__(self, *_: object) -> None:
            happened.append(f"{self.name} down")

    def run(turns: int) -> dict[str, object]:
        problems = [Problem(f"p{n}", f"Tom has {n} apples.") for n in range(4)]
        about = {"target": "tiny"}
        return run_clients(
            Connection,
            LoadTest(["target", "parse"], [2], GenerationSettings(12, 0.5), turns, together),
            problems,
            lambda problem, text: problem.id == "p1",
            tmp_path,
            about,
            happened.append,
        )

    results = run(2)
    first, second = "2 clients, turn 1 of 2", "2 clients, turn 2 of 2"
    plain = [f"vLLM, target alone, {first}", f"vLLM, target alone, {second}"]
    drafting = [f"PARSE, {first}", f"PARSE, {second}"]
    if together:
        assert happened == [
            "plain up", plain[0], "drafting up", *drafting, plain[1], "drafting down", "plain down"
        ]  # fmt: skip
    else:
        assert happened == ["plain up", *plain, "plain down", "drafting up", *drafting, "drafting down"]
    target, parse = results["cells"]
    assert parse["answers"] == 8 and parse["accuracy"] == 0.25
    low, high = parse["speedup_range"]
    assert low <= parse["speedup"] <= high and target["speedup_range"] == [1, 1]
    assert parse["accuracy_ci"][0] < 0.1 < 0.6 < parse["accuracy_ci"][1], "two runs are still four problems"
    happened.clear()
    assert len(run(3)["cells"]) == 2, "more turns go on where the others ended"
    assert [line for line in happened if "turn" in line] == [
        "vLLM, target alone, 2 clients, turn 3 of 3",
        "PARSE, 2 clients, turn 3 of 3",
    ]
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    speeds = {(r["mode"], r["turn"]): r["answers"] / r["wall_s"] for r in map(json.loads, records)}
    ratios = [speeds["parse", turn] / speeds["target", turn] for turn in range(3)]
    assert json.loads((tmp_path / "clients.json").read_text())["cells"][1]["speedup_range"] == [
        min(ratios),
        max(ratios),
    ]
    assert f"[{min(ratios):.2f}, {max(ratios):.2f}]" in (tmp_path / "clients.md").read_text()


def test_the_controller_counts_answers_without_a_draft_apart(engine, connect, tmp_path):
    coordinator, _, draft = connect(engine, patience_s=0.1)
    draft.offline = True
    with pytest.raises(Unavailable, match="no draft server answers"):
        run_clients(
            lambda *_: nullcontext(coordinator),
            LoadTest(["parse"], [1], GenerationSettings(12, 0.5)),
            [Problem("p0", "Tom has 5 apples.")],
            lambda problem, text: True,
            tmp_path,
            {"target": "tiny"},
        )


def test_modes_are_checked():
    with pytest.raises(ValueError, match="unknown mode 'eagle'"):
        check_server_modes(["eagle"])
    with pytest.raises(ValueError, match="mode 'target\\+ngram:tokens=0' has a wrong size"):
        check_server_modes(["target+ngram:tokens=0"])
    with pytest.raises(ValueError, match="'target\\+eagle3' is 'eagle3': give the folder of a trained head"):
        check_server_modes(["target+eagle3"])
    with pytest.raises(ValueError, match="is 'ngarm'; did you mean 'ngram'"):
        check_server_modes(["target+ngarm"])
    with pytest.raises(ValueError, match="unknown mode 'target:32\\+ngram'"):
        check_server_modes(["target:32+ngram"])
    check_server_modes(["target+ngram:tokens=5", "parse:adaptive", "parse+ngram"])
    speculation = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5}
    assert server_of("target+ngram:tokens=5") == (True, {"speculative_config": speculation})
    assert server_of("parse:32+ngram:tokens=5") == (False, {"speculative_config": speculation})
    assert server_of("target") == (True, {}) and server_of("parse:adaptive") == (False, {})
    with pytest.raises(ValueError, match="needs a server of its own"):
        check_server_modes(["parse+ngram"], starts=False)


def test_a_head_decides_how_vllm_speculates(engine, tmp_path, monkeypatch):
    target = engine.target
    make_head(target).save_pretrained(tmp_path / "chain")
    make_head(target, parallel=True).save_pretrained(tmp_path / "block")
    medusa = make_heads(target).save_pretrained(tmp_path / "medusa")
    convert(medusa, tmp_path / "whole", target.model.config.vocab_size)
    monkeypatch.chdir(tmp_path)

    def speculation(name: str) -> dict[str, object]:
        stock, options = server_of(f"target+{name}")
        assert stock and options["speculative_config"].pop("model") == str(tmp_path / name.partition(":")[0])
        return options["speculative_config"]

    assert speculation("chain") == {"method": "eagle3", "num_speculative_tokens": 3}
    assert speculation("block:tokens=4") == {
        "method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 4
    }  # fmt: skip
    assert speculation("whole") == {"method": "medusa", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match=r"vLLM cannot load the Medusa heads .*medusa as they are: rewrite them"):
        check_server_modes(["target+medusa"])
