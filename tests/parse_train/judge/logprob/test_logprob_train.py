"""Training on log-probabilities: stored beside the rows, read without the target, and scored as at inference."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.cli import main as parse_data
from data_tools.labels.backends import LocalWriter
from data_tools.labels.logprobs import add_logprobs, read_drafts
from data_tools.recipe_parser import parse_recipe
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.judge.adapter import ValidityAdapter, describe_target
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.models.fingerprint import fingerprint_of
from parse_infer.models.loading import load_language_model, load_tokenizer
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_train.__main__ import main
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.logprob.data import LogprobCollator, LogprobExample, load_datasets
from parse_train.judge.logprob.model import LogprobModel

OPTIONS = [
    "--max_steps",
    "4",
    "--report_to",
    "none",
    "--per_device_train_batch_size",
    "8",
    "--k",
    "3",
    "--eval_share",
    "0.5",
    "--min_wrong_drafts",
    "0",
]


@pytest.fixture(scope="module")
def build(tmp_path_factory, tokenizer, make_model, build_rows, write_jsonl) -> Path:
    """A build with log-probabilities of three first choices, and its target's files."""
    folder = tmp_path_factory.mktemp("logprob")
    target = folder / "target"
    make_model("llama_gqa").save_pretrained(target)
    tokenizer.save_pretrained(target)
    half = len(build_rows) // 2
    for start, rows in ((0, build_rows[:half]), (8, []), (16, build_rows[half:])):
        write_jsonl(folder / "build" / "data" / f"train-{start:06}-{start + 8:06}.jsonl", rows)
    model = load_language_model(target, role="target", dtype="float32")
    config = {"cut_policy": CutPolicy().to_dict(), "target": str(target)}
    facts = {"config": config, "models": {"target": describe_target(model.model)}}
    (folder / "build" / "build.json").write_text(json.dumps(facts))
    add_logprobs(folder / "build", lambda: LocalWriter(model, 5), 3)
    return folder


