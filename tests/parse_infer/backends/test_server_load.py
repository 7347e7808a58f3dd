"""The load that the controller learns by: requests of ours and of other clients on each server of the target."""

from __future__ import annotations

import time

import pytest

from parse_infer.backends.pool import server_load
from parse_infer.backends.pool.server_load import sum_of
from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.backends.fake_sglang import FakeSGLang
from tests.parse_infer.backends.test_answers_over_servers import PROMPT

VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="target"} 5.0
vllm:num_requests_running{engine="1",model_name="target"} 1e+00
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="target"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:request_success_total{engine="0"} 900.0
"""
SGLANG_METRICS = """\
sglang:num_running_reqs{engine_type="unified",model_name="target"} 6.0
sglang:num_queue_reqs{engine_type="unified",model_name="target"} 2.0
"""


@pytest.fixture
def measured_often(monkeypatch):
    monkeypatch.setattr(server_load, "EVERY_S", 0.0)


@pytest.mark.parametrize(("server_type", "metrics"), [(FakeServer, VLLM_METRICS), (FakeSGLang, SGLANG_METRICS)])
def test_requests_of_other_clients_count(engine, connect, measured_often, server_type, metrics):
    coordinator, (target,), _ = connect(engine, server_type=server_type)
    target.metrics = metrics
    assert soon(coordinator, lambda: coordinator.backend.load(1) == 9)
    (server,) = coordinator.backend._target.servers.members
    server.requests = 3  # of the 8 requests there are ours
    assert soon(coordinator, lambda: coordinator.backend.load(3) == 3 + 5)
    target.metrics = None
    assert soon(coordinator, lambda: coordinator.backend.load(3) == 3)


def test_the_load_of_a_server_is_its_share(engine, connect, measured_often):
    coordinator, targets, _ = connect(engine, n_targets=2)
    targets[0].metrics = VLLM_METRICS
    assert soon(coordinator, lambda: coordinator.backend.load(4) == (4 + 8) // 2)
    coordinator.backend._target.servers.members[0].healthy = False
    assert soon(coordinator, lambda: coordinator.backend.load(4) == 4)


def test_a_server_without_metrics_is_seldom_asked(engine, connect, measured_often):
    coordinator, (target,), _ = connect(engine)
    (server,) = coordinator.backend._target.servers.members
    load = coordinator.backend._target.servers._load
    assert soon(coordinator, lambda: coordinator.backend.load(2) == 2 and server in load._due)
    assert load._due[server] > time.monotonic() + server_load.RETRY_EVERY_S / 2
    asked = len(target.clients)
    coordinator.generate_target([PROMPT] * 3, max_new_tokens=4, adaptive=True)
    assert len(target.clients) == asked + 3


def test_answers_are_learnt_at_the_load_of_the_server(engine, connect, measured_often):
    coordinator, (target,), _ = connect(engine)
    target.metrics = VLLM_METRICS
    assert soon(coordinator, lambda: coordinator.backend.load(1) == 9)
    for _ in range(8):
        coordinator.generate(PROMPT, max_new_tokens=8, threshold=0.0, adaptive=True)
    paces = [coordinator.controller.pace(drafted, 9) for drafted in (False, True)]
    assert all(paces) and not coordinator.controller.pace(False, 1) + coordinator.controller.pace(True, 1)


def test_gauges_are_summed_over_labels():
    assert sum_of(VLLM_METRICS, ("vllm:num_requests_running", "vllm:num_requests_waiting")) == 8
    assert sum_of("a 1\nab 5\nb_a 7\n", ("a",)) == 1
    assert sum_of("a NaN\n", ("a",)) is None and sum_of("", ("a",)) is None and sum_of("a 1\n", ()) is None
