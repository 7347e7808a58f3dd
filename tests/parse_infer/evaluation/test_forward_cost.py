"""`parse-infer cost`: every kind of forward is timed, at any shape."""

from __future__ import annotations

import pytest
import torch

from parse_infer.cli.app import main
from parse_infer.evaluation.forward_cost import (
    CHAIN,
    DRAFT_STEP,
    PACKED,
    PREFILL,
    STEP,
    cost_report,
    random_model,
    steps,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair():
    return [random_model(shape, CPU, torch.float32) for shape in ("zoo:target", "zoo:draft")]


@pytest.mark.slow
def test_a_timed_step_is_one_forward_of_the_model_or_one_proposal(pair):
    target, draft = pair
    with torch.inference_mode():
        for step in steps(target, draft, 20, 16):
            for _ in range(2):  # the second time from a full cache, as when timed
                step.prepare()
                before = target.decoder.forwards + draft.decoder.forwards
                step.run()
                used = target.decoder.forwards + draft.decoder.forwards - before
            assert used == (
                0 if "," in step.name and step.name.split(",")[0] in ("eagle3", "parallel", "medusa") else 1
            )


def test_what_a_drafter_must_bring_is_what_it_costs():
    seconds = {STEP: [2.0, 2.0], CHAIN: [3.0] * 2, PACKED: [6.0] * 2, PREFILL: [5.0] * 2}
    seconds |= {DRAFT_STEP: [0.25] * 2, "eagle3, chain": [1.0] * 2}
    table, summary = cost_report(seconds, drafted=100)
    assert list(table.columns[-1].cells) == ["", "", "", "", "2.12", "2.00"]  # (5 x 0.25 + 3) / 2, (1 + 3) / 2
    assert list(table.columns[3].cells) == ["1.00", "1.50", "3.00", "2.50", "0.12", "0.50"]
    assert "6.67 times as fast" in summary and "6.45 times under" in summary  # 200 / (25 + 5), 200 / (25 + 6)


@pytest.mark.slow
def test_the_command_prints_a_table(capsys):
    assert (
        main(
            [
                "cost",
                "--target",
                "zoo:target",
                "--draft",
                "zoo:draft",
                "--context",
                "20",
                "--draft-tokens",
                "16",
                "--rounds",
                "1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for name in (STEP, DRAFT_STEP, PACKED, "eagle3, tree", "parallel, chain", "medusa, tree"):
        assert name in out, out


def test_weights_beyond_the_memory_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("parse_infer.evaluation.forward_cost.free_memory", lambda: 2**20)
    assert main(["cost", "--target", "zoo:target", "--draft", "zoo:draft", "--device", "cpu"]) == 2
    assert "GiB of weights in float32, but only 0.0 GiB are free on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 600 --draft-tokens 16", "600 context tokens and 16 draft tokens exceed the context windows"),
        ("--dtype int8", "unknown dtype 'int8'"),
        ("--torch-compile --device cpu", "--torch-compile is for decoding on a GPU, not on cpu"),
        ("--target zoo:targe", "did you mean 'zoo:target'"),
        ("--rounds 0", "rounds"),
    ],
)
def test_a_wrong_choice_is_one_sentence(arguments, message, capsys):
    assert main(["cost", "--target", "zoo:target", "--draft", "zoo:draft", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
