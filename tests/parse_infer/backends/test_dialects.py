"""Dialects: an engine is one file and one line of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from parse_infer.backends.servers.dialects import registry
from parse_infer.backends.servers.dialects.dialect import Call, Dialect
from parse_infer.backends.servers.dialects.registry import DEFAULT, DIALECTS, identify
from tests.parse_infer.backends.fake_server import FakeServer

PROMPT = "Tom has 5 apples."
N = 24


class Toy(Dialect):
    """An engine that returns log-probabilities of prompts at a path of its own, without a prefix cache."""

    name = "Toy"
    owner = "toy"
    reads_prompts = True
    reserved_tokens = 2

    def read(self, ids: Sequence[int], k: int) -> Call:
        return Call({"tokens": list(ids), "choices": k}, "/toy/score")

    def cached_read(self, ids: Sequence[int], start: int, k: int) -> Call:
        return self.read(ids, k)

    def entries(self, response: Any, ids: Sequence[int]) -> Any:
        return response["scored"]

    def cached_tokens(self, response: Any) -> int | None:
        return 0


class ToyServer(FakeServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.card = {"owned_by": "toy"}

    def more_routes(self) -> list[web.RouteDef]:
        return [web.post("/toy/score", self.score)]

    async def score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        return web.json_response({"scored": self._read(body["tokens"], body["choices"])["prompt_logprobs"]})


def test_a_registered_engine_answers_as_the_local_backend(make_engine, connect, monkeypatch):
    monkeypatch.setattr(registry, "DIALECTS", [*DIALECTS, Toy()])
    engine = make_engine()
    window = engine.target.window
    coordinator, (target, *_), _ = connect(engine, server_type=ToyServer)
    settings = {"max_new_tokens": N, "threshold": 0.3}
    response = coordinator.generate(PROMPT, **settings)
    assert response.token_ids == engine.generate(PROMPT, **settings, keep_greedy_match=True).token_ids
    assert response.fallback is None and any("tokens" in body for body in target.bodies)
    assert coordinator.backend.servers["target"].identity.window == window - 2


@pytest.mark.parametrize("owner", ["llamacpp", "library"])
def test_an_engine_without_log_probabilities_of_prompts_is_no_target_of_a_judge(make_engine, connect, owner):
    engine = make_engine()
    coordinator, (target, *_), _ = connect(engine)
    target.card = {"owned_by": owner}
    with pytest.raises(ValueError, match=r"returns no log-probabilities of prompts: give a vLLM or SGLang server"):
        coordinator.backend.run(coordinator.backend.handshake())
    assert target.bodies == []


@pytest.mark.parametrize(("card", "name"), [({"owned_by": "vllm"}, "vLLM"), ({"owned_by": "sglang"}, "SGLang")])
def test_identify_reads_the_owner(card, name):
    assert identify(card).name == name


@pytest.mark.parametrize("card", [{}, {"owned_by": None}, {"owned_by": "a company"}])
def test_an_unknown_engine_is_tried_as_vllm(card):
    assert identify(card) is DEFAULT
