"""The target's own answers, from which heads and draft models learn."""

from __future__ import annotations

import json
from pathlib import Path

from parse_infer.models.loading import load_language_model
from parse_train.self_generated_data import AnswerConfig, write_answers


def test_a_prompt_that_does_not_fit_is_left_out(training_folder: Path, tmp_path: Path, capsys) -> None:
    """One long prompt among thousands would end a training hours after its start."""
    lm = load_language_model(training_folder / "target", role="target", device="cpu")
    prompts = ["1+1?", "7" * 40 * lm.window, "2+2?"]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps({"prompt": each, "reference": "4"}) for each in prompts))
    options = {"path": str(tmp_path / "sums.jsonl")}
    config = AnswerConfig(str(training_folder / "target"), task="jsonl", task_options=options, max_answer_tokens=4)
    write_answers(lm, config, 0, "train", 3, tmp_path / "answers")
    [file] = (tmp_path / "answers" / "data").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 2
    assert capsys.readouterr().err.count("left out: ") == 1