def recipe(folder: Path, out: Path, **keys: Any) -> str:
    lines = {"recipe": "logprob", "data": folder / "build", "output_dir": out, "calibration_problems": 0, **keys}
    path = out.with_suffix(".yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return str(path)


@pytest.mark.slow
def test_a_judge_is_trained_without_the_targets_weights(build, make_model, tokenizer, tmp_path, capsys):
    weights = build / "target" / "model.safetensors"
    hidden = weights.rename(tmp_path / "weights")
    try:
        assert main([recipe(build, tmp_path / "out", sharpness=4), *OPTIONS]) == 0, capsys.readouterr().err
    finally:
        hidden.rename(weights)
    printed = capsys.readouterr().out
    assert all(f"{domain}: AUROC 0." in printed for domain in ("even", "odd"))
    loaded = load_language_model(build / "target", role="target", dtype="float32")
    judge = ValidityAdapter.from_pretrained(tmp_path / "out" / "adapter", loaded.model)
    assert judge.config.logprobs["reads"]["engine"] == "transformers"
    assert all(0 < judge.config.metrics[key] <= 1 for key in ("auroc", "auroc_even", "auroc_odd"))
    assert judge.train_problems and judge.config.threshold is not None

    model = LogprobModel(judge.head, TokenTexts(tokenizer, loaded.eos_ids, judge.head.config.buckets)).eval()
    verifier = Verifier(Decoder(loaded.model, loaded.eos_ids), judge, Segmenter(loaded.tokenizer))
    for draft in list(read_drafts(build / "build"))[:6]:
        batch = LogprobCollator()([LogprobExample.of(draft, 3)])
        with torch.inference_mode():
            logits = model(**{key: batch[key] for key in ("own", "top", "ids", "first", "cuts")})["logits"][0]
        verifier.decoder.seek(loaded.render(draft.row.prompt))
        found = verifier.verify(draft.row.draft_ids, draft.row.cuts)
        assert found.validity == pytest.approx(judge.config.validity(logits).tolist(), abs=1e-4)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.slow
def test_a_judge_of_whole_drafts_accepts_nothing_yet(build, tmp_path, capsys, both):
    shutil.copytree(build / "build", tmp_path / "build")
    for path in (tmp_path / "build" / "data").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["completions"] = ["".join(row["completions"])]
            row |= {key: row[key][-1:] for key in ("labels", "values", "confidence", "cuts") if key in row}
            row["labels"] = row["labels"] if both else [True]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([recipe(tmp_path, tmp_path / "out"), *OPTIONS]) == 0
    printed = capsys.readouterr().out
    assert "labels of whole drafts" in printed and "first-error F1" not in printed
    assert ("AUROC" in printed) == both
    target = load_language_model(build / "target", role="target", dtype="float32").model
    assert ValidityAdapter.from_pretrained(tmp_path / "out" / "adapter", target).config.threshold > 1


@pytest.mark.slow
def test_a_training_continues_another_adapters_head(build, tmp_path, capsys):
    assert main([recipe(build, tmp_path / "first"), *OPTIONS]) == 0
    first = tmp_path / "first" / "adapter"
    assert "cut_policy" not in capsys.readouterr().err
    other = recipe(build, tmp_path / "second", start_from=first, learning_rate=0.0, cut_policy="{kind: sentence}")
    assert main([other, *OPTIONS]) == 0
    assert "note: cut_policy is not that of the labels" in capsys.readouterr().err
    assert main([recipe(build, tmp_path / "third", start_from=first, seed=1), *OPTIONS]) == 0
    assert "note: start_from has learnt the problems of" in capsys.readouterr().out
    learnt = set((first / "train_problems.txt").read_text().split())
    config = parse_recipe(
        recipe(build, tmp_path / "held"), [*OPTIONS, "--seed", "1"], [LogprobTrainingConfig], "train"
    )[0]
    for known in ((), learnt):
        held_out = {prompt_hash(example.prompt) for example in load_datasets(config, 3, known)[1].examples}
        assert held_out and bool(held_out & learnt) == (not known)
    target = load_language_model(build / "target", role="target", dtype="float32").model
    one, two = (ValidityAdapter.from_pretrained(tmp_path / name / "adapter", target) for name in ("first", "second"))
    for name, weight in one.head.state_dict().items():
        assert torch.equal(weight, two.head.state_dict()[name]), name
    assert two.train_problems >= one.train_problems and two.config.provenance["start_from"] == str(first)
    capsys.readouterr()
    assert main([recipe(build, tmp_path / "wide", start_from=first, width=32), *OPTIONS]) == 2
    assert "has width 64, not 32: set width" in capsys.readouterr().err


def test_reads_are_complete_and_continue_where_they_stopped(build, tmp_path, monkeypatch):
    before = [draft.logprobs.own.tolist() for draft in read_drafts(build / "build")]
    assert len(before) == 48 and all(value < 0 for row in before for value in row)
    last = sorted((build / "build" / "logprobs").glob("*.parquet"))[-1]
    last.unlink()
    with pytest.raises(FileNotFoundError, match="run the same `parse-data build` with --logprobs 3 again"):
        list(read_drafts(build / "build"))
    writer = LocalWriter(load_language_model(build / "target", role="target", dtype="float32"), 5)
    writer.drafts_at_once, given, read = 2, [], writer.read

    def stopped(drafts, k):
        given.extend(drafts)
        if len(given) == 6:
            raise KeyboardInterrupt
        return read(drafts, k)

    monkeypatch.setattr(writer, "read", stopped)
    with pytest.raises(KeyboardInterrupt):
        add_logprobs(build / "build", lambda: writer, 3)
    assert not last.exists(), "what is half read is nobody's"
    add_logprobs(build / "build", lambda: writer, 3)
    assert [draft.logprobs.own.tolist() for draft in read_drafts(build / "build")] == before
    rows = sum(1 for _ in (build / "build" / "data" / f"{last.stem}.jsonl").open())
    assert rows > 6 and len(given) == rows + 2, "only the part that was stopped is read twice"
    assert sorted((build / "build" / "logprobs").iterdir()) == sorted((build / "build" / "logprobs").glob("[!.]*"))
    add_logprobs(build / "build", lambda: pytest.fail("nothing is missing"), 3)


def test_a_finished_build_is_read_without_its_task(build, make_model, tmp_path, capsys):
    folder = shutil.copytree(build / "build", tmp_path / "build")
    before = [draft.logprobs.own.tolist() for draft in read_drafts(folder)]
    shutil.rmtree(folder / "logprobs")
    facts = json.loads((folder / "build.json").read_text())
    facts |= {"format": 2, "config": facts["config"] | {"draft": "none", "task": "none", "dtype": "float32"}}
    (folder / "build.json").write_text(json.dumps(facts))
    assert parse_data(["read", str(folder), "--logprobs", "3"]) == 0, capsys.readouterr().err
    after = [draft.logprobs.own.tolist() for draft in read_drafts(folder)]
    assert after == before

    shutil.rmtree(folder / "logprobs")
    make_model("llama_gqa", seed=1).save_pretrained(tmp_path / "other")
    shutil.copy(build / "target" / "tokenizer.json", tmp_path / "other")
    shutil.copy(build / "target" / "tokenizer_config.json", tmp_path / "other")
    facts["config"]["target"] = str(tmp_path / "other")
    (folder / "build.json").write_text(json.dumps(facts))
    assert parse_data(["read", str(folder)]) == 2
    assert "was begun with other weights of the target model" in capsys.readouterr().err
    facts["config"]["adapter"] = "a"
    (folder / "build.json").write_text(json.dumps(facts))
    assert parse_data(["read", str(folder)]) == 2
    assert "has the unknown key adapter: another version" in capsys.readouterr().err
    assert parse_data(["read", str(tmp_path)]) == 2
    assert "has no build.json: name the output_dir" in capsys.readouterr().err


def test_drafts_are_read_alike_in_batches_and_alone(build):
    """On a GPU a batch is padded to its longest draft."""
    model = load_language_model(build / "target", role="target", dtype="float32")
    writer = LocalWriter(model, 5)
    drafts = [(model.render(draft.row.prompt), draft.row.draft_ids) for draft in read_drafts(build / "build")]
    assert len({len(draft) for _, draft in drafts}) > 1
    alone = writer.read(drafts, 3)
    writer.read_batch = 5
    for one, batched in zip(alone, writer.read(drafts, 3), strict=True):
        torch.testing.assert_close((one.own, one.top), (batched.own, batched.top), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start_from", "nowhere/at/all"], "There is no folder 'nowhere/at/all'"),
        (["--sharpness", "0.5"], "sharpness is 0.5; it must be from 1 to 50"),
        (["--sharpness", "nan"], "sharpness is nan; it must be from 1 to 50"),
        (["--k", "4"], "stores 3 first choices per token: lower k"),
        (["--width", "0"], "width is 0; it must be at least 1"),
        (["--min_wrong_drafts", "40"], "wrong drafts of 24 for training, fewer than min_wrong_drafts 40: build more"),
        (["--data", "nowhere"], "no labelled data at nowhere: there is no such folder"),
        (["--data", "data/validty"], "no labelled data at data/validty: there is no such folder"),
        (["--data", "."], ". has no log-probabilities: run `parse-data read .`"),
    ],
)
def test_mistakes_are_one_sentence(build, tmp_path, capsys, options, message):
    assert main([recipe(build, tmp_path / "out"), *OPTIONS, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_build_of_another_format_is_refused_before_it_is_read(build, tmp_path, capsys):
    (tmp_path / "build").mkdir()
    facts = json.loads((build / "build" / "build.json").read_text())
    (tmp_path / "build" / "build.json").write_text(json.dumps(facts | {"format": 1}))
    assert main([recipe(tmp_path, tmp_path / "out"), *OPTIONS]) == 2
    error = capsys.readouterr().err
    assert "has format 1, but this version of parse-engine reads 2: build again" in error and error.count("\n") == 1


def test_reads_of_another_engine_are_kept_apart(build, tmp_path):
    folder = shutil.copytree(build / "build", tmp_path / "build")
    sorted((folder / "logprobs").glob("*.parquet"))[-1].unlink()
    model = load_language_model(build / "target", role="target", dtype="bfloat16")
    with pytest.raises(ValueError, match="was read with dtype float32, not bfloat16"):
        add_logprobs(folder, lambda: LocalWriter(model, 5), 3)


@pytest.mark.slow
def test_labels_of_whole_drafts_teach_where_the_error_is(tokenizer):
    """Told only which drafts are right, a head finds the wrong token among harmless ones."""
    torch.manual_seed(0)
    batch = {"ids": torch.randint(1, 50, (256, 24)), "top": torch.tensor([-0.2, -2.5, -4.0]).repeat(256, 24, 1)}
    batch["first"] = batch["ids"].clone()
    batch["own"] = batch["top"][..., 0].clone()
    harmless = torch.rand(256, 24) < 0.2
    batch["first"][harmless] += 50
    batch["own"][harmless] = -2.5  # the second choice
    wrong, place = torch.rand(256) < 0.4, torch.randint(0, 24, (256,))
    batch["first"][wrong, place[wrong]] = batch["ids"][wrong, place[wrong]] + 50
    batch["own"][wrong, place[wrong]] = -6.0  # no choice at all
    model = LogprobModel(LogprobHead(LogprobHeadConfig(k=3, text_size=0)), TokenTexts(tokenizer, (), 8192))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole = torch.full((256, 1), 24)
    for _ in range(80):
        logits = model(**batch, cuts=whole)["logits"][:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, (~wrong).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        valid = model.eval()(**batch, cuts=torch.arange(1, 25).repeat(256, 1))["logits"] > 0
    assert valid[~wrong].all(1).float().mean() > 0.9
    first_rejected = valid[wrong].int().argmin(1)
    assert (first_rejected == place[wrong]).float().mean() > 0.9


def test_noise_moves_no_token_to_another_place(build):
    """The rank among the first choices stays that of an engine: no token has two log-probabilities."""
    batch = LogprobCollator()([LogprobExample.of(draft, 3) for draft in list(read_drafts(build / "build"))[:8]])
    model = LogprobModel(LogprobHead(LogprobHeadConfig(k=3)), TokenTexts(None, (), 8192), noise=0.06)
    is_choice = batch["ids"] == batch["first"]
    own, top = model._noisy(batch["own"], batch["top"], is_choice)
    assert (top[..., :-1] >= top[..., 1:]).all()
    assert torch.equal(own[is_choice], top[..., 0][is_choice])
    among = (batch["top"] == batch["own"][..., None]).any(-1) & ~is_choice
    assert ((top == own[..., None]).any(-1))[among].all()
    assert 0 < (own - batch["own"]).abs().max() < 0.2


def test_doubt_adds_up_in_training_and_verdicts_pool_it_by_the_sharpness(build):
    batch = LogprobCollator()([LogprobExample.of(draft, 3) for draft in list(read_drafts(build / "build"))[:8]])
    inputs = {key: batch[key] for key in ("own", "top", "ids", "first", "cuts")}
    texts = TokenTexts(load_tokenizer(build / "target"), (), 8192)
    model, known = LogprobModel(LogprobHead(LogprobHeadConfig(k=3, sharpness=8.0)), texts), batch["cuts"] > 0
    features = model.features(*(batch[key] for key in ("own", "top", "ids", "first")))
    odds = model.head(features, batch["ids"], batch["first"], texts)[0].double().exp()
    odds[batch["ids"] == batch["first"]] = 1e-30
    for training, power in ((True, 1), (False, 8)):
        pooled = (odds**power).cumsum(-1).clamp_min(1e-300).log() / power
        expected = model.head.bias - pooled.gather(-1, (batch["cuts"] - 1).clamp_min(0))
        found = model.train(training)(**inputs)["logits"]
        some = known & (expected < 20)  # a prefix of first choices alone has no doubt, as a number of its own
        assert some.any()
        torch.testing.assert_close(found[some].double(), expected[some], atol=1e-4, rtol=1e-4)


def test_only_the_targets_choices_are_shown_as_certain(build):
    batch = LogprobCollator()([LogprobExample.of(draft, 3) for draft in list(read_drafts(build / "build"))[:8]])
    texts = TokenTexts(load_tokenizer(build / "target"), (), 8192)
    model = LogprobModel(LogprobHead(LogprobHeadConfig(k=3)), texts, certain_share=1.0)
    torch.nn.init.normal_(model.head.out.weight)
    inputs = {key: batch[key] for key in ("own", "top", "ids", "first", "cuts")}
    for first, same in (
        (batch["ids"] + 1, True),
        (batch["ids"].where(torch.rand(batch["ids"].shape) > 0.5, 9), False),
    ):
        with torch.no_grad():
            trained = model.train()(**inputs | {"first": first})["logits"]
            served = model.eval()(**inputs | {"first": first})["logits"]
        assert torch.equal(trained, served) is same


def test_reads_of_another_size_are_kept_apart(build):
    with pytest.raises(ValueError, match="has log-probabilities with k 3, not 5"):
        add_logprobs(build / "build", lambda: pytest.fail("nothing is read"), 5)


@pytest.mark.slow
def test_further_builds_add_training_drafts(build, write_jsonl, build_rows, tmp_path, capsys):
    more = tmp_path / "more"
    shutil.copytree(build / "build", more)
    assert main([recipe(build, tmp_path / "out", more_data=f"[{more}]"), *OPTIONS]) == 0, capsys.readouterr().err
    both = json.loads((tmp_path / "out" / "adapter" / "validity_config.json").read_text())["provenance"]
    assert main([recipe(build, tmp_path / "alone"), *OPTIONS]) == 0
    alone = json.loads((tmp_path / "alone" / "adapter" / "validity_config.json").read_text())["provenance"]
    assert both["train_drafts"] == 2 * alone["train_drafts"]
    assert both["eval_drafts"] == alone["eval_drafts"], "the bound is one for drafts like those of data"

    facts = json.loads((more / "build.json").read_text())
    facts["config"]["target"] = "another"
    (more / "build.json").write_text(json.dumps(facts))
    assert main([recipe(build, tmp_path / "other", more_data=f"[{more}]"), *OPTIONS]) == 2
    assert "has labels of another target, another: leave it out of more_data" in capsys.readouterr().err
    assert main([recipe(build, tmp_path / "other", eval_data=more), *OPTIONS]) == 2
    assert "has labels of another target, another: leave it out" in capsys.readouterr().err
    facts["config"]["target"] = str(build / "target")
    facts["models"]["target"]["fingerprint"] = fingerprint_of([None] * 3)  # as a build over servers has it
    (more / "build.json").write_text(json.dumps(facts))
    assert main([recipe(build, tmp_path / "served", more_data=f"[{more}]"), *OPTIONS]) == 0


@pytest.mark.slow
def test_other_labels_do_not_continue_a_training(build, tmp_path, capsys):
    shutil.copytree(build / "build", tmp_path / "build")
    command = [recipe(tmp_path, tmp_path / "out"), *OPTIONS, "--save_steps", "2"]
    assert main(command) == 0
    assert main(command) == 0 and "is the end of the training" in capsys.readouterr().out
    for path in (tmp_path / "build" / "data").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"labels": [not x for x in row["labels"]]}) + "\n" for row in rows))
    assert main(command) == 2
    assert "holds checkpoints of a training with examples" in capsys.readouterr().err


