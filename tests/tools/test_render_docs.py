"""Tables and figures of the documentation are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from parse_infer.evaluation.records import Record
from parse_infer.evaluation.report import summarise
from parse_infer.evaluation.results_file import write_results
from tools.doc_tables import read_results
from tools.render_docs import main, update

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "command": "parse-infer bench --limit 40",
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "Some CPU",
    "gpu": None,
    "cores": 2,
    "threads": 1,
    "dtype": "float32",
    "task": "gsm_symbolic, test split, seed 0",
    "problems": 40,
    "seed": 0,
}
MODES = {"target": 2.0, "draft": 0.2, "target+draft": 1.0, "parse": 0.5, "parse+none": 0.6}


def results(faster: float = 1.0, modes: dict[str, float] = MODES) -> dict:
    ids = [f"p{i}" for i in range(40)]
    records = [
        Record(
            problem_id=problem,
            digest=problem,
            mode=mode,
            repeat=0,
            correct=i % 5 > 0 or mode == "target",
            seconds=seconds / faster,
            n_tokens=50 + i,
            text="",
            finish_reason="eos",
            target_forwards=0 if mode == "draft" else 7,
            draft_tokens=40 if mode.startswith("parse") else None,
            accepted_tokens=30 if mode.startswith("parse") else None,
        )
        for i, problem in enumerate(ids)
        for mode, seconds in modes.items()
    ]
    return summarise(records, ids, ENVIRONMENT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a README, a page and results."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    write_results(tmp_path / "docs" / "results" / "bench.json", results())
    block = "<!-- results: docs/results/bench.json table={} -->\n{}<!-- end -->\n"
    readme = (
        "# Title\n\n"
        + block.format("headline", "old\n")
        + "\n<!-- figure: docs/results/bench.json docs/speed.png -->\n"
    )
    (tmp_path / "README.md").write_text(readme + "![speed](docs/speed.png)\n\nLast line.\n")
    page = block.format("tokens", "") + "Between.\n" + block.format("modes", "")
    (tmp_path / "docs" / "page.md").write_text(page + "```\n" + block.format("example", "untouched\n") + "```\n")
    return tmp_path


def test_tables_and_figures_are_written_once(root, capsys):
    assert main([str(root), "--check"]) == 1
    assert "README.md differs from its results: run python -m" in capsys.readouterr().out
    assert not (root / "docs" / "speed.png").exists() and "old\n" in (root / "README.md").read_text()
    assert main([str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written: {n}" for n in ("README.md", "docs/speed.png", "docs/page.md")
    ]
    assert main([str(root), "--check"]) == 0 and update(root) == []
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Title\n\n<!-- results: ") and readme.endswith("Last line.\n") and "old" not in readme
    assert "| gsm_symbolic, test split, seed 0, 40 |  |  |  | " in readme, "40 problems prove nothing about accuracy"
    assert "| 10.00× [10.00, 10.00] | 2.00× [2.00, 2.00] | 4.00× [4.00, 4.00] |\n" in readme
    assert readme.count("\n| ") == 3 and "\nBrackets: 95 % intervals.\n\n<!-- end -->" in readme
    page = (root / "docs" / "page.md").read_text()
    origin = "40 problems of gsm_symbolic, test split, seed 0; Some CPU, 2 cores, 1 thread, float32; "
    assert origin + "`parse-infer bench --limit 40`, 2026-01-02. Brackets: 95 % intervals.\n\n<!-- end -->" in page
    assert "| `parse+none` | 80.0 | 116 | 3.33× [3.33, 3.33] | 9.93 | 7.0 | 0.0 |" in page
    assert "| mode | right, % | to target |" in page and "untouched\n" in page and "\nBetween.\n" in page


def test_the_headline_has_a_row_per_file(root):
    """Prompts without references have no right answers; a mode that was not measured leaves its cell empty."""
    chat = results(modes={name: MODES[name] for name in ("target", "target+draft", "parse")})
    chat["environment"] = ENVIRONMENT | {"task": "chat", "scored": False}
    write_results(root / "docs" / "results" / "chat.json", chat)
    block = "<!-- results: {} table={} -->\n<!-- end -->\n"
    both = "docs/results/bench.json docs/results/chat.json"
    (root / "README.md").write_text(block.format(both, "headline"))
    update(root)
    readme = (root / "README.md").read_text()
    assert "\n| chat, 40 |  |  |  |  | 2.00× [2.00, 2.00] | 4.00× [4.00, 4.00] |\n" in readme
    assert readme.index("| gsm_symbolic") < readme.index("| chat")
    (root / "README.md").write_text(block.format(both, "modes"))
    with pytest.raises(ValueError, match="line 1: table=modes shows one file"):
        update(root)


def test_other_results_and_changed_tables_are_found(root):
    update(root)
    (root / "docs" / "page.md").write_text((root / "docs" / "page.md").read_text().replace("116", "999"))
    assert update(root, write=False) == ["docs/page.md"]
    write_results(root / "docs" / "results" / "bench.json", results(faster=2.0))
    assert update(root) == ["docs/speed.png", "docs/page.md"]
    assert update(root, write=False) == []
    (root / "docs" / "speed.png").unlink()
    assert update(root, write=False) == ["docs/speed.png"]


@pytest.mark.slow
def test_categories_of_prompts_have_a_table(root):
    found = results()
    found["categories"] = {
        "qa": {"n": 40, "modes": {"target": {}, "parse": {"acceptance_length": 9.5, "speedup": 4.0}}}
    }
    found["modes"] = {name: found["modes"][name] for name in ("target", "parse")}
    write_results(root / "docs" / "results" / "bench.json", found)
    page = root / "docs" / "page.md"
    page.write_text("<!-- results: docs/results/bench.json table=categories -->\n<!-- end -->\n")
    update(root)
    assert "| category | prompts | `parse` |" in page.read_text()
    assert "| qa | 40 | 9.50 (4.00×) |" in page.read_text()
    write_results(root / "docs" / "results" / "bench.json", results())
    with pytest.raises(ValueError, match="have no category"):
        update(root)


@pytest.mark.slow
def test_a_sweep_has_a_table(root):
    page = root / "docs" / "page.md"
    page.write_text("<!-- results: docs/results/bench.json table=thresholds -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="have no sweep"):
        update(root)
    write_results(root / "docs" / "results" / "bench.json", results(modes=MODES | {"parse-min-p@0.3": 0.5}))
    update(root)
    assert "| mode | threshold | right, % | against target, points | speed-up | accepted, % |" in page.read_text()
    assert "| parse-min-p | 0.3 | 80.0 [65.2, 89.5] | -20.0 [" in page.read_text()


def test_clients_have_a_table(root):
    cell = {"mode": "parse", "clients": 8, "accuracy": 0.875, "tokens_per_s": 147.3, "speedup": 1.873}
    cell |= {"first_p50_s": 5.84, "p50_s": 5.85, "p99_s": 33.91}
    about = {"n_problems": 32, "task": "sums", "coordinator": {"cpu": "Some CPU", "cores": 2}}
    about |= {"command": "parse-infer bench --backend vllm", "date": "2026-01-02T03:04:05+00:00"}
    write_results(root / "docs" / "results" / "clients.json", {"about": about, "cells": [cell]})
    page = root / "docs" / "page.md"
    page.write_text("<!-- results: docs/results/clients.json table=clients -->\n<!-- end -->\n")
    update(root)
    assert "| `parse` | 8 | 87.5 | 147 | 1.87× | 5.8 | 5.8 | 33.9 |" in page.read_text()
    assert "32 problems of sums; Some CPU, 2 cores, all on this one machine; `parse-infer bench" in page.read_text()
    assert "Brackets" not in page.read_text()
    turns = {"about": about | {"turns": 3}, "cells": [cell | {"speedup_range": [1.8, 1.944]}]}
    write_results(root / "docs" / "results" / "clients.json", turns)
    update(root)
    assert "| 1.87× [1.80, 1.94] |" in page.read_text()
    assert page.read_text().count("Brackets: the lowest and the highest of 3 turns.") == 1


def test_a_figure_belongs_to_the_results_that_are_read_back(root):
    """What the benchmark draws from memory is what the command finds on disk."""
    from parse_infer.evaluation.figure import draw_figure
    from parse_infer.evaluation.results_file import digest
    from tools.render_docs import drawn_from

    draw_figure(results(), root / "docs" / "speed.png")
    assert drawn_from(root / "docs" / "speed.png") == digest(read_results(root / "docs" / "results" / "bench.json"))
    assert drawn_from(ROOT / "zoo" / "parse_zoo" / "models" / "adapter" / "acceptance.png") is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<!-- results: docs/results/bench.json table=headlin -->\n<!-- end -->", "did you mean 'headline'?"),
        ("<!-- results: docs/results/bench.json table=modes -->", "README.md, line 2: the block has no end"),
        ("<!-- results: docs/results/bench.json -->", "README.md, line 2: write <!-- results: FILE table=KIND -->"),
        ("<!-- results: docs/results/none.json table=modes -->\n<!-- end -->", "docs/results/none.json"),
        ("<!-- figure: docs/results/none.json docs/speed.png -->", "docs/results/none.json"),
    ],
)
def test_mistakes_are_one_sentence_with_the_line(root, text, sentence, capsys):
    (root / "README.md").write_text("\n" + text)
    assert main([str(root)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_calibration_in_halves_has_a_table_and_a_figure(root):
    """A promise that no half makes is in the table, and no point of the figure."""
    shown = {"resume": "finish", "risk": 0.05, "shown": 1.0, "lost": 0.031, "lost_range": [0.02, 0.045], "above": 0.04}
    nothing = {"resume": "hand_back", "risk": 0.01, "shown": 0.0, "lost": 0.0, "lost_range": [0.0, 0.0], "above": 0.0}
    rows = [shown | {"speedup": 2.5}, nothing | {"speedup": 1.0}]
    environment = {"task": "sums", "n_problems": 1000, "splits": 50, "confidence": 0.9, "command": "python -m x"}
    environment |= {"date": "2026-01-02T03:04:05+00:00"}
    write_results(root / "docs" / "results" / "splits.json", {"environment": environment, "rows": rows})
    (root / "README.md").write_text(
        "<!-- results: docs/results/splits.json table=splits -->\n<!-- end -->\n"
        "<!-- figure: docs/results/splits.json docs/promises.png -->\n"
    )
    assert update(root) == ["README.md", "docs/promises.png", "docs/page.md"]
    lines = (root / "README.md").read_text().splitlines()
    assert "| 5 | `finish` | 100.0 | 3.1 [2.0, 4.5] | 4.0 | 2.50× |" in lines
    assert "| 1 | `hand_back` | 0.0 | 0.0 [0.0, 0.0] | 0.0 | 1.00× |" in lines
    assert any(line.startswith("1000 problems of sums, 50 times in random halves") for line in lines)
    assert (root / "docs" / "promises.png").read_bytes()[:4] == b"\x89PNG"
    assert update(root) == []


def test_a_comparison_of_rules_has_a_table_and_a_figure(root):
    lossless = {"threshold": 2.0, "block_tokens": "auto", "lost": 0.0, "lost_ci": [0.0, 0.0], "speed": 1.0}
    lossless |= {"speed_ci": [1.0, 1.0], "speedup": 2.5, "speedup_ci": [2.4, 2.6]}
    rule = {"options": {"task": "sums", "split": "validation", "seed": 3, "label": "a rule"}, "problems": 40}
    rule |= {
        "timed": 9,
        "loss": "lost",
        "promises": {"0.05": 1, "0.01": None},
        "machine": {"cpu": "Some CPU", "threads": 1},
    }
    rule |= {
        "models": {"dtype": "float32"},
        "points": [lossless, lossless | {"threshold": 0.5, "speed": 1.4, "pace": 7, "tokens": 80, "written": 2}],
    }
    made = {"command": "python -m tools.comparison comparison/pair", "date": "2026-01-02T03:04:05+00:00"}
    write_results(root / "docs" / "results" / "rules.json", {"environment": made, "rules": {"rule": rule}})
    (root / "README.md").write_text(
        "<!-- results: docs/results/rules.json table=rules -->\n<!-- end -->\n"
        "<!-- figure: docs/results/rules.json docs/rules.png -->\n"
        "<!-- results: docs/results/rules.json table=points -->\n<!-- end -->\n"
    )
    assert update(root) == ["README.md", "docs/rules.png", "docs/page.md"]
    text = (root / "README.md").read_text()
    assert "| a rule | 5 | 0.5 | auto | 0.0 [0.0, 0.0] | 7.0 | 1.40× [1.00, 1.00] | 2.50× [2.40, 2.60] |" in text
    assert "| a rule | 0.5 | 0.0 [0.0, 0.0] | 80 | 2.5 | 7.0 | 1.40× [1.00, 1.00] | 2.50× [2.40, 2.60] |" in text
    assert "| a rule | accepts nothing | 0.0 [0.0, 0.0] | - | - | - | 1.00×" in text
    assert "sums, validation split, seed 3; Some CPU, 1 thread, float32; `python -m tools.comparison" in text
    assert (root / "docs" / "rules.png").read_bytes()[:4] == b"\x89PNG"
    assert update(root) == []


def test_a_missing_folder_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "gone"), "--check"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_documentation_shows_the_committed_results():
    assert update(ROOT, write=False) == []
