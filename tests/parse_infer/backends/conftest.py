"""Coordinators over small servers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from parse_infer.backends import health
from parse_infer.backends.client import Client
from parse_infer.backends.local_draft import LocalDraft
from parse_infer.backends.logprob_reads import LogprobReads
from parse_infer.backends.replicas import ReplicaPool
from parse_infer.backends.server_target import Target
from parse_infer.backends.vllm import VLLMBackend
from parse_infer.engine import ParseEngine
from parse_infer.judge.cuts import CutPolicy
from parse_infer.judge.logprob_head import LogprobHead
from parse_infer.judge.verifier import Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.vllm_plugin.options import judge_name
from parse_infer.vllm_plugin.validity_requests import TrainedQuestions, ZeroShotQuestions
from tests.parse_infer.backends.fake_server import FakeServer, serving

CUTS = CutPolicy("tokens", every=6)
WAIT_S = 10.0
Connect = Callable[..., tuple[ParseEngine, list[FakeServer], FakeServer]]


@pytest.fixture
def engine(make_engine) -> ParseEngine:
    return make_engine(cut_policy=CUTS)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(engine)`: a coordinator over servers with the engine's weights; them too. `keys`: theirs, and its;
    `local_rows`: the draft model is in its own process, with so many rows."""
    with ExitStack() as stack:

        def make(
            engine: ParseEngine,
            n_targets: int = 1,
            plugin: bool = True,
            patience_s: float = 2.0,
            keys: tuple[str | None, str | None] = (None, None),
            local_rows: int = 0,
            max_read_tokens: int = 2048,
            cache_block: int = 0,
            **options,
        ) -> tuple[ParseEngine, list[FakeServer], FakeServer]:
            judge = engine.backend.judge
            zero_shot, by_logprobs = isinstance(judge, ZeroShotJudge), isinstance(judge.head, LogprobHead)
            plugin = plugin and not by_logprobs

            def target() -> FakeServer:
                with_judge = (
                    Verifier(engine.target.decoder, judge, engine.backend.segmenter)
                    if plugin and not zero_shot
                    else None
                )
                made = FakeServer(engine.target, with_judge)
                made.cache_block = cache_block
                return stack.enter_context(serving(made))

            targets, draft = [target() for _ in range(n_targets)], FakeServer(engine.draft)
            stack.enter_context(serving(draft))
            for server in (*targets, draft):
                server.key = keys[0]
            for server in targets if zero_shot else ():
                server.max_logprobs = len(engine.target.tokenizer)
            ends, client = sorted(engine.target.eos_ids), Client(keys[1])
            questions = reads = None
            if by_logprobs:
                reads = LogprobReads(judge.config, judge.head, engine.target.tokenizer, ends, max_read_tokens)
            elif zero_shot:
                questions = ZeroShotQuestions.of(engine.target.tokenizer, ends, top=259)
            else:
                questions = TrainedQuestions.of(judge.config, ends)
            name = None if zero_shot or by_logprobs else judge_name(judge.fingerprint)
            for server in targets if plugin and not zero_shot else ():
                server.names.append(name)
            servers = ReplicaPool("target", [s.url for s in targets], client, patience_s=patience_s, judge=name)
            drafts: ReplicaPool | LocalDraft = ReplicaPool("draft", [draft.url], client, patience_s=patience_s)
            if local_rows:
                drafts = LocalDraft(engine.draft, rows=local_rows)
            backend = VLLMBackend(
                Target(engine.target, servers, questions, engine.backend.segmenter.policy, reads=reads),
                (drafts, engine.draft),
                client,
                models={"backend": "vllm", "target": "target", "draft": "draft", "adapter": "judge"},
                **options,
            )
            coordinator = ParseEngine(backend, threshold=engine.threshold)
            coordinator.adaptive = False  # so that every answer has the draft that a test is about
            stack.callback(coordinator.close)
            coordinator.backend.run(coordinator.backend.handshake())
            for server in (*targets, draft):
                server.bodies.clear()
            return coordinator, targets, draft

        yield make


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