def test_weights_in_bfloat16_score_in_float32(build, tokenizer):
    """As DeepSpeed keeps them in a training."""
    batch = LogprobCollator()([LogprobExample.of(draft, 3) for draft in list(read_drafts(build / "build"))[:4]])
    inputs = {key: batch[key] for key in ("own", "top", "ids", "first", "cuts")}
    model = LogprobModel(LogprobHead(LogprobHeadConfig(k=3)), TokenTexts(tokenizer, (), 8192)).eval()
    torch.nn.init.normal_(model.head.out.weight, std=0.1)
    model.bfloat16()
    rounded = model(**inputs)["logits"]
    rounded.sum().backward()
    assert rounded.dtype == torch.float32 and all(p.grad is not None for p in model.head.parameters())
    torch.testing.assert_close(model.float()(**inputs)["logits"], rounded, atol=1e-3, rtol=0)


def test_a_label_weighs_by_its_distance_from_chance(build):
    """Labels without a confidence count as certain."""
    draft = next(draft for draft in read_drafts(build / "build") if len(draft.row.labels) == 3)
    assert LogprobExample.of(draft, 3).weights == [1.0] * 3
    doubtful = replace(draft, row=replace(draft.row, confidence=[1.0, 0.95, 0.5]))
    assert LogprobExample.of(doubtful, 3).weights == pytest.approx([1.0, 0.9, 0.0])


def test_a_problem_weighs_as_much_as_another_and_an_error_what_it_costs(build, tmp_path):
    folder = shutil.copytree(build / "build", tmp_path / "build")
    for path in (folder / "data").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["target_value"] = 0.25
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [recipe(build, tmp_path / "out"), OPTIONS, [LogprobTrainingConfig], "train"]
    sums = {}
    for data in (build / "build", folder):
        config = parse_recipe(arguments[0], [*OPTIONS, "--data", str(data)], *arguments[2:])[0]
        for example in load_datasets(config, 3)[0].examples:
            for label, weight in zip(example.labels, example.weights, strict=True):
                key = data.name + str(data == folder), example.problem, label
                sums[key] = sums.get(key, 0.0) + weight / len(example.labels)
    plain = {key[1:]: value for key, value in sums.items() if key[0].endswith("False")}
    cheap = {key[1:]: value for key, value in sums.items() if key[0].endswith("True")}
    problems = {problem for problem, _ in plain}
    totals = [plain.get((problem, True), 0) + plain.get((problem, False), 0) for problem in problems]
    assert totals == pytest.approx([totals[0]] * len(totals))
    assert all(cheap[key] == pytest.approx(value * (1.0 if key[1] else 0.25)) for key, value in plain.items())
