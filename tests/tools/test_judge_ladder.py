"""Rungs of judges on the same drafts: figures, paired differences, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from data_tools.labels.logprobs import ReadDraft
from data_tools.labels.rows import LabelledDraft
from parse_infer.errors import ParseError
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_train.judge.metrics import ScoredDrafts
from tools.doc_tables import table as doc_table
from tools.judge_ladder import RULES, compare_rungs, figures, length_auroc, read_rungs, score_by_rule, table


@pytest.fixture
def drafts() -> ScoredDrafts:
    """200 drafts of 4 to 8 cuts of 10 tokens; every third has an error."""
    rng, scores, labels, cuts = np.random.default_rng(0), [], [], []
    for number in range(200):
        n = int(rng.integers(4, 9))
        error = int(rng.integers(n)) if number % 3 == 0 else n
        labels.append([k < error for k in range(n)])
        scores.append([0.9 if k < error else 0.1 for k in range(n)])
        cuts.append([10 * (k + 1) for k in range(n)])
    return ScoredDrafts.from_rows(scores, labels, cuts)


def noisy(drafts: ScoredDrafts, share: float, seed: int) -> ScoredDrafts:
    noise = np.random.default_rng(seed).random(drafts.scores.shape)
    return ScoredDrafts((1 - share) * drafts.scores + share * noise, drafts.labels, drafts.cuts)


def test_a_perfect_judge_rejects_no_right_token(drafts):
    rows = np.arange(len(drafts.labels))
    assert figures(drafts, rows) == [1.0] * 4 + [0.0] * 3
    inverted = ScoredDrafts(1 - drafts.scores, drafts.labels, drafts.cuts)
    assert figures(inverted, rows)[0] == 0.0 and figures(inverted, rows)[-1] == 1.0


def test_rejected_tokens_are_counted_at_the_missed_share():
    """Two errors at 0.3 and 0.6: to miss neither, the threshold lies above 0.6, where the right 0.5 is rejected."""
    drafts = ScoredDrafts.from_rows(
        [[0.9, 0.3], [0.9, 0.6], [0.9, 0.5]], [[True, False]] * 2 + [[True, True]], [[10, 20]] * 3
    )
    assert figures(drafts, np.arange(3))[-1] == pytest.approx(10 / 40)


def test_a_better_rung_is_told_from_a_worse_one(drafts, tmp_path):
    problems = [f"p{number // 2}" for number in range(200)]
    scores = {"worse": [noisy(drafts, 0.9, seed) for seed in (1, 2)], "better": [noisy(drafts, 0.6, 3)]}
    found = compare_rungs(scores, problems, resamples=50)
    assert found["worse"]["seeds"] == 2 and found["worse"]["to_first"]["auroc"] == [0.0, 0.0, 0.0]
    apart, low, high = found["better"]["to_first"]["ap_error"]
    assert 0 < low < apart < high and apart == pytest.approx(found["better"]["ap_error"] - found["worse"]["ap_error"])
    assert 0.3 < length_auroc(drafts) < 0.7
    result = {"rungs": found, "drafts": 200, "problems": 100, "wrong_drafts": 67, "auroc_of_length": 0.5}
    assert table(json.loads(json.dumps(result))).row_count == 7
    run = {"date": "2026-01-02T03:04:05", "command": "python -m tools.judge_ladder x", "dtype": "float32"}
    machine = {"cpu": "Some CPU", "gpu": None, "cores": 2, "threads": 1}
    (tmp_path / "ladder.json").write_text(json.dumps(result | {"environment": machine | run}))
    lines = doc_table([tmp_path / "ladder.json"], "ladder")
    assert lines[2].startswith("| worse (2 seeds) |") and f"<br>{apart:+.3f} [{low:+.3f}, {high:+.3f}]" in lines[3]


def test_a_rule_scores_a_prefix_by_its_lowest_token():
    own, top = torch.tensor([-0.1, -2.0, -0.5]), torch.tensor([[-0.1], [-0.5], [-0.5]])
    found = TokenLogprobs(torch.tensor([1, 2, 3]), own, torch.tensor([[1], [9], [3]]), top)
    row = LabelledDraft("row 1", "?", ["a", "b"], [True, False], [None] * 2, [1.0] * 2, [1, 2, 3], [1, 3])
    scores = {name: score_by_rule(rule, [ReadDraft(row, found)]).scores.tolist() for name, rule in RULES.items()}
    assert scores["lowest log-probability"] == [pytest.approx([-0.1, -2.0])]
    assert scores["min-p"] == [pytest.approx([0.0, -1.5])]


@pytest.mark.parametrize("option", ["stream", "=runs/a", "stream="])
def test_a_rung_has_a_name_and_adapters(option):
    assert read_rungs(["a=x,y", "b=z"]) == {"a": ["x", "y"], "b": ["z"]}
    with pytest.raises(ParseError, match="is not NAME=ADAPTER,ADAPTER"):
        read_rungs([option])
