"""Labelled drafts: what is accepted, what is refused and how it is named, the split, token ids, batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_tools.labels.rows import LabelledDraft, check_row, read_rows
from parse_infer.models.fingerprint import describe_target
from parse_train.__main__ import main
from parse_train.judge.build_info import BuildInfo, read_build_info
from parse_train.judge.data import split_by_problem
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import Encoder, ValidityCollator, encode_rows, load_datasets
from parse_train.training_config import IGNORED

PLAIN = {"prompt": "1+1?", "completions": ["one", "two\n", "three"], "labels": [True, True, False]}


def list_rows(source: str, layout: str = "trl") -> list[LabelledDraft]:
    return list(read_rows(source, layout))


def test_a_build_loads_shard_by_shard(training_folder: Path, build_rows: list[dict[str, Any]]) -> None:
    rows = list_rows(str(training_folder / "data"), "build")
    assert [row.cuts for row in rows] == [row["cuts"] for row in build_rows]
    assert rows[0].values == build_rows[0]["values"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": 7}, "prompt must be"),
        ({"completions": "text"}, "completions must be a list"),
        ({"labels": [True, True]}, "labels must be 3 booleans"),
        ({"labels": [1, 1, 0]}, "labels must be 3 booleans"),
        ({"values": [0.5, 2, None]}, "values must be 3 numbers"),
        ({"confidence": [1.0, 0.4, 1.0]}, "confidence must be 3 numbers from 0.5 to 1"),
        ({"confidence": [1.0]}, "confidence must be 3 numbers"),
        ({"cuts": [1, 2, 3]}, "draft_ids and cuts belong together"),
        ({"draft_ids": [5, 6, 7], "cuts": [1, 1, 3]}, "rising offsets that end at 3"),
        ({"draft_ids": [5, 6, 7], "cuts": [1, 2, 4]}, "rising offsets that end at 3"),
        ({"draft_ids": [5, -6, 7], "cuts": [1, 2, 3]}, "token ids"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, write_jsonl: Callable[..., Path], change: dict[str, Any], reason: str
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [PLAIN, PLAIN | change])
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: .*{reason}"):
        list_rows(str(file))


def test_a_half_written_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN) + "\n" + json.dumps(PLAIN)[:20])
    with pytest.raises(ValueError, match="line 2: not complete JSON"):
        list_rows(str(tmp_path))


@pytest.mark.parametrize("source", ["/nowhere/rows.jsonl", "./nowhere", "nowhere"])
def test_missing_data_is_said(source: str) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_rows(source)


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no .jsonl"):
        list_rows(str(tmp_path))


def draft(problem: str | None, prompt: str) -> LabelledDraft:
    return check_row(PLAIN | {"prompt": prompt, "problem_id": problem}, "here")


def test_no_problem_stands_on_both_sides_of_the_split() -> None:
    # Problem 7 also goes by the name "alias", with the same prompt.
    rows = [draft(f"p{i % 20}", f"q{i % 20}") for i in range(60)] + [draft("alias", "q7"), draft(None, "q3")]
    train, held_out = split_by_problem(rows, 0.25, seed=1)
    assert len(train) + len(held_out) == 62
    assert not {row.prompt_key for row in train} & {row.prompt_key for row in held_out}
    assert len({row.prompt_key for row in held_out}) == 5
    again, _ = split_by_problem(rows[::-1], 0.25, seed=1)
    assert {row.prompt_key for row in again} == {row.prompt_key for row in train}
    other, _ = split_by_problem(rows, 0.25, seed=2)
    assert {row.prompt_key for row in other} != {row.prompt_key for row in train}


def test_files_that_number_their_problems_alike_are_not_the_same(
    training_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    rows = [PLAIN | {"prompt": f"q{i}", "problem_id": f"line-{i}"} for i in range(6)]
    others = [PLAIN | {"prompt": f"other q{i}" if i else "q0", "problem_id": f"line-{i}"} for i in range(3)]
    data, eval_data = write_jsonl(tmp_path / "data.jsonl", rows), write_jsonl(tmp_path / "eval.jsonl", others)
    config = ValidityTrainingConfig(
        target="any",
        data=str(data),
        eval_data=str(eval_data),
        layout="trl",
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
    )
    train, evaluation, _ = load_datasets(config, Encoder(tokenizer, 260))
    assert sorted(each.prompt for each in train.examples) == ["q1", "q2", "q3", "q4", "q5"]
    assert len(evaluation) == 3


def test_one_problem_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        split_by_problem([draft("p", "q"), draft("p", "q")], 0.5, seed=0)


def test_segments_of_a_plain_set_are_tokenised_one_by_one(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Encoder(tokenizer, 260)(check_row(PLAIN, "here"))
    assert example is not None
    assert tokenizer.decode(example.draft_ids) == "one\ntwo\nthree"
    assert [tokenizer.decode(example.draft_ids[:cut]) for cut in example.cuts] == [
        "one\n",
        "one\ntwo\n",
        "one\ntwo\nthree",
    ]
    assert tokenizer.decode(example.context_ids) == "<|user|>1+1?<|assistant|>"
    assert example.labels == [True, True, False]
    assert example.weights == [1.0, 1.0, 1.0]


def test_the_last_prefix_of_a_finished_solution_has_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """As in a build; the end is a part of the last step, and all there is of an empty one."""
    end = tokenizer.eos_token_id
    encoder = Encoder(tokenizer, 260, end_token=end)
    plain = encoder(check_row(PLAIN, "here"))
    finished = encoder(check_row(PLAIN | {"finished": True}, "here"))
    assert plain is not None and finished is not None
    assert finished.draft_ids == [*plain.draft_ids, end]
    assert finished.cuts == [*plain.cuts[:-1], plain.cuts[-1] + 1]
    empty = encoder(check_row(PLAIN | {"completions": ["one", "two", ""], "finished": True}, "here"))
    assert empty is not None and empty.draft_ids[-1] == end and empty.labels == [True, True, False]


@pytest.mark.slow
def test_a_public_set_is_trained_on_and_another_one_evaluated_on(
    training_folder: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    shepherd, bench = [], []
    for i in range(8):
        text = f"{i} + 1? Step 1: {i + 1} ки\nStep 2: The answer is: {i + 1 + i % 2} ки"
        signs = text.replace("ки", "+", 1).replace("ки", "-" if i % 2 else "+")
        shepherd.append({"input": text, "label": signs, "task": "GSM8K"})
        problem = {"problem": f"{i} + 2?", "steps": [f"{i}+2", f"{i + 2}"], "final_answer_correct": True}
        bench.append(problem | {"id": f"gsm8k-{i}", "generator": "g", "label": -1 if i % 2 else 0})
    data, evaluation = write_jsonl(tmp_path / "a.jsonl", shepherd), write_jsonl(tmp_path / "b.jsonl", bench)
    options = ["--layout", "math_shepherd", "--eval_data", str(evaluation), "--eval_layout", "processbench"]
    options += ["--data", str(data), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    assert main([str(training_folder / "recipe.yaml"), *options]) == 0
    config = json.loads((tmp_path / "out" / "adapter" / "validity_config.json").read_text())
    assert (config["provenance"]["train_drafts"], config["provenance"]["eval_drafts"]) == (8, 8)
    assert main([str(training_folder / "recipe.yaml"), "--data", str(data)]) == 2


def test_a_set_on_the_hub_without_a_training_split_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"gsm8k": [PLAIN], "math": [PLAIN, PLAIN]}
    monkeypatch.setattr("datasets.load_dataset", lambda name: splits)
    assert [row.where for row in list_rows("some/set")] == [
        "some/set, split gsm8k, row 1",
        "some/set, split math, row 1",
        "some/set, split math, row 2",
    ]
    splits["train"] = [PLAIN]
    assert [row.where for row in list_rows("some/set")] == ["some/set, split train, row 1"]


def test_a_label_weighs_by_its_distance_from_chance(
    tokenizer: PreTrainedTokenizerFast, build_rows: list[dict[str, Any]]
) -> None:
    """A set without confidence, as all were once, is certain of its labels."""
    row = next(row for row in build_rows if len(row["labels"]) == 3)
    for confidence, weights in (([1.0, 0.95, 0.5], [1.0, 0.9, 0.0]), (None, [1.0] * 3)):
        example = Encoder(tokenizer, 260)(check_row(row | {"confidence": confidence}, "here"))
        assert example is not None and example.labels == row["labels"]
        assert example.weights == pytest.approx(weights)


def test_drafts_of_another_tokenizer_are_refused(
    tokenizer: PreTrainedTokenizerFast, build_rows: list[dict[str, Any]]
) -> None:
    encoder = Encoder(tokenizer, 100)
    with pytest.raises(ValueError, match="vocabulary has only 100"):
        encoder(check_row(build_rows[0], "here"))
    shifted = [row | {"draft_ids": [(i + 1) % 256 for i in row["draft_ids"]]} for row in build_rows]
    encoder = Encoder(tokenizer, 260)
    with pytest.raises(ValueError, match="decodes draft_ids to another text"):
        for row in shifted:
            encoder(check_row(row, "here"))


def test_long_rows_are_left_out(tokenizer: PreTrainedTokenizerFast, build_rows: list[dict[str, Any]]) -> None:
    rows = [check_row(row, "here") for row in build_rows]
    encoder = Encoder(tokenizer, 260)
    lengths = [example.length for row in rows if (example := encoder(row)) is not None]
    kept, left_out = encode_rows(rows, encoder, max_length=sorted(lengths)[10])
    assert left_out == sum(length > sorted(lengths)[10] for length in lengths) > 0
    assert len(kept) + left_out == len(rows)


def test_a_batch_is_padded_on_the_right(tokenizer: PreTrainedTokenizerFast, build_rows: list[dict[str, Any]]) -> None:
    encoder = Encoder(tokenizer, 260)
    rows = [check_row(row | {"confidence": [0.9] * len(row["labels"])}, "here") for row in build_rows[:4]]
    examples = [example for row in rows if (example := encoder(row)) is not None]
    batch = ValidityCollator(pad_id=258)(examples)
    longest, most = max(e.length for e in examples), max(len(e.cuts) for e in examples)
    assert batch["input_ids"].shape == (4, longest)
    assert batch["visible"].shape == batch["labels"].shape == (4, most)
    for i, example in enumerate(examples):
        k, context = len(example.cuts), len(example.context_ids)
        assert batch["input_ids"][i, : example.length].tolist() == example.context_ids + example.draft_ids
        assert (batch["input_ids"][i, example.length :] == 258).all()
        assert batch["visible"][i].tolist() == [context + cut for cut in example.cuts] + [0] * (most - k)
        assert batch["visible"][i, k - 1] == example.length
        assert batch["labels"][i].tolist() == [int(x) for x in example.labels] + [IGNORED] * (most - k)
        torch.testing.assert_close(batch["weights"][i, :k], torch.tensor(example.weights))
        assert not batch["weights"][i, k:].any()


def test_a_build_says_how_it_was_made(make_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_model("llama")
    assert read_build_info(str(tmp_path)) == BuildInfo()
    content = {
        "config": {
            "cut_policy": {"kind": "sentence"},
            "rollouts": 4,
            "max_rollouts": 32,
            "margin": 0.25,
            "template_options": {"a": 1},
            "draft": "d",
        },
        "models": {"target": describe_target(model), "draft": {"name": "last-part", "fingerprint": "w1:0"}},
    }
    (tmp_path / "build.json").write_text(json.dumps(content))
    info = read_build_info(str(tmp_path))
    assert (info.cut_policy, info.template_options) == ({"kind": "sentence"}, {"a": 1})
    assert info.label == {"rollouts": 4, "max_rollouts": 32, "margin": 0.25}
    assert info.draft == {"name": "d", "fingerprint": "w1:0"}
    info.check_target(model, "here")
    with pytest.raises(ValueError, match="here was labelled by rollouts of"):
        info.check_target(make_model("llama", seed=1), "here")
    (tmp_path / "build.json").write_text("{")
    with pytest.raises(ValueError, match=r"build.json is damaged"):
        read_build_info(str(tmp_path))
