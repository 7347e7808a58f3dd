"""A judge on log-probabilities over a stock server of vLLM: the local engine's answers, without the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from parse_infer.engine import ParseEngine
from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig, describe_target
from parse_infer.judge.cuts import CutPolicy
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
from parse_infer.models.loading import load_language_model

pytestmark = pytest.mark.vllm
PROMPTS = [
    f"A boy has {3 + n} pencils. His brother has {n % 7 + 2} more pencils. How many do they have together?"
    for n in range(12)
]
EAGER = {"enforce_eager": True, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An untrained judge: the gap to the target's first choice."""
    target = load_language_model("zoo:target", role="target", dtype="float32")
    known = target.render(PROMPTS[0])
    with torch.inference_mode():
        scores = target.model(torch.tensor([known])).logits[0].log_softmax(-1)
    own = [scores[i, token].item() for i, token in enumerate(known[1:])]
    head = LogprobHead(LogprobHeadConfig())
    config = ValidityConfig(
        probe_ids=(),
        probe_text="",
        target=describe_target(target.model) | {"name": "zoo:target"},
        logprobs={"head": asdict(head.config), "reads": {"k": 5}, "reference": {"ids": known, "logprobs": own}},
        cut_policy=CutPolicy().to_dict(),
        threshold=0.5,
    )
    return ValidityAdapter(config, head).save_pretrained(tmp_path_factory.mktemp("judge") / "adapter")


@pytest.fixture(scope="module")
def coordinator(adapter) -> Iterator[ParseEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with ParseEngine.from_pretrained(
            "zoo:target", "zoo:draft", adapter, backend="vllm", target_options=EAGER
        ) as made:
            made.adaptive = False  # so that every answer has a draft
            yield made


@pytest.mark.parametrize("block_tokens", ["auto", 16, "whole"])
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_answers_are_those_of_the_local_engine(coordinator, adapter, block_tokens, threshold):
    local = ParseEngine.from_pretrained("zoo:target", "zoo:draft", adapter, target_drafter=None)
    settings = {"max_new_tokens": 150, "threshold": threshold, "block_tokens": block_tokens}
    found, wanted = (engine.generate(PROMPTS, **settings) for engine in (coordinator, local))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert not any(one.fallback for one in found)
    assert sum(one.stats.accepted_tokens for one in found) > 20


def test_answers_do_not_depend_on_the_load(coordinator):
    """One at a time and all at once."""
    settings = {"max_new_tokens": 150, "threshold": 0.5}
    together = coordinator.generate(PROMPTS, **settings)
    assert [one.token_ids for one in together] == [
        coordinator.generate(prompt, **settings).token_ids for prompt in PROMPTS
    ]


def test_reads_use_the_prefix_cache(coordinator):
    (server,) = coordinator.backend.servers["target"].members
    assert server.reads_cache


def test_a_corrected_token_needs_no_request_of_its_own(coordinator):
    found = coordinator.generate(PROMPTS[0], max_new_tokens=150, threshold=0.5)
    assert any(span.source == "target" for span in found.spans)
    assert found.stats.target_forwards == found.stats.verification_passes
