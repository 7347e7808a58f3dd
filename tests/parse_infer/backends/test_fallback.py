"""Without a draft or a judge the target answers alone, at once, and says so; without a target there is an error."""

from __future__ import annotations

import copy
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parse_infer.backends.pool.retries import Unavailable
from parse_infer.backends.servers import pair as server_pair
from parse_infer.calibration.replay import Replay
from parse_infer.engine import ParseEngine
from parse_infer.models.batch_decoder import BatchDecoder
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.prompts import Verbatim
from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.backends.test_answers_over_servers import PROMPT, partial_threshold
from tests.parse_infer.backends.text_server import TextServer
from tests.parse_infer.serve.conftest import running

SETTINGS = {"max_new_tokens": 24, "threshold": 0.0}
LONG_S = 60.0  # how long requests would wait for a server; no test waits so long


def alone(engine) -> list[int]:
    return engine.generate_target(PROMPT, max_new_tokens=24).token_ids


def warnings(caplog) -> list[str]:
    records = [r for r in caplog.records if r.name == "parse_infer.backends" and r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("block_tokens", ["whole", 12])
@pytest.mark.parametrize("streamed", [True, False])
def test_without_a_draft_server_the_target_answers_alone_at_once(engine, connect, caplog, block_tokens, streamed):
    coordinator, _, draft = connect(engine, patience_s=LONG_S)
    draft.offline = True
    begun = time.monotonic()
    if streamed:
        *_, done = coordinator.stream(PROMPT, **SETTINGS, block_tokens=block_tokens)
        found = done.generation
    else:
        found = coordinator.generate(PROMPT, **SETTINGS, block_tokens=block_tokens)
    assert time.monotonic() - begun < LONG_S / 2
    assert found.token_ids == alone(engine) and found.fallback == "no_draft"
    failed, said = warnings(caplog)[:2]
    assert failed.startswith(f"the draft server {draft.url} is out for 1 s after failed requests: ")
    assert said.startswith("the target answers without a draft (no_draft): the draft servers failed 1 times: ")
    assert soon(coordinator, lambda: not coordinator.backend._drafts[0].members[0].healthy)
    draft.offline = False
    assert soon(coordinator, lambda: coordinator.backend._drafts[0].members[0].healthy)
    found = coordinator.generate(PROMPT, **SETTINGS, block_tokens=block_tokens)
    assert found.fallback is None and found.stats.accepted_tokens == 24


def test_the_target_answers_alone_when_the_draft_is_refused(engine, connect, caplog):
    coordinator, _, draft = connect(engine)
    draft.faults.append("refused")
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == alone(engine) and found.fallback == "draft_refused"
    assert warnings(caplog) == ["the target answers without a draft (draft_refused): a request was rejected (400)"]
    assert coordinator.generate(PROMPT, **SETTINGS).fallback is None


@pytest.mark.parametrize("server_type", [FakeServer, TextServer])
def test_a_prompt_that_the_draft_models_template_refuses_is_answered_without_it(engine, connect, caplog, server_type):
    engine.draft.tokenizer = copy.deepcopy(engine.draft.tokenizer)
    engine.draft.tokenizer.chat_template = "{{ raise_exception('no system messages here') }}"
    coordinator, _, draft = connect(engine, draft=server_type(engine.draft))
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == alone(engine) and found.fallback == "draft_refused" and not draft.bodies
    (said,) = warnings(caplog)
    assert said == "the target answers without a draft (draft_refused): the draft model refuses the prompt"
    with running(LoopRunner(coordinator), engine) as served:
        answer = served.chat(PROMPT, max_tokens=24, parse={"threshold": 0.0})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["parse"]["fallback"] == "draft_refused"
    coordinator.backend.falls_back = False
    with pytest.raises(ValueError, match="no system messages here"):
        coordinator.generate(PROMPT, **SETTINGS)


def test_the_target_answers_alone_when_the_draft_server_is_silent(engine, connect, monkeypatch, caplog):
    """Its health is good, and its engine stuck."""
    monkeypatch.setattr(server_pair, "DRAFT_SILENCE_S", 0.2)
    coordinator, _, draft = connect(engine)
    draft.faults.append("hangs")
    begun = time.monotonic()
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert time.monotonic() - begun < LONG_S / 2
    assert found.token_ids == alone(engine) and found.fallback == "no_draft"
    assert warnings(caplog)[-1].endswith(f": the draft servers failed 1 times: {draft.url} sent nothing for 0.2 s")


def test_the_target_answers_alone_when_the_in_process_draft_fails(engine, connect, monkeypatch, caplog):
    coordinator, _, _ = connect(engine, local_rows=2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(BatchDecoder, "prefill", fail)
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == alone(engine) and found.fallback == "no_draft"
    assert "the draft model failed: no memory" in warnings(caplog)[0]


@pytest.mark.parametrize("block_tokens", ["whole", 12])
@pytest.mark.parametrize("how", ["refused", "nonsense", "missing", "raw"])
def test_a_draft_that_cannot_be_judged_is_dropped(engine, connect, caplog, block_tokens, how):
    coordinator, (target,), draft = connect(engine)
    if how in ("missing", "raw"):
        target.logprob_fault = how
    else:
        target.judge_fault = how
    found = coordinator.generate(PROMPT, **SETTINGS, block_tokens=block_tokens)
    assert found.token_ids == alone(engine) and found.fallback == "judge_failed"
    assert [span.source for span in found.spans] == ["target"]
    assert len(draft.bodies) == 1, "no other draft is written for this answer"
    (said,) = warnings(caplog)
    assert said.startswith("the target answers without a draft (judge_failed): ")


def test_tokens_accepted_before_a_failure_stay(engine, connect):
    coordinator, _, draft = connect(engine)
    threshold = partial_threshold(engine)
    settings = {"max_new_tokens": 60, "threshold": threshold, "block_tokens": 12}
    draft.faults.extend([None, "refused"])
    found = coordinator.generate(PROMPT, **settings)
    assert found.fallback == "draft_refused" and found.stats.accepted_tokens and found.stats.rounds == 2
    assert found.spans[0].source == "draft" and found.spans[-1].source == "target"
    context = engine.target.render(PROMPT)
    ids = found.token_ids
    kept = found.stats.accepted_tokens
    before = Verbatim.of_tokens(context + ids[:kept], engine.target.tokenizer)
    assert ids[kept:] == engine.generate_target(before, max_new_tokens=60 - kept).token_ids


def test_where_drafts_are_measured_a_failure_is_an_error(engine, connect):
    """A benchmark or a calibration must not take the target's own answers for answers with drafts."""
    coordinator, _, draft = connect(engine, patience_s=0.1)
    draft.offline = True
    with Replay(coordinator) as replay, pytest.raises(Unavailable, match="no draft server answers"):
        replay.answer(PROMPT, GenerationSettings(24, 0.0))
    coordinator.backend.falls_back = False
    with pytest.raises(Unavailable, match="no draft server answers"):
        coordinator.generate(PROMPT, **SETTINGS)


def test_the_controller_ignores_failures(engine, connect, monkeypatch):
    coordinator, _, draft = connect(engine)
    notes: list[object] = []
    monkeypatch.setattr(coordinator.controller, "note", lambda *_, **__: notes.append(_))
    for fault in ("refused", "refused"):
        draft.faults.append(fault)
        assert coordinator.generate(PROMPT, **SETTINGS, adaptive=True).fallback
    assert not notes


def test_without_a_target_there_is_an_error_and_not_for_lack_of_a_judge(engine, connect):
    coordinator, (target,), _ = connect(engine, patience_s=0.1)
    target.offline = True
    with pytest.raises(Unavailable, match="no target server answers"):
        coordinator.generate(PROMPT, **SETTINGS)


def test_over_http_a_failed_draft_is_counted_and_reported(engine, connect, capfd):
    coordinator, _, draft = connect(engine, patience_s=LONG_S)
    with running(LoopRunner(coordinator), engine) as served:
        draft.offline = True
        answer = served.chat(PROMPT, max_tokens=24, parse={"threshold": 0.0})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["parse"]["fallback"] == "no_draft"
        assert 'parse_fallbacks_total{reason="no_draft"} 1.0' in served.metrics
        end = time.monotonic() + 10
        while "parse_draft_servers_healthy 0.0" not in served.metrics:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert "the target answers without a draft (no_draft)" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
def test_over_http_an_offline_target_is_503_at_once(engine, connect, stream):
    coordinator: ParseEngine
    coordinator, (target,), _ = connect(engine, patience_s=LONG_S)
    with running(LoopRunner(coordinator), engine) as served:
        target.offline = True
        begun = time.monotonic()
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda _: served.chat(PROMPT, max_tokens=8, stream=stream), range(4)))
        assert time.monotonic() - begun < LONG_S / 2
        if stream:  # which had begun with the (empty) draft
            assert all('"code":"target_unavailable"' in a.text and "[DONE]" not in a.text for a in answers)
        else:
            assert [answer.status_code for answer in answers] == [503] * 4
            assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers)
            assert answers[0].json()["error"]["code"] == "target_unavailable"
        assert not any("127.0.0.1" in answer.text for answer in answers), "where servers are is no client's business"
        assert served.becomes_idle(5)
        target.offline = False
        assert soon_well(served, coordinator)
        assert served.chat(PROMPT, max_tokens=8).status_code == 200


@pytest.mark.slow
def test_over_http_a_target_that_fails_each_time_is_503(engine, connect):
    coordinator, (target,), _ = connect(engine)
    with running(LoopRunner(coordinator), engine) as served:
        target.faults.extend(["500"] * 4)
        failed = served.chat(PROMPT, max_tokens=8, parse={"mode": "target"})
        assert failed.status_code == 503 and int(failed.headers["Retry-After"]) >= 1
        assert served.chat(PROMPT, max_tokens=8).status_code == 200


def soon_well(served, coordinator: ParseEngine) -> bool:
    """Whether the server's own event loop notices that the target is back."""
    end = time.monotonic() + 10
    while not coordinator.backend._target.servers.members[0].healthy:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
