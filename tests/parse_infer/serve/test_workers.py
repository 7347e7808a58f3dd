"""Worker processes of one server: they share a port and their metrics, are started again, and end together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from parse_infer.cli.app import main
from parse_infer.models.loading import load_language_model
from parse_infer.serve.server import ApiServer
from tests.parse_infer.backends.fake_server import FakeServer, serving

PROMPT = [{"role": "user", "content": "A boy has 6 stickers. His brother has 3 fewer. How many do they have?"}]


@contextmanager
def workers(function: str, n: int = 2) -> Iterator[subprocess.Popen[str]]:
    script = f"""
from parse_infer.serve.server import listen
from parse_infer.serve.workers import Workers
from tests.parse_infer.serve.small_workers import {function}
listening = listen("127.0.0.1", 0)
Workers({n}, {function}, listening, 5.0).run(lambda name: print(name, listening.getsockname()[1], flush=True))
"""
    with started([sys.executable, "-c", script]) as process:
        yield process


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pid_of_answer(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        return int(client.recv(20))


def children(pid: int) -> set[int]:
    """The workers; another child is Python's resource tracker."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {each for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()}


def soon(what: Callable[[], object], seconds: float = 60) -> bool:
    """Whether `what` becomes true within a time, here a minute."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def ends(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return soon(lambda: ") Z" in Path(f"/proc/{pid}/stat").read_text())
    return True


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again():
    with workers("answer_pid") as process:
        _, port = process.stdout.readline().split()
        first = children(process.pid)
        assert len(first) == 2 and pid_of_answer(int(port)) in first
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        assert all(map(ends, first))
        assert pid_of_answer(int(port)) not in first, "the port stays open meanwhile"
        assert soon(lambda: len(children(process.pid)) == 2)
        second = children(process.pid)
        assert not first & second
        process.terminate()
        assert process.wait(60) == 0 and all(map(ends, second))
        assert "has ended (-9); starting another" in process.stderr.read()


@pytest.mark.slow
def test_workers_end_with_their_parent():
    with workers("answer_pid") as process:
        process.stdout.readline()
        own = children(process.pid)
        process.kill()
        assert len(own) == 2 and all(map(ends, own))


@pytest.mark.slow
def test_an_error_at_the_start_is_raised_once():
    with workers("fail") as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and not out
    assert errors.count("no server of the target answers") == 1 and "parse_infer.errors.ParseError" in errors


def total(text: str, name: str, **labels: str) -> float:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


@pytest.mark.slow
def test_workers_answer_on_one_port_and_count_together():
    models = [load_language_model(f"zoo:{role}", role=role) for role in ("target", "draft")]
    with serving(FakeServer(models[0])) as target, serving(FakeServer(models[1])) as draft:
        addresses = ["--backend", "vllm", "--target-url", target.url, "--draft-url", draft.url]
        command = [sys.executable, "-m", "parse_infer", "serve", *addresses, "--workers", "2", "--grace", "20"]
        with started([*command, "--port", "0", "--metrics-port", "0", "--parallel", "4"]) as process:
            lines = [process.stdout.readline() for _ in range(2)]
            url, metrics = (re.search(r"http://[\d.:]+", line)[0] for line in lines)

            def ask(_: int, tokens: int = 8) -> httpx.Response:
                body = {"messages": PROMPT, "max_tokens": tokens, "parse": {"threshold": 0.5, "adaptive": False}}
                return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

            def counted(name: str) -> float:
                return total(httpx.get(f"{metrics}/metrics", timeout=60).text, name)

            with ThreadPoolExecutor(8) as pool:
                assert {response.status_code for response in pool.map(ask, range(8))} == {200}
            assert counted("parse_answers_total") == counted("parse_answer_seconds_count") == 8
            assert counted("parse_upstream_requests_total") >= 16, "a draft and a read each"
            assert counted("parse_upstream_ejected") == 0
            assert soon(lambda: counted("parse_parallel") == 8), "gauges are read four times a second"
            assert counted("parse_target_servers_healthy") == 1
            assert httpx.get(f"{url}/metrics", timeout=60).status_code == 404

            os.kill(min(children(process.pid)), signal.SIGKILL)
            assert ask(0).status_code == 200
            assert soon(lambda: counted("parse_parallel") == 8)
            assert counted("parse_answers_total") == 9, "the dead worker's answers still count"

            target.pause = 0.05
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(ask, 0, 60)
                assert soon(lambda: counted("parse_answers_running"))
                process.terminate()
                assert answer.result(60).status_code == 200
            assert process.wait(60) == 0


@pytest.mark.slow
def test_a_single_process_has_a_metrics_port_too():
    models = [load_language_model(f"zoo:{role}", role=role) for role in ("target", "draft")]
    with serving(FakeServer(models[0])) as target, serving(FakeServer(models[1])) as draft:
        addresses = ["--backend", "vllm", "--target-url", target.url, "--draft-url", draft.url]
        command = [sys.executable, "-m", "parse_infer", "serve", *addresses, "--port", "0", "--metrics-port", "0"]
        with started([*command, "--api-key", "secret"]) as process:
            url, metrics = (re.search(r"http://[\d.:]+", process.stdout.readline())[0] for _ in range(2))
            body, key = {"messages": PROMPT, "max_tokens": 8}, {"Authorization": "Bearer secret"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=key, timeout=60)
            assert answer.status_code == 200
            text = httpx.get(f"{metrics}/metrics", timeout=60).text
            assert total(text, "parse_answers_total") == total(text, "parse_answer_seconds_count") == 1
            assert total(text, "process_cpu_seconds_total") > 0
            assert soon(lambda: total(httpx.get(f"{metrics}/metrics", timeout=60).text, "parse_parallel") == 64)
            assert httpx.get(f"{url}/metrics", headers=key, timeout=60).status_code == 404
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.parametrize(("chosen", "served_draft", "threads"), [(None, True, 1), ("2", True, 3), (None, False, 3)])
def test_each_judging_thread_computes_alone(folders, monkeypatch, chosen, served_draft, threads):
    """Unless the user chose the number, or a draft model runs in the process."""
    found = []

    def run(self: ApiServer, sockets: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(torch.get_num_threads).result())

    monkeypatch.setattr(ApiServer, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    models = folders[:4]
    target, draft = (load_language_model(each, role="target") for each in models[1::2])
    torch.set_num_threads(3)
    try:
        with serving(FakeServer(target)) as target_server, serving(FakeServer(draft)) as draft_server:
            urls = ["--target-url", target_server.url, *(["--draft-url", draft_server.url] * served_draft)]
            assert main(["serve", "--backend", "vllm", *models, "--judge", "min_p", *urls, "--port", "0"]) == 0
    finally:
        torch.set_num_threads(1)
    assert found == [threads]


@pytest.mark.parametrize("options", [[], ["--backend", "vllm", "--target-url", "http://t:1"]])
def test_workers_with_models_of_their_own_are_refused(options, capsys):
    assert main(["serve", "--workers", "3", *options]) == 2
    assert "--workers 3 needs --backend vllm, --target-url and --draft-url" in capsys.readouterr().err


def test_a_metrics_port_in_use_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", "0", "--metrics-port", port]) == 2
    assert f"port {port} (Address already in use): change --metrics-port" in capsys.readouterr().err
