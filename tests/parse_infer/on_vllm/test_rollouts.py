"""Rows written by a vLLM server are those of the local decoder."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.served.writer import ServedWriter
from parse_infer.backends.launch.vllm_process import launch, plain_options
from parse_infer.models.batch_decoder import BatchDecoder, BatchRow
from parse_infer.models.loading import load_language_model, load_served_model
from parse_infer.settings.sampling import Sampling

pytestmark = pytest.mark.vllm
OPTIONS = {"enforce_eager": True, "max_num_seqs": 16}
QUESTIONS = [f"Tom has {n} apples and buys {2 * n} more. How many apples does he have?" for n in range(3, 9)]


def test_rows_from_a_server():
    servers = launch({"draft": plain_options("zoo:draft") | OPTIONS})
    try:
        _rows_are_those_of_the_local_decoder(servers.urls("draft"))
    finally:
        servers.stop()


def _rows_are_those_of_the_local_decoder(urls: list[str]) -> None:
    lm, language = load_language_model("zoo:draft", role="draft"), load_served_model("zoo:draft")
    local = BatchDecoder(lm.model, lm.eos_ids)
    config = BuildConfig("data", "zoo:draft", "zoo:draft", task="jsonl", backend="openai", target_url=urls)
    config.served_target, config.concurrency = "draft", 8
    prompts = [language.render(question) for question in QUESTIONS]
    writer = ServedWriter(config, "target")
    assert writer.servers.check(prompts[0]) == language.window
    served = writer.decoder(language.eos_ids)

    async def written(contexts, rows):
        try:
            return await served.write(contexts, rows)
        finally:
            await writer.close()

    def decode(contexts, rows):
        return asyncio.run(written(contexts, rows))

    def both(rows, suffixes):
        contexts = [d.extend(d.prefill(prompts), range(len(prompts)), suffixes) for d in (served, local)]
        return decode(contexts[0], rows), local.decode(contexts[1], rows)

    whole, expected = both([BatchRow(i, len(ids), 120) for i, ids in enumerate(prompts)], [[]] * len(prompts))
    assert whole == expected
    assert sum(ids[-1] in language.eos_ids for ids in whole) >= len(prompts) // 2

    random = Random(0)
    rows = []
    for i, ids in enumerate(prompts):
        ends = [random.randrange(1, len(whole[i])) for _ in range(3)]
        rows += [BatchRow(i, len(ids) + end, 60, Sampling(seed=i)) for end in ends]
    found, expected = both(rows, whole)
    assert found == expected

    sampled = [BatchRow(i, len(ids), 60, Sampling(0.8, seed=i)) for i, ids in enumerate(prompts)]
    contexts = served.prefill(prompts)
    once = decode(contexts, sampled)
    assert once == decode(contexts, sampled[::-1])[::-1]
    assert once != decode(contexts, [BatchRow(i, len(ids), 60) for i, ids in enumerate(prompts)])
