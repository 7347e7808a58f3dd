"""Draft servers that take and return text: the answers of the local engine, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.backends.servers.dialects.dialect import COMPLETIONS
from parse_infer.backends.servers.text_draft import CHAT, TextApi, TextDraft, read_piece
from parse_infer.decoding.block_length import BlockLength
from parse_infer.engine import ParseEngine
from parse_infer.models.names import resolve
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Verbatim
from tests.parse_infer.backends.text_server import TextServer
from tests.parse_infer.language_models import language_model, printable, word_tokenizer

PROMPT = "Tom has 5 apples."
N = 24
SETTINGS = {"max_new_tokens": N, "threshold": 0.0}
LLAMA_PYTHON = "PARSE_LLAMA_PYTHON"  # Python of another environment, with xllamacpp


def rest(engine: ParseEngine, ids: list[int], kept: int) -> list[int]:
    """What the target writes after the first tokens of an answer."""
    if kept == N:
        return []
    before = Verbatim.of_tokens(engine.target.render(PROMPT) + ids[:kept], engine.target.tokenizer)
    return engine.generate_target(before, max_new_tokens=N - kept).token_ids


@pytest.mark.parametrize(
    ("block_tokens", "lists", "known"),
    [("auto", "", True), ("auto", "offsets", False), ("auto", "bytes", True), (7, "offsets", True), (7, "", False)],
)
@pytest.mark.slow
def test_answers_are_those_of_the_local_engine(make_engine, connect, block_tokens, lists, known):
    engine = make_engine()
    draft = TextServer(engine.draft, lists=lists)
    coordinator, _, _ = connect(engine, draft=draft, draft_known=known)
    assert coordinator.backend._text_api.logprobs == bool(lists)
    for threshold in (0.0, 0.1, 0.3, 1.01):
        settings = {"max_new_tokens": N, "threshold": threshold, "block_tokens": block_tokens}
        found = coordinator.generate(PROMPT, **settings)
        assert found.token_ids == engine.generate(PROMPT, **settings, keep_greedy_match=True).token_ids
        assert found.fallback is None
        assert bool(found.stats.accepted_tokens) == (threshold <= 1) == bool(draft.bodies)
        draft.bodies.clear()
    alone = engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert found.token_ids == alone
    assert coordinator.generate(PROMPT, max_new_tokens=N, mode="exact", block_tokens=block_tokens).token_ids == alone
    stopped = SETTINGS | {"stop": ("L",)}
    assert coordinator.generate(PROMPT, **stopped).text == engine.generate(PROMPT, **stopped).text


@pytest.mark.parametrize(("block_tokens", "lists"), [("auto", ""), ("auto", "offsets"), ("whole", "")])
def test_a_draft_model_with_other_tokens_and_another_template(make_engine, connect, make_model, block_tokens, lists):
    engine, words = make_engine(), word_tokenizer()
    other = language_model(printable(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words), words, "o")
    local = ParseEngine.from_models(engine.target, other, engine.backend.judge)
    draft = TextServer(other, lists=lists)
    coordinator, _, _ = connect(local, draft=draft)
    settings = {"max_new_tokens": N, "block_tokens": block_tokens}
    found = coordinator.generate(PROMPT, threshold=0.0, **settings)
    assert draft.bodies[0]["prompt"] == "[Q]Tom has 5 apples.[A]"
    own = other.tokenizer.decode(list(draft._write(other.render(PROMPT), {"max_tokens": N, "temperature": 0})))
    assert own.startswith(found.spans[0].text) and found.stats.accepted_tokens > 10
    alone = engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert coordinator.generate(PROMPT, threshold=1.01, **settings).token_ids == alone


@pytest.mark.parametrize(("block_tokens", "lists"), [("auto", ""), ("auto", "bytes"), (7, "")])
def test_a_server_of_chats_drafts_whole_answers(make_engine, connect, block_tokens, lists):
    engine = make_engine()
    draft = TextServer(engine.draft, serves=("chat",), lists=lists)
    coordinator, _, _ = connect(engine, draft=draft, draft_known=False)
    own = engine.generate(PROMPT, **SETTINGS).token_ids
    for threshold in (0.0, 0.3, 1.01):
        draft.bodies.clear()
        found = coordinator.generate(PROMPT, max_new_tokens=N, threshold=threshold, block_tokens=block_tokens)
        ids, kept = found.token_ids, found.stats.accepted_tokens
        assert ids[:kept] == own[:kept] and found.fallback is None
        assert len(draft.bodies) == (threshold <= 1), "a chat cannot continue an answer"
        assert bool(kept) == (threshold <= 1)
        assert rest(engine, ids, kept) == ids[kept:]
    assert coordinator.backend.strict_tokens == 0, "nor one that the target has begun"
    draft.bodies.clear()
    plain = Verbatim("Once upon a time")
    found = coordinator.generate(plain, **SETTINGS)
    assert found.token_ids == engine.generate_target(plain, max_new_tokens=N).token_ids and not draft.bodies


def test_low_confidence_ends_no_draft_of_a_chat(make_engine, connect, monkeypatch):
    """The server could not continue it."""
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: True)
    engine = make_engine()
    draft = TextServer(engine.draft, serves=("chat",), lists="bytes")
    coordinator, _, _ = connect(engine, draft=draft, draft_known=False)
    whole = coordinator.generate(PROMPT, **SETTINGS, block_tokens="whole")
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == whole.token_ids and found.stats.accepted_tokens == whole.stats.accepted_tokens > 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_servers_window_bounds_a_draft(make_engine, path):
    target = make_engine().target
    n = len(target.render(PROMPT))

    def limit(window: int, ids: list[int]) -> int | None:
        writing = TextDraft(TextApi(path, False), None, target, PROMPT, (), window).begin(ids, 99)
        return None if writing is None else writing.body(Sampling(), 1, False)["max_tokens"]

    assert limit(0, []) == limit(1000, []) == 99 and limit(n + 7, []) == 7 and limit(n, []) is None
    assert limit(n + 7, [70, 71]) == (5 if path == COMPLETIONS else None)


@pytest.mark.slow
def test_low_confidence_ends_a_draft(make_engine, connect, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: survival < 0.5)
    drafted = []
    for lists in ("", "offsets"):
        draft = TextServer(engine.draft, lists=lists)
        coordinator, _, _ = connect(engine, draft=draft)
        found = coordinator.generate(PROMPT, max_new_tokens=2 * N, threshold=0.3)
        assert found.stats.rounds == len(draft.bodies) > 2
        drafted.append(found.stats.draft_forwards)
    assert drafted[1] < 0.6 * drafted[0], drafted
    (length,) = coordinator.backend._lengths.values()
    assert length.costs is not None


@pytest.mark.parametrize(
    ("faults", "fallback"),
    [
        (["500"], "no_draft"),
        (["refused"], "draft_refused"),
        (["odd"], "no_draft"),
        ([None, "refused"], "draft_refused"),
    ],
)
def test_a_server_that_fails_costs_the_draft_alone(make_engine, connect, faults, fallback):
    engine = make_engine()
    draft = TextServer(engine.draft)
    coordinator, _, _ = connect(engine, draft=draft)
    settings = {"max_new_tokens": N, "threshold": 0.3}
    draft.faults.extend(faults)
    found = coordinator.generate(PROMPT, **settings)
    assert found.fallback == fallback
    own = engine.generate(PROMPT, **settings).token_ids
    ids, kept = found.token_ids, 0 if None not in faults and fallback else len(own)
    if None in faults:
        kept = found.stats.accepted_tokens
        assert kept
    assert ids[:kept] == own[:kept]
    if fallback:
        assert rest(engine, ids, kept) == ids[kept:]


def test_the_beginning_of_a_text_is_a_draft_too(make_engine, connect):
    engine = make_engine()
    draft = TextServer(engine.draft)
    coordinator, _, _ = connect(engine, draft=draft)
    draft.faults.append("cut")
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == engine.generate(PROMPT, **SETTINGS).token_ids
    assert found.fallback is None and len(draft.bodies) == found.stats.rounds > 1


def test_after_an_empty_draft_the_target_writes_the_rest(make_engine, connect):
    engine = make_engine()
    draft = TextServer(engine.draft)
    coordinator, _, _ = connect(engine, draft=draft)
    draft.faults.append("empty")
    found = coordinator.generate(PROMPT, **SETTINGS)
    assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=N).token_ids
    assert found.fallback is None and len(draft.bodies) == 1


def test_sampling_reaches_the_server(make_engine, connect):
    engine = make_engine()
    draft = TextServer(engine.draft)
    coordinator, _, _ = connect(engine, draft=draft)

    def answer(seed: int) -> list[int]:
        sampling = Sampling(0.8, 0.9, seed=seed)
        return coordinator.generate(PROMPT, **SETTINGS, draft_sampling=sampling).token_ids

    assert answer(3) == answer(3) != answer(4)
    assert (draft.bodies[0]["temperature"], draft.bodies[0]["top_p"]) == (0.8, 0.9)
    coordinator.clear_caches()  # this server would refuse a cache_salt
    assert coordinator.generate(PROMPT, **SETTINGS).fallback is None


def test_a_greedy_draft_has_no_field_that_openai_does_not_know(make_engine, connect):
    """`serve` has the `top_k` of the target's generation config, also where drafts are greedy."""
    engine = make_engine()
    coordinator, _, draft = connect(engine, draft=TextServer(engine.draft))
    found = coordinator.generate(PROMPT, **SETTINGS, draft_sampling=Sampling(0.0, top_k=20))
    assert found.fallback is None and draft.bodies and not any("top_k" in body for body in draft.bodies)
    assert coordinator.generate(PROMPT, **SETTINGS, draft_sampling=Sampling(0.8, top_k=20)).fallback == "draft_refused"


