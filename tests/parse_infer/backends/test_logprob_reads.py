"""A judge on log-probabilities over plain servers: the answers of the local engine, and what is refused."""

from __future__ import annotations

import pytest

from parse_infer.backends.servers.dialects.vllm import VLLM
from parse_infer.decoding.block_length import BlockLength
from parse_infer.settings.sampling import Sampling

PROMPT = "Tom has 5 apples."
N = 40


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("block_tokens", ["auto", 7, "whole"])
def test_answers_are_those_of_the_local_engine(make_engine, connect, threshold, block_tokens):
    engine = make_engine()
    coordinator, targets, _ = connect(engine)
    settings = {"max_new_tokens": N, "threshold": threshold, "block_tokens": block_tokens}
    expected = engine.generate(PROMPT, **settings, keep_greedy_match=True)
    found = coordinator.generate(PROMPT, **settings)
    assert found.token_ids == expected.token_ids
    assert found.fallback is None
    assert any(body.get("prompt_logprobs") == 3 for body in targets[0].bodies)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.slow
def test_low_confidence_ends_a_draft_in_token_ids(make_engine, connect, monkeypatch, cut):
    """Also where its server closes the connection inside it, and the rest comes with another request."""
    engine = make_engine()
    settings = {"max_new_tokens": 2 * N, "threshold": 0.3}
    expected = engine.generate(PROMPT, **settings)
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: survival < 0.5)
    drafted = []
    for block_tokens in (10_000, "auto"):
        coordinator, _, draft = connect(engine)
        draft.faults += ["cut"] * cut
        found = coordinator.generate(PROMPT, **settings, block_tokens=block_tokens)
        assert found.token_ids == expected.token_ids and found.fallback is None
        assert {body.get("logprobs") for body in draft.bodies} == {0 if block_tokens == "auto" else None}
        drafted.append(found.stats.draft_forwards)
    assert drafted[1] < 0.6 * drafted[0], drafted
    (length,) = coordinator.backend._lengths.values()
    assert length.costs is not None and length.costs.draft_s > 0


def test_a_rejected_token_is_corrected_without_a_request(make_engine, connect):
    engine = make_engine()
    coordinator, targets, _ = connect(engine)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    requests = [body for body in targets[0].bodies if not body.get("prompt_logprobs")]
    corrected = sum(span.source == "target" for span in found.spans)
    assert corrected > 2, found.spans
    assert not requests
    assert found.stats.target_forwards == len(targets[0].bodies)


@pytest.mark.slow
def test_a_corrected_token_does_not_end_an_answer_too_early(make_engine, connect):
    """A stop token takes the place of a rejected token, before the answer may end."""
    engine = make_engine()
    coordinator, _, _ = connect(engine)
    settings = {"max_new_tokens": N, "threshold": 0.3}
    free, place, corrected = engine.generate(PROMPT, **settings), 0, []
    for span in free.spans:
        if span.source == "target" and free.token_ids[place] not in free.token_ids[:place]:
            corrected.append(free.token_ids[place])
        place += span.n_tokens
    settings |= {"stop_token_ids": corrected, "min_tokens": N}
    found = coordinator.generate(PROMPT, **settings)
    assert corrected and len(found.token_ids) == N and not set(corrected) & set(found.token_ids)
    assert found.token_ids == engine.generate(PROMPT, **settings).token_ids


def test_a_corrected_token_of_a_sampled_answer_is_the_servers(make_engine, connect):
    coordinator, targets, _ = connect(make_engine())
    sampling = Sampling(0.8, seed=1)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3, resume_sampling=sampling)
    assert any(span.source == "target" for span in found.spans)
    assert any(body.get("stream") for body in targets[0].bodies)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("block_tokens", ["auto", "whole"])
def test_the_target_writes_the_strict_tokens(make_engine, connect, threshold, block_tokens):
    engine = make_engine()
    coordinator, _, _ = connect(engine)
    settings = {"max_new_tokens": N, "threshold": threshold, "strict_tokens": 9, "block_tokens": block_tokens}
    found = coordinator.generate(PROMPT, **settings)
    assert found.token_ids[:9] == engine.generate_target(PROMPT, max_new_tokens=9).token_ids
    assert found.token_ids == engine.generate(PROMPT, **settings).token_ids


def test_adaptive_learns_that_unusual_drafts_are_of_no_use(make_engine, connect):
    engine = make_engine()
    engine.backend.judge.config.logprobs["usual"] = {"8": [[9.0] * 7, [9.0] * 7]}
    coordinator, _, draft = connect(engine)
    for n in range(20):
        coordinator.generate(f"{PROMPT} {n}", max_new_tokens=N, threshold=0.1, adaptive=True)
    assert len(draft.bodies) < 20, "the target never answered without a draft"


