"""The tracker's page of scored drafts: one row a draft, its text coloured by validity."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parse_infer import tracking
from parse_train.judge.data import ValidityDataset
from parse_train.judge.metrics import ScoredDrafts
from parse_train.judge.training import scored_page

TOKENIZER: Any = SimpleNamespace(decode=lambda ids: "".join(chr(i) for i in ids))
TEXT = "1 < 2\n3 > 4"


@pytest.fixture
def page() -> str:
    ids = [ord(letter) for letter in TEXT]
    drafts = ScoredDrafts.from_rows([[0.99, 0.02], [0.9]], [[True, False], [True]], [[6, 11], [6]])
    examples = [SimpleNamespace(draft_ids=ids, length=len(ids)), SimpleNamespace(draft_ids=ids[:6], length=6)]
    return scored_page(drafts, ValidityDataset(examples), TOKENIZER)


def test_a_draft_is_one_row_in_colour(page: str) -> None:
    _, wrong, right = page.split("<tr>")[1:]
    assert wrong.startswith("<td>0<td>no<td>0.020") and right.startswith("<td>1<td>yes<td>0.900")
    first, second = wrong.split("</span>")[:2]
    assert "hsl(119 80% 80%)" in first and "border" not in first and first.endswith("1 &lt; 2\n")
    assert "hsl(2 80% 80%);border-bottom" in second and 'title="validity 0.020"' in second
    assert second.endswith("3 &gt; 4")


def test_the_tracker_keeps_the_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking.start(tracking.RunOptions(tmp_path, "train", "stream", ("target", "draft")))
    tracking.log_page("eval/drafts", page)
    tracking.finish()
    [file] = tmp_path.glob("wandb/offline-run-*/files/media/html/eval/drafts*.html")
    assert file.read_text() == page