@pytest.mark.parametrize("strict", [True, False])
def test_the_handshake_finds_out_what_a_server_takes(make_engine, connect, strict):
    engine = make_engine()
    draft = TextServer(engine.draft)
    draft.strict = strict
    coordinator, _, _ = connect(engine, draft=draft)
    assert coordinator.backend._text_api.path == "/v1/completions"
    draft.counts = False
    coordinator.backend.run(coordinator.backend.handshake())
    assert coordinator.backend._text_api.path == "/v1/completions", "usage without a number says nothing"
    draft.counts = True
    draft.wraps = True  # as Ollama: a draft would answer the template
    coordinator.backend.run(coordinator.backend.handshake())
    assert coordinator.backend._text_api.path == "/v1/chat/completions"
    for serves, said in ((("completions",), "puts a prompt into a chat template"), ((), "Not Found")):
        draft.serves = serves
        with pytest.raises(ValueError, match="neither token ids nor text") as error:
            coordinator.backend.run(coordinator.backend.handshake())
        assert draft.url in str(error.value) and f"/v1/completions: {said}" in str(error.value)


def test_a_server_of_several_models_needs_the_name_of_one(make_engine, connect):
    engine = make_engine()
    draft = TextServer(engine.draft)
    draft.names = ["a", "b"]
    with pytest.raises(ValueError, match="serves several models: set draft to one of a, b"):
        connect(engine, draft=draft)