@pytest.mark.parametrize("block_tokens", ["auto", 12, "whole"])
def test_an_unusual_draft_leaves_the_answer_to_the_target(make_engine, connect, block_tokens):
    engine = make_engine()
    engine.backend.judge.config.logprobs["usual"] = {"8": [[9.0] * 7, [9.0] * 7]}
    coordinator, _, draft = connect(engine)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.1, block_tokens=block_tokens)
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert found.fallback == "unusual_draft" and len(draft.bodies) == 1
    exact = coordinator.generate(PROMPT, max_new_tokens=N, mode="exact", block_tokens=block_tokens)
    assert exact.token_ids == found.token_ids and exact.fallback is None, "nothing is judged"
    score = coordinator.score(PROMPT, "There are 5 apples.\nSo 7 in all.")
    assert score.unusual and score.validity is None and score.first_error is None


def test_above_1_the_target_answers_alone(make_engine, connect):
    engine = make_engine()
    coordinator, targets, _ = connect(engine)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=2)
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert not any(body.get("prompt_logprobs") for body in targets[0].bodies)


def test_a_read_that_would_be_too_long_is_not_sent(make_engine, connect):
    engine = make_engine()
    limit = len(engine.target.render(PROMPT)) + 12
    coordinator, targets, _ = connect(engine, max_read_tokens=limit)
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.0)
    assert len(found.token_ids) > 12 or found.finish_reason == "stop"
    reads = [body["prompt"] for body in targets[0].bodies if body.get("prompt_logprobs")]
    assert reads and max(map(len, reads)) <= limit


@pytest.mark.parametrize("block_tokens", ["auto", 7, "whole"])
def test_mode_exact_writes_what_the_target_writes(make_engine, connect, block_tokens):
    engine = make_engine()
    coordinator, targets, _ = connect(engine)
    settings = {"max_new_tokens": N, "block_tokens": block_tokens, "keep_greedy_match": False}  # which mode overrides
    found = coordinator.generate(PROMPT, mode="exact", **settings)
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert found.stats.accepted_tokens > 5 and found.fallback is None
    reads = [body for body in targets[0].bodies if body.get("prompt_logprobs")]
    assert reads and (block_tokens == "whole" or len(reads) == len(targets[0].bodies))


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 20])
@pytest.mark.parametrize(("block_tokens", "model_runner"), [("auto", 1), (7, 1), (7, 2)])
@pytest.mark.slow
def test_a_server_may_read_its_prefix_cache(make_engine, connect, prompt, block_tokens, model_runner):
    """No entry of a cached token is used, not even where an equal request has filled the cache with the draft."""
    engine = make_engine()
    coordinator, targets, _ = connect(engine, cache_block=4, max_read_tokens=280)
    targets[0].model_runner = model_runner
    settings = {"max_new_tokens": N, "threshold": 0.1, "block_tokens": block_tokens}
    expected = engine.generate(prompt, **settings).token_ids
    found = [coordinator.generate(prompt, **settings) for _ in range(2)]
    assert [one.token_ids for one in found] == [expected] * 2 and not any(one.fallback for one in found)
    reads = [body for body in targets[0].bodies if "token_ids" in body]
    plain = [body["prompt"] for body in targets[0].bodies if body.get("prompt_logprobs")]
    assert len(reads) > 3 and max(targets[0].cached) >= len(engine.target.render(prompt)) - 4
    assert all(len(ids) <= 280 for ids in plain)
    salted = [body["cache_salt"] for body in reads if "cache_salt" in body]
    assert (plain and not salted) if prompt == PROMPT else (not plain and salted)


@pytest.mark.parametrize(
    ("fault", "model_runner"),
    [
        *(("zeros", 1), ("null", 2), ("nothing", 1), ("shifted", 2), ("noise", 1), ("boundary", 2), ("boundary", 1)),
        *(("understated", 2), ("500", 1), ("refused", 2)),
    ],
)
@pytest.mark.slow
def test_cached_reads_that_differ_from_uncached_ones_are_not_used(make_engine, connect, fault, model_runner, caplog):
    engine = make_engine()
    coordinator, (target,), _ = connect(engine, cache_block=4)
    server = coordinator.backend._target.servers.members[0]
    assert server.reads_cache and not caplog.records
    target.cache_fault, target.model_runner = fault, model_runner
    coordinator.backend.run(coordinator.backend.handshake())
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"the target server {target.url} is read without its prefix cache: it")
    assert not server.reads_cache
    target.bodies.clear()
    settings = {"max_new_tokens": N, "threshold": 0.3}
    found = coordinator.generate(PROMPT, **settings)
    assert found.token_ids == engine.generate(PROMPT, **settings).token_ids and found.fallback is None
    assert not any("token_ids" in body for body in target.bodies)


@pytest.mark.slow
def test_a_cached_read_that_is_refused_at_random_does_no_harm(make_engine, connect, caplog):
    engine = make_engine()
    coordinator, (target,), _ = connect(engine, cache_block=4)
    target.cache_fault = "no JSON"
    coordinator.backend.run(coordinator.backend.handshake())
    assert coordinator.backend._target.servers.members[0].reads_cache and not caplog.records
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    assert found.token_ids == engine.generate(PROMPT, max_new_tokens=N, threshold=0.3).token_ids
    assert found.fallback is None


