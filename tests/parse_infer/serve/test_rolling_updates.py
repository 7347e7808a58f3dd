"""Rolling updates under load: of the target's servers, and of coordinators in processes of their own with a new judge.

Each server and coordinator has a host of its own, where this machine lets a test make network namespaces.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from parse_infer.calibration.calibration_file import save_calibrations
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.engine import ParseEngine
from parse_infer.models.loading import LanguageModel, load_language_model
from tests.parse_infer.backends.fake_server import serving
from tests.parse_infer.backends.scripted_server import ScriptedServer
from tests.parse_infer.serve.hosts import Host, hosts
from tests.parse_infer.serve.small_workers import run_command
from tests.parse_infer.serve.test_workers import soon, total

CLIENTS, TARGETS = 8, 3
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))  # each request connects anew
TOKENS = 60  # of an answer, and of the calibrations
PAUSE_S = 0.05  # of a server, for three tokens
RISKS = {"old": 0.1, "new": 0.2}  # promise of each judge's calibration: `parse.risk` of an answer names its judge
THRESHOLDS = {"old": 0.5, "new": 0.0}  # the old judge keeps what the target would write, the new one all
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["parse_infer.serve.app", "parse_infer.serve.loop_runner", "parse_infer.engine"])


@dataclass(frozen=True)
class Coordinator:
    process: ForkServerProcess
    url: str

    def counted(self, name: str, **labels: str) -> float:
        return total(HTTP.get(f"{self.url}/metrics").text, name, **labels)


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Answer:
    """What a client got, and from which coordinator. `risk`: of the answer; None: the target wrote it alone."""

    number: int
    url: str
    text: str
    risk: float | None


def ask(url: str, number: int) -> Answer:
    """Every third answer is a stream of the target alone."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question(number)}], "max_tokens": TOKENS}
    body |= {"stream": True} | ({"parse": {"mode": "target"}} if number % 3 == 0 else {})
    with HTTP.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    last = choices[-1]
    assert last["finish_reason"] == "length"
    return Answer(number, url, text, last["parse"]["risk"])


def question(number: int) -> str:
    return f"Tom has apples {number:03}"  # what `ScriptedServer` answers depends on the end