def test_servers_of_one_model_are_of_one_kind(make_engine, connect):
    engine = make_engine()
    coordinator, _, _ = connect(engine)
    other = TextServer(engine.draft)
    pool = coordinator.backend._drafts[0]
    pool.members += ReplicaPool("draft", [connect(engine, draft=other)[2].url], Client()).members
    with pytest.raises(ValueError, match="takes prompts unlike the others"):
        coordinator.backend.run(coordinator.backend.handshake())


def test_the_name_of_a_served_model_is_enough(monkeypatch):
    async def handshake(self) -> None:
        pass

    monkeypatch.setattr(ServerBackend, "handshake", handshake)
    urls = {"target_url": "http://127.0.0.1:9", "draft_url": "http://127.0.0.1:8"}
    for name in ("some:model", None):
        with ParseEngine.from_pretrained("zoo:target", name, "zoo:adapter", backend="vllm", **urls) as made:
            assert made.draft is None and made.backend.servers["draft"].model == (name or "")
    with pytest.raises(OSError, match="some:model"):
        ParseEngine.from_pretrained("zoo:target", "some:model", "zoo:adapter", backend="vllm")


def test_log_probabilities_begin_where_their_tokens_do():
    entries = [{"token": "é", "bytes": [195, 169], "logprob": 0.0}, {"token": "b", "logprob": -1.0}]
    _, tokens, _ = read_piece({"choices": [{"delta": {"content": "éb"}, "logprobs": {"content": entries}}]})
    assert [place for place, _ in tokens] == [0, 1] and tokens[1][1] == pytest.approx(0.3679, abs=1e-4)
    odd = {"token_logprobs": [None], "text_offset": [3]}
    assert read_piece({"choices": [{"text": "a", "logprobs": odd}]}) == ("a", [], None)


LLAMA_SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx = sys.argv[1], 0, 2048
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print("ready", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_server_of_llama_cpp_drafts(make_engine, connect):
    """SmolLM2 on the server in the package xllamacpp drafts for a tiny target, which accepts all or nothing."""
    python = os.environ.get(LLAMA_PYTHON, sys.executable)
    if LLAMA_PYTHON not in os.environ and find_spec("xllamacpp") is None:
        pytest.skip(f"xllamacpp is not installed; {LLAMA_PYTHON} may name a Python that has it")
    try:
        file = str(resolve("smollm2"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    engine = make_engine()
    with subprocess.Popen(
        [python, "-c", LLAMA_SERVER, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        url = next(line.split()[1].decode() for line in server.stdout if line.startswith(b"ready"))
        coordinator, _, fake = connect(engine)
        pool = ReplicaPool("draft", [url], Client())
        coordinator.backend._drafts, coordinator.backend.draft = (pool, None), None
        coordinator.backend.run(coordinator.backend.handshake())
        assert coordinator.backend._text_api == TextApi("/v1/completions", logprobs=True)
        prompt = Verbatim("The capital of France is")
        for block_tokens in ("auto", 7, "whole"):
            found = coordinator.generate(prompt, **SETTINGS, block_tokens=block_tokens)
            assert found.text.startswith(" Paris.") and found.stats.accepted_tokens > 8 and found.fallback is None
        alone = engine.generate_target(prompt, max_new_tokens=N).token_ids
        assert coordinator.generate(prompt, max_new_tokens=N, threshold=1.01).token_ids == alone
        assert not fake.bodies