@pytest.mark.parametrize("fault", ["null", "nothing"])
@pytest.mark.slow
def test_cached_reads_that_stop_working_cost_one_read(make_engine, connect, fault, caplog):
    engine = make_engine()
    coordinator, (target,), _ = connect(engine, cache_block=4)
    target.cache_fault = fault
    settings = {"max_new_tokens": N, "threshold": 0.3}
    for _ in range(2):
        found = coordinator.generate(PROMPT, **settings)
        assert found.token_ids == engine.generate(PROMPT, **settings).token_ids and found.fallback is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert "is read without its prefix cache" in said
    assert sum("token_ids" in body for body in target.bodies) == 2, "the first fills the cache"


def test_cached_reads_are_compared_after_the_end_of_a_block(make_engine, connect):
    """Where a draft's first token is the first that the server computes, and with a context that no cache holds."""
    coordinator, (target,), _ = connect(make_engine(), cache_block=128)
    contexts = []
    for _ in range(2):
        target.bodies.clear()
        target.cached.clear()
        coordinator.backend.run(coordinator.backend.handshake())
        reads = [body["token_ids"] for body in target.bodies if "token_ids" in body]
        assert target.cached == [0, 256, 256, 256] and len(reads[0]) == 257
        assert reads[2][:257] == reads[0] and len(reads[2]) > 257
        contexts.append(reads[0])
    assert contexts[0] != contexts[1]


@pytest.mark.parametrize("fault", ["500", "half", "nonsense"])
def test_where_the_judge_fails_the_target_answers(make_engine, connect, fault):
    engine = make_engine()
    coordinator, targets, _ = connect(engine, patience_s=0.2)
    targets[0].judge_fault = fault
    found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=0.3)
    assert found.fallback == "judge_failed"
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids


@pytest.mark.parametrize("transferred", [False, True])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "has no prompt_logprobs"),
        ("shifted", "do not belong to the tokens"),
        ("raw", "are no log-probabilities"),
        ("few", "log-probabilities per token"),
    ],
)
def test_a_server_that_cannot_supply_them_is_refused(make_engine, connect, fault, message, transferred):
    engine = make_engine()
    if transferred:  # such a judge knows no log-probabilities of its target
        engine.backend.judge.config.logprobs["reference"]["logprobs"] = []
    coordinator, targets, _ = connect(engine)
    targets[0].logprob_fault = fault
    with pytest.raises(ValueError, match=message) as error:
        coordinator.backend.run(coordinator.backend.handshake())
    assert targets[0].url in str(error.value)


def test_another_model_under_the_same_name_is_refused(make_engine, connect):
    engine = make_engine()
    coordinator, _, _ = connect(engine)
    known = engine.backend.judge.config.logprobs["reference"]
    known["logprobs"] = [value + 0.4 for value in known["logprobs"]]  # as much as quantisation may change
    coordinator.backend.run(coordinator.backend.handshake())
    known["logprobs"] = [value + 0.4 for value in known["logprobs"]]
    with pytest.raises(ValueError, match="runs another model than the adapter's target"):
        coordinator.backend.run(coordinator.backend.handshake())


def test_scores_of_a_text_are_the_local_engines(make_engine, connect):
    engine = make_engine()
    coordinator, _, _ = connect(engine)
    text = "There are 5 apples.\nSo 7 in all."
    local, served = (one.score(PROMPT, text) for one in (engine, coordinator))
    assert [segment.validity for segment in served.segments] == pytest.approx(
        [s.validity for s in local.segments], abs=1e-4
    )


def test_a_text_too_long_for_one_read_is_refused(make_engine, connect):
    coordinator, _, _ = connect(make_engine(), max_read_tokens=20)
    with pytest.raises(ValueError, match="one read of log-probabilities has at most 20: shorten the response"):
        coordinator.score(PROMPT, "There are 5 apples. So 7 in all.")


def test_of_equal_choices_the_lowest_id_comes_first():
    """As greedy decoding takes it."""
    entry = {"9": {"logprob": -1.0}, "3": {"logprob": -1.0}, "4": {"logprob": -2.0}}
    read = VLLM().parse({"choices": [{"prompt_logprobs": [None, entry]}]}, [9], 2)
    assert read.top_ids.tolist() == [[3, 9]]


def test_entries_belong_to_the_last_tokens():
    entry = {str(id): {"logprob": -id} for id in range(1, 5)}
    read = VLLM().parse({"choices": [{"prompt_logprobs": [None, {}, entry, entry]}]}, [4, 1], 2)
    assert read.own.tolist() == [-4.0, -1.0]
    assert read.top_ids.tolist() == [[1, 2], [1, 2]]