@dataclass
class Load:
    """Clients that stream one answer after the other, each from a coordinator that is ready, as behind a Service."""

    urls: list[str]
    answers: list[Answer] = field(default_factory=list)
    lost: list[Exception] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Unfinished requests of each coordinator."""
    _choosing: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def runs(self) -> Iterator[None]:
        numbers, end = itertools.count(), threading.Event()

        def client() -> None:
            while not end.is_set():
                number = next(numbers)
                try:
                    with self.connected() as url:
                        self.answers.append(ask(url, number))
                except Exception as error:
                    self.lost.append(error)

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        try:
            yield
        finally:
            end.set()
            for each in clients:
                each.join(120)

    @contextmanager
    def connected(self) -> Iterator[str]:
        while True:
            with self._choosing:
                url = min(self.urls, key=lambda url: self.sent[url])
                self.sent[url] += 1
            try:
                if is_ready(url):
                    yield url
                    return
            finally:
                with self._choosing:
                    self.sent[url] -= 1

    def replace(self, ends: Coordinator, begins: Coordinator) -> int:
        """Connect to another one from now on, and wait until the first has received all that was sent to it.

        Returns how many requests the first had at the change.
        """
        with self._choosing:
            self.urls = [url for url in self.urls if url != ends.url] + [begins.url]
            unfinished = self.sent[ends.url]
        parts = ("parse_answers_running", "parse_answers_waiting")
        assert soon(lambda: sum(map(ends.counted, parts)) >= self.sent[ends.url])
        return unfinished

    def wait_for_answers(self) -> None:
        n = len(self.answers) + 12
        assert soon(lambda: len(self.answers) >= n or self.lost) and not self.lost, self.lost[:3]


@dataclass
class Fleet:
    """Servers on hosts of their own, found by a file; and coordinators.

    Attributes:
        models: options for target and draft model.
        adapters: folder of each judge.
    """

    stack: ExitStack
    hosts: Iterator[Host]
    folder: Path
    models: list[str]
    target: LanguageModel
    draft: ScriptedServer
    adapters: dict[str, Path] = field(default_factory=dict)
    targets: list[tuple[ScriptedServer, AbstractContextManager[Any], Host]] = field(default_factory=list)

    def start_target(self) -> ScriptedServer:
        server = ScriptedServer(self.target)
        server.pause = PAUSE_S
        host = next(self.hosts)
        context = serving(server, host.address, host.enter)
        context.__enter__()
        self.targets.append((server, context, host))
        return server

    def kill_target(self) -> ScriptedServer:
        """Kill the oldest one in the middle of its streams."""
        server, context, _ = self.targets.pop(0)
        assert soon(lambda: server.break_off() or server.broken)
        context.__exit__(None, None, None)
        return server

    def list_targets(self) -> None:
        beside = self.folder / "new.txt"
        beside.write_text("".join(f"{server.url}\n" for server, _, _ in self.targets))
        beside.replace(self.folder / "targets.txt")

    def start_coordinators(self, judge: str, n: int = 2) -> list[Coordinator]:
        options = ["serve", "--backend", "vllm", *self.models, "--adapter", str(self.adapters[judge])]
        options += ["--target-url", f"file:{self.folder}/targets.txt", "--draft-url", self.draft.url]
        options += ["--risk", str(RISKS[judge]), "--no-adaptive"]
        found = []
        for host in itertools.islice(self.hosts, n):
            if host.namespace:
                port = 8000
            else:
                with socket.create_server((host.address, 0)) as free:
                    port = free.getsockname()[1]
            words = [*options, "--host", host.address, "--port", str(port)]
            log = self.folder / f"{host.address}.log"
            process = PROCESSES.Process(target=run_command, args=(words, str(log), host.enter), daemon=True)
            process.start()
            self.stack.callback(process.join)
            self.stack.callback(process.kill)
            found.append(Coordinator(process, f"http://{host.address}:{port}"))
        for each in found:
            assert soon(lambda: is_ready(each.url) or not each.process.is_alive()) and each.process.is_alive()  # noqa: B023
        return found

    def add_judge(self, name: str, adapter: Any) -> None:
        """Write its folder, with a calibration of the models as served."""
        known = self.target.render("How many?")
        read = ScriptedServer(self.target)._read(known, 3)["prompt_logprobs"]
        own = [entries[str(token)]["logprob"] for token, entries in zip(known[1:], read[1:], strict=True)]
        adapter.config.logprobs["reference"] = {"ids": known, "logprobs": own}
        folder = self.adapters[name] = self.folder / name
        adapter.save_pretrained(folder)
        urls = {"target_url": [server.url for server, _, _ in self.targets], "draft_url": self.draft.url}
        target, draft = self.models[1::2]
        with ParseEngine.from_pretrained(target, draft, folder, backend="vllm", **urls) as engine:
            models = engine.describe()
        tried = [TestedPoint(OperatingPoint(THRESHOLDS[name], 16), 0, 0.04, 2.0, 0.1)]
        found = Calibration("t", 300, "x", "lost", 0.9, TOKENS, models, tried, {RISKS[name]: 0})
        save_calibrations(folder / "calibration.json", [found])

    def right(self, answer: Answer) -> str:
        """The text of undisturbed servers, by the judge that the answer names."""
        writer = self.draft if answer.risk == RISKS["new"] else ScriptedServer(self.target)
        written = writer._write(self.target.render(question(answer.number)), {"max_tokens": TOKENS})
        return self.target.tokenizer.decode(list(written))

    def check(self, load: Load) -> None:
        """No answer was lost, wrong or doubled."""
        assert not load.lost, load.lost[:3]
        assert sorted(answer.number for answer in load.answers) == list(range(len(load.answers)))
        assert [answer.text for answer in load.answers] == list(map(self.right, load.answers))


@pytest.fixture(scope="module")
def fleet(folders, random_adapter, tmp_path_factory) -> Iterator[Fleet]:
    models = folders[:4]
    target, draft = (
        load_language_model(folder, role=role) for folder, role in zip(models[1::2], ("target", "draft"), strict=True)
    )
    with ExitStack() as stack:
        own, some = ScriptedServer(draft), stack.enter_context(hosts())
        own.pause, own.wrong_every = PAUSE_S / 2, 10
        host = next(some)
        stack.enter_context(serving(own, host.address, host.enter))
        found = Fleet(stack, some, tmp_path_factory.mktemp("fleet"), models, target, own)
        for _ in range(TARGETS):
            found.start_target()
        found.list_targets()
        for seed, name in enumerate(RISKS, 1):
            found.add_judge(name, random_adapter(target.model, seed))
        yield found
        for _, context, _ in found.targets:
            context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def old(fleet) -> list[Coordinator]:
    return fleet.start_coordinators("old")


@pytest.mark.slow
def test_targets_are_replaced_one_after_the_other(fleet, old):
    """Each is killed in the middle of its streams, as a pod of a StatefulSet ends before its successor begins."""
    load, broken = Load([each.url for each in old]), 0
    counted = sum(each.counted("parse_answers_total") for each in old)
    with load.runs():
        for _ in range(TARGETS):
            load.wait_for_answers()
            broken += fleet.kill_target().broken
            new = fleet.start_target()
            fleet.list_targets()
            for each in old:
                assert soon(lambda: each.counted("parse_upstream_requests_total", server=new.url))  # noqa: B023
        load.wait_for_answers()
    fleet.check(load)
    assert sum(each.counted("parse_answers_total") for each in old) - counted == len(load.answers), "none doubled"
    assert broken >= TARGETS, "streams broke off"
    print(f"{len(load.answers)} answers, {broken} streams broke off")


@pytest.mark.slow
def test_a_host_of_the_target_leaves_the_network(fleet, old):
    """No connection to it is closed. Its answers go on elsewhere, once health checks miss it."""
    server, context, host = fleet.targets[0]
    if not host.namespace:
        pytest.skip("this machine lets a test make no network namespaces")
    load = Load([each.url for each in old])
    with load.runs():
        load.wait_for_answers()
        server.pause = 30.0
        time.sleep(1)  # the streams that are open then began a piece of 30 s
        assert soon(lambda: server.streaming)
        host.cut_off()
        cut, begun = server.streaming, time.monotonic()
        for each in old:  # three checks time out after 10 s each
            assert soon(lambda: each.counted("parse_target_servers_healthy") == TARGETS - 1, 300)  # noqa: B023
        noticed_s = time.monotonic() - begun
        load.wait_for_answers()
    fleet.check(load)
    fleet.targets.pop(0)
    context.__exit__(None, None, None)
    fleet.start_target()
    fleet.list_targets()
    assert cut
    print(f"{len(load.answers)} answers, {cut} streams were open, noticed after {noticed_s:.0f} s")


@pytest.mark.slow
def test_coordinators_with_a_new_judge_replace_others_one_after_the_other(fleet, old):
    """A coordinator gets no new connections, as `preStop` sees to, and then SIGTERM. It answers by the judge of its
    start until it ends."""
    load, new = Load([each.url for each in old]), fleet.start_coordinators("new")
    with load.runs():
        for ends, begins in zip(old, new, strict=True):
            load.wait_for_answers()
            assert load.replace(ends, begins), "it has requests"
            ends.process.terminate()
            assert soon(lambda: not is_ready(ends.url))  # noqa: B023
            ends.process.join(60)
            assert ends.process.exitcode == 0
        load.wait_for_answers()
    fleet.check(load)
    for judge, coordinators in (("old", old), ("new", new)):
        urls = {each.url for each in coordinators}
        judged = [answer for answer in load.answers if answer.url in urls and answer.risk is not None]
        assert {answer.risk for answer in judged} == {RISKS[judge]} and {each.url for each in judged} == urls
    print(f"{len(load.answers)} answers")
