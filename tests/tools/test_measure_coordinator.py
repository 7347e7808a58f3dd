"""The servers of `tools.measure_coordinator` answer as a coordinator expects."""

from __future__ import annotations

import multiprocessing

import pytest

from parse_infer.engine import ParseEngine
from parse_infer.models.loading import load_served_model
from tools.measure_coordinator import PROMPT, TEXT, WRONG_EVERY, p99, run_servers


@pytest.mark.slow
def test_a_coordinator_drafts_and_reads_over_paced_servers():
    ids = load_served_model("zoo:target").tokenizer.encode(TEXT, add_special_tokens=False)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    servers = multiprocessing.get_context("spawn").Process(target=run_servers, args=(ids, theirs), daemon=True)
    servers.start()
    try:
        urls = {"target_url": ours.recv(), "draft_url": ours.recv()}
        with ParseEngine.from_pretrained("zoo:target", "zoo:draft", judge="min_p", backend="vllm", **urls) as engine:
            answer = engine.generate(PROMPT, max_new_tokens=64, ignore_eos=True, adaptive=False)
            assert engine.backend.servers["target"].members[0].reads_cache
    finally:
        servers.terminate()
    own = 64 // WRONG_EVERY + engine.strict_tokens  # the target's
    assert answer.fallback is None and answer.stats.accepted_tokens >= 64 - own - 1
    begin = ids.index(answer.token_ids[0])
    assert answer.token_ids == [ids[(begin + n) % len(ids)] for n in range(64)]


def test_the_99th_percentile_is_a_bound_of_what_was_counted_since():
    before, after = {0.01: 90.0, 0.05: 90.0, 1.0: 100.0}, {0.01: 180.0, 0.05: 190.0, 1.0: 200.0}
    assert p99(before, after) == 0.05 and p99({}, after) == 1.0
