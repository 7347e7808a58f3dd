"""A build that labels PARSE's own answers, with accepted draft tokens and the target's corrections."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from parse_infer import ParseEngine
from parse_infer.models.loading import load_language_model


@pytest.mark.slow
def test_the_drafts_are_the_answers_of_parse(
    make_config: Callable[..., BuildConfig], pair: Path, random_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    random_adapter(load_language_model(pair / "target", role="target").model, logprobs=True).save_pretrained(adapter)
    config = make_config(adapter=str(adapter), thresholds=[0.2, 2.0], limit=4)
    build(config)
    files = sorted(Path(config.output_dir, "data").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    engine = ParseEngine.from_pretrained(pair / "target", pair / "draft", adapter)
    lossless = 0
    for row in rows:
        answers = [
            engine.generate(row["prompt"], threshold=t, max_new_tokens=24, block_tokens=32).token_ids for t in (0.2, 2)
        ]
        drafted = row["draft_ids"]
        assert any(drafted == answer[: len(drafted)] for answer in answers)
        lossless += drafted == answers[1][: len(drafted)]
    assert rows and lossless < len(rows), "no answer has a token that only the judge accepts"


def test_a_wrong_adapter_begins_no_folder(make_config: Callable[..., BuildConfig]) -> None:
    config = make_config(adapter="nosuch")
    with pytest.raises(OSError, match="nosuch"):
        build(config)
    assert not Path(config.output_dir).exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"thresholds": [0.5]}, "thresholds was given without adapter"),
        ({"adapter": "a", "thresholds": [-1]}, "the threshold must be a finite number of at least 0"),
        (
            {"adapter": "a", "backend": "openai", "base_url": ["http://x/v1"]},
            "adapter needs backend local, not open",
        ),
    ],
)
def test_settings_without_their_partner_are_refused(
    make_config: Callable[..., BuildConfig], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_config(**keys)
