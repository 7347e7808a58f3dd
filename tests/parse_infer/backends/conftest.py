"""Coordinators over small servers in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch

from parse_infer.backends.pool import health
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.logprob_reads import LogprobReads
from parse_infer.backends.servers.options import PARALLEL
from parse_infer.backends.servers.parts import Parts
from parse_infer.backends.servers.target import Target
from parse_infer.backends.servers.zero_shot_requests import ZeroShotRequests
from parse_infer.engine import ParseEngine
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.loading import LanguageModel
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.text.cuts import CutPolicy
from tests.parse_infer.backends.fake_server import FakeServer, serving
from tests.parse_infer.serve.conftest import Running, running

CUTS = CutPolicy("tokens", every=6)
WAIT_S = 10.0


def first(servers: Sequence[Replica]) -> Replica:
    """Choice among equally busy replicas, so that a test knows it."""
    return servers[0]


Connect = Callable[..., tuple[ParseEngine, list[FakeServer], FakeServer]]


def add_reference(judge: ValidityAdapter, target: LanguageModel) -> None:
    """Add the log-probabilities by which a handshake recognises the target."""
    known = target.render("How many?")
    with torch.inference_mode():
        scores = target.model(torch.tensor([known])).logits[0].log_softmax(-1)
    own = [scores[i, token].item() for i, token in enumerate(known[1:])]
    judge.config.logprobs["reference"] = {"ids": known, "logprobs": own}


@pytest.fixture
def make_engine(make_engine, random_adapter) -> Callable[..., ParseEngine]:
    """Engines whose judge reads log-probabilities; half of the thresholds accept something other than the target."""

    def make(noise: float = 0.1, draft_window: int = 2048, **options) -> ParseEngine:
        engine = make_engine(noise, draft_window)
        judge = random_adapter(engine.target.model)
        add_reference(judge, engine.target)
        return ParseEngine.from_models(engine.target, engine.draft, judge, **options)

    return make


@pytest.fixture
def engine(make_engine) -> ParseEngine:
    return make_engine(cut_policy=CUTS)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(engine)`: a coordinator over servers with the engine's weights; them too. `keys`: theirs, and its;
    `local_rows`: the draft model is in its own process, with so many rows; `draft`: its server; `draft_known`: the
    coordinator has its tokenizer."""
    with ExitStack() as stack:

        def make(
            engine: ParseEngine,
            n_targets: int = 1,
            patience_s: float = 2.0,
            keys: tuple[str | None, str | None] = (None, None),
            local_rows: int = 0,
            max_read_tokens: int = 2048,
            cache_block: int = 0,
            server_type: type[FakeServer] = FakeServer,
            draft: FakeServer | None = None,
            draft_known: bool = True,
            clock: Callable[[], float] = time.monotonic,
            parallel: int = PARALLEL,
            **options,
        ) -> tuple[ParseEngine, list[FakeServer], FakeServer]:
            targets, draft = [server_type(engine.target) for _ in range(n_targets)], draft or server_type(engine.draft)
            for server in (*targets, draft):
                stack.enter_context(serving(server))
                server.key, server.cache_block = keys[0], cache_block
            language, judge = engine.target, engine.backend.judge
            requests: LogprobReads | ZeroShotRequests
            if isinstance(judge, ZeroShotJudge):
                requests = ZeroShotRequests(language.tokenizer, language.eos_ids, top=259)
                for server in targets:
                    server.max_logprobs = len(language.tokenizer)
            elif judge is None:
                requests = LogprobReads(MinP().load(language.tokenizer).config, None, max_read_tokens)
            else:
                scorer = judge.scorer(language.tokenizer, language.eos_ids)
                requests = LogprobReads(judge.config, scorer, max_read_tokens)
            shared = {"patience_s": patience_s, "clock": clock, "choose": first}
            servers = ReplicaPool("target", [server.url for server in targets], Client(keys[1]), **shared)
            drafts: ReplicaPool | InProcessDraft
            if local_rows:
                drafts = InProcessDraft(engine.draft, rows=local_rows)
            else:
                drafts = ReplicaPool("draft", [draft.url], Client(keys[1]), **shared)
            parts = Parts(
                Target(language, servers, requests, engine.backend.segmenter.policy),
                (drafts, engine.draft if draft_known else None),
                {"backend": "vllm", "target": "target", "draft": "draft", "adapter": "judge"},
                **options,
            )
            backend = ServerBackend(parts, parallel)
            coordinator = ParseEngine(backend, threshold=None if judge is None else engine.threshold)
            coordinator.adaptive = False  # so that every answer has the draft that a test is about
            coordinator.strict_tokens = 0
            stack.callback(coordinator.close)
            coordinator.backend.run(coordinator.backend.handshake())
            for server in (*targets, draft):
                server.bodies.clear()
            return coordinator, targets, draft

        yield make


@pytest.fixture
def relaying(engine, connect) -> Iterator[tuple[Running, list[FakeServer]]]:
    """A coordinator behind an API server, and the target's two servers."""
    coordinator, targets, _ = connect(engine, n_targets=2)
    with running(LoopRunner(coordinator), engine) as served:
        yield served, targets


def soon(coordinator: ParseEngine, condition: Callable[[], bool]) -> bool:
    """Whether it becomes true while the coordinator's event loop runs."""

    async def wait() -> bool:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  (any condition)
                await asyncio.sleep(0.01)
        return True

    try:
        return coordinator.backend.run(wait())
    except TimeoutError:
        return False


@pytest.fixture
def quick_checks(monkeypatch) -> None:
    """Health is checked all the time."""
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.02)
