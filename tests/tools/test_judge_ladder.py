"""Rungs of judges on the same drafts: figures, paired differences, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_tools.labels.backends import LocalWriter
from data_tools.labels.logprobs import ReadDraft, add_logprobs
from data_tools.labels.rows import LabelledDraft
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.cli.entry_point import run_app
from parse_infer.errors import ParseError
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import load_language_model
from parse_infer.text.cuts import Segmenter
from tests.wandb_runs import artifacts, offline_runs
from tools.doc_tables import table as doc_table
from tools.judge_ladder import (
    app,
    check_drafts,
    learnt,
    read_rungs,
    rules_for,
    score,
    score_by_rule,
    table,
    tracked,
)
from tools.ladder_figures import FIGURES, HeldOut, Judged, compare_rungs, count_stops, few_errors, figures

ROOT = Path(__file__).parents[2]


def row(labels: list[bool], cuts: list[int], problem: str = "p", value: float | None = None) -> LabelledDraft:
    n, ids = len(labels), list(range(cuts[-1]))
    return LabelledDraft(
        "row 1", f"?{problem}", ["a"] * n, labels, [None] * n, [1.0] * n, ids, cuts, 0, problem, None, value
    )


@pytest.fixture
def rows() -> list[LabelledDraft]:
    """200 drafts of 4 to 8 cuts of 10 tokens; every third has an error."""
    rng, made = np.random.default_rng(0), []
    for number in range(200):
        n = int(rng.integers(4, 9))
        error = int(rng.integers(n)) if number % 3 == 0 else n
        made.append(row([k < error for k in range(n)], [10 * (k + 1) for k in range(n)], f"p{number // 2}"))
    return made


def judge(rows: list[LabelledDraft], noise: float, seed: int = 0, adds_up: bool = True) -> Judged:
    """Doubts one token of the first wrong segment, and with `noise` also a token of each segment."""
    rng, added = np.random.default_rng(seed), []
    for one in rows:
        each = np.zeros(one.cuts[-1])
        each[4::10] = noise * rng.random(len(one.cuts))
        if one.first_error is not None:
            each[one.cuts[one.first_error] - 5] += 0.5
        added.append(each)
    return Judged.of(added, HeldOut.of(rows), adds_up)


def of(name: str, found: list[float]) -> list[float]:
    return [value for figure, value in zip(FIGURES, found, strict=True) if figure.startswith(name)]


def test_a_perfect_judge_rejects_no_right_token(rows):
    held, every = HeldOut.of(rows), np.arange(len(rows))
    found = figures(judge(rows, 0.0), held, every)
    assert found[:4] == [1.0] * 4 and of("behind", found) == of("corrections", found) == [0.0] * 3
    right = held.right.sum() / held.sizes.sum()
    kept = of("kept", found)
    assert kept == sorted(kept) and right <= kept[0] < right + 0.03, "a few errors may be kept"
    blind = figures(Judged.of([np.zeros(one.cuts[-1]) for one in rows], held, True), held, every)
    assert blind[0] == 0.5 and of("kept", blind) == [1.0] * 3, "tokens without doubt are never rejected"


def test_right_tokens_behind_a_rejection_and_their_corrections():
    """Errors at doubts 3 and 2: to miss neither, a prefix is rejected from 2 on, as in the middle of the right one."""
    rows = [row([True, False], [10, 20]), row([True, False], [10, 20]), row([True] * 3, [10, 20, 30])]
    added = [np.zeros(20), np.zeros(20), np.zeros(30)]
    added[0][15], added[1][15], added[2][12], added[2][17] = 3.0, 2.0, 2.5, 1.0
    held = HeldOut.of(rows)
    found = figures(Judged.of(added, held, adds_up=True), held, np.arange(3))
    assert of("behind", found)[0] == pytest.approx(20 / 50), "segments two and three of the third draft"
    assert of("corrections", found)[0] == pytest.approx(100 / 50), "one token; without its doubt the rest is accepted"
    assert of("kept", found)[0] == pytest.approx(30 / 70), "no request of three may be lost at 1 %"


def test_corrections_take_only_the_doubt_of_their_token():
    each, right = np.array([[0.6, 0.6, 0.6, 5.0, 0.6]]), np.array([[True, True, True, True, False]])
    assert count_stops(each, right, np.array([1.0, 1.5, 9.0]), adds_up=True).tolist() == [[3, 2, 0]]
    assert count_stops(each, right, np.array([0.5, 0.6, 0.7]), adds_up=False).tolist() == [[4, 4, 1]]


def test_an_error_where_the_target_fails_too_loses_nothing():
    rows = [row([False], [10], f"p{i}", value) for i, value in enumerate([0.0, 1.0, 0.25, None])]
    rows += [row([True], [10], f"q{i}") for i in range(96)]
    doubts = [0.1, 0.4, 0.2, 0.3] + [0.35] * 96
    held = HeldOut.of(rows)
    found = figures(Judged.of([np.full(10, doubt / 10) for doubt in doubts], held, True), held, np.arange(100))
    # 1 %: 0 + 0.25 requests are lost below 0.3, and with the draft at 0.3 it would be 1.25.
    assert of("kept", found) == pytest.approx([0.02, 0.99, 1.0])


def test_a_better_rung_is_told_from_a_worse_one(rows, tmp_path):
    judges = {"worse": [judge(rows, 0.9, seed) for seed in (1, 2)], "better": [judge(rows, 0.5, 3)]}
    held = HeldOut.of(rows)
    found = compare_rungs(judges, held, resamples=20)
    assert found["worse"]["seeds"] == 2 and found["worse"]["to_first"]["auroc"] == [0.0, 0.0, 0.0]
    apart, low, high = found["better"]["to_first"]["ap_error"]
    assert 0 < low < apart < high and apart == pytest.approx(found["better"]["ap_error"] - found["worse"]["ap_error"])
    assert 0.3 < held.length_auroc < 0.7
    found["worse"] |= {"seconds_per_100_tokens": 0.0123, "over_read": 1.17}
    result = {"rungs": found, "drafts": 200, "problems": 100, "wrong_drafts": 67, "auroc_of_length": 0.5}
    result |= {"warning": few_errors(67), "best_rule": "better"}
    shown = table(json.loads(json.dumps(result)))
    assert shown.row_count == 2 * len(FIGURES) + 2 and "67 wrong drafts, fewer than 500" in str(shown.caption)
    columns, cells = tracked(result)
    assert len(columns) == len(cells[0]) and cells[0][-1] == 1.17 and cells[1][-1] is None
    run = {"date": "2026-01-02T03:04:05", "command": "python -m tools.judge_ladder x", "dtype": "float32"}
    machine = {"cpu": "Some CPU", "gpu": None, "cores": 2, "threads": 1}
    (tmp_path / "ladder.json").write_text(json.dumps(result | {"environment": machine | run}))
    lines = doc_table([tmp_path / "ladder.json"], "ladder")
    assert lines[2].startswith("| worse (2 seeds) |") and f"<br>{apart:+.3f} [{low:+.3f}, {high:+.3f}]" in lines[3]
    assert lines[2].endswith("| 0.012 | 1.17× |") and lines[3].endswith("|  |  |")
    assert sum(line.startswith("| judge |") for line in lines) == 4
    assert "67 wrong drafts, fewer than 500. Best rule, by" in lines[-1]


def test_results_of_earlier_versions_are_still_rendered(tmp_path):
    """They have no corrections, kept tokens and costs."""
    lines = doc_table([ROOT / "docs" / "results" / "ladder.json"], "ladder")
    assert sum(line.startswith("| judge |") for line in lines) == 2 and "at 1 % missed errors" in lines[7]


@pytest.fixture
def read_draft() -> ReadDraft:
    own, top = torch.tensor([-0.1, -2.0, -0.5]), torch.tensor([[-0.1], [-0.5], [-0.5]])
    found = TokenLogprobs(torch.tensor([1, 2, 3]), own, torch.tensor([[1], [9], [3]]), top)
    return ReadDraft(replace(row([True, False], [1, 3]), draft_ids=[1, 2, 3]), found)


def test_a_rule_scores_a_prefix_by_its_most_doubtful_token(read_draft):
    held = HeldOut.of([read_draft.row])
    doubts = {name: score_by_rule(rule, [read_draft], held).doubt.tolist() for name, rule in rules_for(1).items()}
    assert doubts["lowest log-probability"] == [pytest.approx([0.1, 2.0])]
    assert doubts["min-p"] == [pytest.approx([0.0, 1.5])]
    assert doubts["accept-threshold"] == [pytest.approx([0.0, 2.0])], "the target's first choice is always kept"


def test_rules_take_part_whose_first_choices_are_stored(read_draft, capsys):
    assert set(rules_for(3)) == {"lowest log-probability", "min-p", "accept-threshold", "fly"}
    assert "typical_acceptance reads 20 first choices and is left out: build with --logprobs 20" in (
        capsys.readouterr().out
    )
    every = rules_for(20)
    assert {"relaxed-acceptance", "typical-acceptance"} <= set(every) and not capsys.readouterr().out
    torch.testing.assert_close(every["min-p"](read_draft.logprobs), MinP().doubts(read_draft.logprobs))


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_scores_tokens_as_in_a_block(make_model, tokenizer, random_adapter, tmp_path, random_ids, stream):
    """Its doubt about a prefix ranks as its validity, and the cost of its pass is measured."""
    model = make_model("llama_gqa")
    random_adapter(model, stream=stream).save_pretrained(tmp_path / "adapter")
    decoder = Decoder(model, [tokenizer.eos_token_id])
    lm = SimpleNamespace(
        model=model, decoder=decoder, tokenizer=tokenizer, eos_ids={0}, render=lambda prompt: random_ids(5, seed=9)
    )
    rows = [replace(row([True, False], [4, 9], str(i)), draft_ids=random_ids(9, seed=i)) for i in range(3)]
    reads = LocalWriter(lm, 1).read([(random_ids(5, seed=9), one.draft_ids) for one in rows], 5)
    drafts = [ReadDraft(one, logprobs) for one, logprobs in zip(rows, reads, strict=True)]
    judged, cost = score(str(tmp_path / "adapter"), drafts, HeldOut.of(rows), lm, tmp_path / "kept")
    assert cost["seconds_per_100_tokens"] > 0 and cost["over_read"] > 0
    adapter = type(random_adapter(model)).from_pretrained(tmp_path / "adapter", model)
    verifier = Verifier(decoder, adapter, Segmenter(tokenizer))
    validity = []
    for one in rows:
        decoder.seek(random_ids(5, seed=9))
        validity.append(verifier.verify(one.draft_ids, one.cuts).validity)
    np.testing.assert_allclose(1 / (1 + judged.doubt), validity, rtol=1e-4)
    lm.decoder = SimpleNamespace(device=decoder.device)  # what is kept is not scored again
    again, _ = score(str(tmp_path / "adapter"), drafts, HeldOut.of(rows), lm, tmp_path / "kept")
    np.testing.assert_array_equal(again.doubt, judged.doubt)
    lm.decoder = decoder
    for others, equal in ((drafts[::-1], False), ([replace(d, logprobs=d.logprobs.first(2)) for d in drafts], True)):
        other, _ = score(str(tmp_path / "adapter"), others, HeldOut.of(rows), lm, tmp_path / f"kept{equal}")
        assert np.allclose(other.doubt, judged.doubt, rtol=1e-4) is equal, "the target reads what the data lacks"
    score(str(tmp_path / "adapter"), drafts[::-1], HeldOut.of(rows), lm, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2, "of these very drafts"


def test_problems_that_an_adapter_has_learnt_are_known_by_their_prompts(make_model, random_adapter, tmp_path, rows):
    prompts = frozenset({prompt_hash(rows[0].prompt)})
    replace(random_adapter(make_model("llama_gqa")), train_problems=prompts).save_pretrained(tmp_path / "adapter")
    assert learnt(str(tmp_path / "adapter"), rows) == {"p0"} and not learnt(str(tmp_path / "adapter"), rows[2:])


def test_too_few_drafts_are_counted(rows):
    assert check_drafts(rows, "data/held-out") == 67
    with pytest.raises(ParseError, match=r"has wrong drafts of \d problems and right ones of \d, but .* 20 of"):
        check_drafts(rows[:10], "data/held-out")
    wrong = next(row for row in rows if not all(row.labels))
    with pytest.raises(ParseError, match="has wrong drafts of 1 problems"):
        check_drafts([*(row for row in rows if all(row.labels)), *[wrong] * 40], "data/held-out")
    assert few_errors(500) is None


@pytest.mark.slow
def test_the_command_writes_and_tracks_its_result(
    make_model, tokenizer, random_adapter, random_ids, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    target, data, out = tmp_path / "target", tmp_path / "held-out", tmp_path / "ladder.json"
    make_model("llama_gqa").save_pretrained(target)
    tokenizer.save_pretrained(target)
    lm = load_language_model(target, role="target", dtype="bfloat16")  # not that of the files
    random_adapter(lm.model).save_pretrained(tmp_path / "one")
    random_adapter(lm.model, stream=True).save_pretrained(tmp_path / "two")
    (data / "data").mkdir(parents=True)
    with (data / "data" / "train-000000-000060.jsonl").open("w") as file:
        for i in range(60):
            whole = {"prompt": f"{i}?", "completions": ["x"], "labels": [i % 3 > 0], "problem_id": f"p{i}"}
            file.write(json.dumps(whole | {"draft_ids": random_ids(6, seed=i), "cuts": [6]}) + "\n")
    facts = {"config": {"target": str(target)}, "models": {"target": describe_target(lm.model)}}
    (data / "build.json").write_text(json.dumps(facts))
    add_logprobs(data, lambda: LocalWriter(lm, 5), 5)
    rungs = ["--rung", f"head={tmp_path / 'one'}", "--rung", f"stream={tmp_path / 'two'}"]
    command = [str(data), *rungs, "--out", str(out), "--resamples", "5"]
    assert run_app(app, "ladder", [*command, "--report-to", "wandb"]) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert list(result["rungs"]) == ["head", "stream", "lowest log-probability", "min-p", "accept-threshold", "fly"]
    assert result["warning"] == "20 wrong drafts, fewer than 500" and result["best_rule"] in result["rungs"]
    assert result["environment"]["dtype"] == result["reads"]["dtype"] == "bfloat16"
    assert result["rungs"]["head"]["over_read"] > 0 and "over_read" not in result["rungs"]["fly"]
    [(_, records)] = offline_runs(out.with_suffix(""))
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.job_type == "bench" and "ladder" in run.tags and "target" in run.run_group
    names = [one.name for kind in ("dataset", "model") for one in artifacts(records, kind)]
    endings = zip(names, ("-drafts", "-logprob-adapter", "-stream-adapter"), strict=True)
    assert all(name.endswith(ending) for name, ending in endings), names
    [logged] = out.with_suffix("").glob("wandb/offline-run-*/files/media/table/ladder*.json")
    assert [cells[0] for cells in json.loads(logged.read_text())["data"]] == list(result["rungs"])
    prompts = frozenset({prompt_hash("1?")})
    replace(random_adapter(lm.model), train_problems=prompts).save_pretrained(tmp_path / "one")
    assert run_app(app, "ladder", command) == 2
    sentence = "has learnt from 1 of the held-out problems (first: p1): build them with another seed, exclude"
    assert sentence in capsys.readouterr().err
    assert run_app(app, "ladder", [*command, "--unseen-only"]) == 0 and result["drafts"] == 60
    assert json.loads(out.read_text())["drafts"] == 59
    assert run_app(app, "ladder", [*command, "--rung", "min-p=one"]) == 2
    assert "--rung min-p has the name of a rule" in capsys.readouterr().err
    assert run_app(app, "ladder", [*command, "--report-to", "wand"]) == 2
    assert "--report-to is 'wand'; choose one of none, wandb" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["stream", "=runs/a", "stream=", "stream=a,,b"])
def test_a_rung_has_a_name_and_adapters(option):
    assert read_rungs(["a=x,y", "b=z"]) == {"a": ["x", "y"], "b": ["z"]}
    with pytest.raises(ParseError, match="is not NAME=ADAPTER,ADAPTER"):
        read_rungs([option])
    with pytest.raises(ParseError, match="--rung names a twice"):
        read_rungs(["a=x", "a=y"])
