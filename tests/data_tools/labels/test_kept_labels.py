"""The labelled drafts that the repository keeps can be unpacked, read and trained on."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import read_rows

FOLDER = Path(__file__).parents[3] / "zoo" / "labels"
FILES = sorted(FOLDER.glob("*.tar.xz"))


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_kept_labels_are_whole_and_small(file: Path, tmp_path: Path) -> None:
    assert file.stat().st_size < 2_000_000
    with tarfile.open(file) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / file.name.removesuffix(".tar.xz")
    config = BuildConfig.of_folder(folder)
    assert config.split == "train" and not config.prefix_labels and config.drop_unsolved
    rows = [row for row in read_rows(folder) if row.labels]
    wrong = sum(not all(row.labels) for row in rows)
    number, page = r"([\d,]+)", (FOLDER / "README.md").read_text()
    listed = re.search(rf"`{file.name}` \| {number} \| {number} .*? \| {number} \|", page)
    assert listed is not None, "no row in the table of README.md"
    assert [int(each.replace(",", "")) for each in listed.groups()] == [
        len(rows),
        len({row.problem for row in rows}),
        wrong,
    ]
    assert min(wrong, len(rows) - wrong) > 200 and all(row.target_value == 1 for row in rows)
