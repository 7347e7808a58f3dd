"""What chat clients and benchmark harnesses send, and what they get in return."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from parse_infer.cli.app import main
from parse_infer.cli.commands.serve import unpromised_default
from parse_infer.request.output import Generation
from parse_infer.serve.settings import ApiSettings, RiskSettings
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Chat
from tests.parse_infer.serve.conftest import Running, running
from tests.parse_infer.serve.test_event_stream import PROMPTS, calibrated

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": PROMPTS[0]}]
TEMPLATE = (  # what an assistant thought, and a switch, in front of the plain template
    "{% if think %}T{% endif %}{% for m in messages if m.reasoning_content %}<{{ m.reasoning_content }}>{% endfor %}"
)


@pytest.fixture(scope="module")
def sampling(make_engine) -> Iterator[Running]:
    """A model whose generation config samples, with a chat template that has a switch and reads thoughts."""
    engines = [make_engine(), make_engine()]
    for engine in engines:
        for part in (engine.target, engine.draft):
            part.tokenizer = copy.deepcopy(part.tokenizer)
            part.tokenizer.chat_template = TEMPLATE + part.tokenizer.chat_template
            part.model.generation_config.update(temperature=0.7, top_p=0.8, top_k=20)
    with running(ThreadRunner(engines[0]), engines[1]) as server:
        yield server


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.slow
def test_without_max_tokens_a_chat_may_fill_the_window_and_a_completion_has_16(make_engine):
    engine, own = make_engine(), make_engine()
    for part in (engine.target, engine.draft, own.target, own.draft):
        part.window = 700  # more than the 512 that the library has by default
    with running(ThreadRunner(engine), own) as server:
        prompt = len(own.target.render(PROMPTS[0]))
        for limit in ({}, {"max_tokens": None}, {"max_completion_tokens": 9999}):
            answer = server.chat(PROMPTS[0], parse={"threshold": 0}, **limit).json()
            assert answer["usage"]["completion_tokens"] == 700 - prompt and answer["choices"][0]["parse"]
            assert answer["choices"][0]["finish_reason"] == "length"
        assert server.post(PLAIN, {"prompt": "a"}).json()["usage"]["completion_tokens"] == 16


def test_unknown_fields_are_ignored_with_a_warning(served):
    plain = served.chat(PROMPTS[0], max_tokens=8)
    unknown = {"colour": 1, "a[b\n": {"x": 1}, "\ud800é": 2}
    raw = json.dumps({"messages": USER, "max_tokens": 8, **unknown})
    other = httpx.post(served.url + CHAT, content=raw, headers={"Content-Type": "application/json"}, timeout=60)
    assert plain.json()["choices"][0]["message"] == other.json()["choices"][0]["message"]
    assert "x-parse-warning" not in plain.headers
    warning = other.headers["x-parse-warning"]
    assert "colour" in warning and r"a[b\n" in warning and r"\ud800\xe9" in warning and warning.isascii()
    body = {"messages": [{**USER[0], "mood": "good"}], "max_tokens": 4, "stream": True, "stream_options": {"x": 1}}
    for response in (served.post(CHAT, body), served.post("/tokenize", {"messages": body["messages"], "y": 1})):
        assert response.status_code == 200 and "messages.0.mood" in response.headers["x-parse-warning"]
    switch = served.chat(max_tokens=4, chat_template_kwargs={"enable_thinkng": False})
    assert "chat_template_kwargs.enable_thinkng" in switch.headers["x-parse-warning"]
    for path, more in ((CHAT, {"max_tokens": 4}), (CHAT, {"max_tokens": 4, "stream": True}), ("/tokenize", {})):
        nameless = served.post(path, {"messages": USER, "": 0, **more})
        assert nameless.status_code == 200 and nameless.headers["x-parse-warning"] == "unknown fields ignored:"
    many = served.chat(max_tokens=4, **{f"field{i}" * 99: i for i in range(1000)})
    assert len(many.headers["x-parse-warning"]) < 1000


def test_a_strict_server_refuses_them(served):
    with running(served.runner, served.engine, strict=True) as strict:
        for fields, name in (
            ({"colour": 1}, "colour"),
            ({"a[b\n": 1}, r"a[b\n"),
            ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
            ({"chat_template_kwargs": {"enable_thinkng": False}}, "chat_template_kwargs.enable_thinkng"),
        ):
            response = strict.chat(max_tokens=4, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unknown_field", name)
            assert error["message"] == f"unknown field {name}: leave it out"
        assert strict.post("/detokenize", {"tokens": [65], "x": 1}).status_code == 400
        misspelt = strict.chat(max_tokns=4).json()["error"]["message"]
        assert misspelt == "unknown field max_tokns: did you mean 'max_tokens'?"
        assert strict.chat(max_tokens=4, user="me").status_code == 200


@pytest.mark.parametrize("threshold", [0.0, 1.01])
@pytest.mark.slow
def test_where_an_answer_ends_is_the_engines(served, threshold):
    def own(**options: Any) -> Generation:
        return served.engine.generate(PROMPTS[1], max_new_tokens=32, threshold=threshold, **options)

    free = own()
    token = free.token_ids[9]
    stop = free.text[2:4]
    for fields, options in (
        ({"stop_token_ids": [token]}, {"stop_token_ids": (token,)}),
        ({"stop_token_ids": [token], "min_tokens": 20}, {"stop_token_ids": (token,), "min_tokens": 20}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop": stop, "min_tokens": 12}, {"stop": (stop,), "min_tokens": 12}),
    ):
        wanted = own(**options)
        answer = served.chat(PROMPTS[1], max_tokens=32, parse={"threshold": threshold}, **fields).json()
        text = wanted.text.removesuffix(stop) if wanted.finish_reason == "stop" else wanted.text
        assert answer["choices"][0]["message"]["content"] == text, fields
        assert answer["usage"]["completion_tokens"] == len(wanted.token_ids)
        assert answer["choices"][0]["finish_reason"] == ("length" if wanted.finish_reason == "length" else "stop")
        streamed = served.chat(PROMPTS[1], max_tokens=32, parse={"threshold": threshold}, stream=True, **fields)
        pieces = [choice["delta"].get("content", "") for chunk in chunks_of(streamed) for choice in chunk["choices"]]
        assert "".join(pieces) == text


def test_extra_fields_of_messages_reach_the_template_or_are_ignored(sampling):
    marked = {"type": "text", "text": PROMPTS[0], "cache_control": {"type": "ephemeral"}}
    history = [
        {"role": "user", "content": [marked], "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "8", "reasoning_content": "easy"},
        {"role": "user", "content": "Sure?", "reasoning_content": "not the assistant's"},
    ]
    for name in ("reasoning_content", "reasoning"):
        history[1] = {"role": "assistant", "content": "8", name: "easy"}
        body = {"messages": history, "max_tokens": 12, "temperature": 0, "chat_template_kwargs": {"think": True}}
        answer = sampling.post(CHAT, body)
        assert answer.status_code == 200 and "x-parse-warning" not in answer.headers, answer.text
        messages = [
            {"role": "user", "content": PROMPTS[0]},
            {"role": "assistant", "content": "8", "reasoning_content": "easy"},
            {"role": "user", "content": "Sure?"},
        ]
        prompt = Chat(messages, {"think": True})
        own = sampling.engine.generate(prompt, max_new_tokens=12)
        assert answer.json()["choices"][0]["message"]["content"] == own.text
        ids = sampling.engine.target.render(prompt)
        assert sampling.engine.target.tokenizer.decode(ids[:7]) == "T<easy>"
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)
        body = {"messages": history, "chat_template_kwargs": {"think": True}}
        assert sampling.post("/tokenize", body).json()["tokens"] == ids


@pytest.mark.slow
def test_the_generation_config_sets_the_default_sampling(sampling):
    def own(temperature: float = 0.7, top_p: float = 0.8, top_k: int = 20, **options: Any) -> str:
        how = Sampling(temperature, top_p, top_k, seed=4)
        settings = {"max_new_tokens": 24, "resume_sampling": how, "draft_sampling": how, **options}
        return sampling.engine.generate(PROMPTS[2], **settings).text

    for fields, wanted in (
        ({}, own()),
        ({"temperature": 1.5}, own(1.5)),
        ({"top_p": 1, "top_k": -1}, own(top_p=1.0, top_k=0)),
        ({"temperature": 0}, own(0.0)),
        ({"parse": {"draft_temperature": 0}}, own(draft_sampling=Sampling(0.0, 0.8, 20, seed=4))),
        ({"parse": {"mode": "exact"}}, own(0.0, mode="exact")),
    ):
        found = sampling.chat(PROMPTS[2], max_tokens=24, seed=4, **fields).json()
        assert found["choices"][0]["message"]["content"] == wanted, fields
    with running(sampling.runner, sampling.engine, generation_config=False) as greedy:
        assert greedy.chat(PROMPTS[2], max_tokens=24).json()["choices"][0]["message"]["content"] == own(0.0)


def test_a_promise_that_does_not_cover_the_default_sampling_is_known_at_the_start(make_engine):
    engine = make_engine(calibrations=[calibrated(make_engine())])
    engine.target.model.generation_config.update(temperature=0.7, top_p=0.8, top_k=20)
    runner = ThreadRunner(engine)
    try:
        promised = RiskSettings(0.05)
        warning = unpromised_default(runner, ApiSettings(risk_settings=promised))
        assert warning and "(temperature 0.7, top_p 0.8, top_k 20), without a promise: " in warning
        assert unpromised_default(runner, ApiSettings(risk_settings=promised, generation_config=False)) is None
        assert unpromised_default(runner, ApiSettings()) is None
        sampled = replace(runner.calibrations[0], sampling=Sampling(0.7, 0.8, 20))
        runner.calibrations = (runner.calibrations[0], sampled)
        assert unpromised_default(runner, ApiSettings(risk_settings=promised)) is None
        sampled = replace(sampled, promises=dict.fromkeys(sampled.promises))
        runner.calibrations = (runner.calibrations[0], sampled)
        assert "without a promise" in str(unpromised_default(runner, ApiSettings(risk_settings=promised)))
    finally:
        runner.close()


def test_the_start_of_a_server_logs_it(monkeypatch, capsys):
    monkeypatch.setattr(
        "parse_infer.cli.commands.serve.unpromised_default", lambda runner, settings: "no promise there"
    )
    monkeypatch.setattr("parse_infer.serve.server.ApiServer.run", lambda self, sockets: self._on_start())
    assert main(["serve", "--port", "0"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert (line["level"], line["event"]) == ("warning", "no promise there")


@pytest.mark.slow
def test_continuous_usage_comes_with_each_chunk(served):
    body = {"messages": USER, "max_tokens": 24, "n": 2, "stream": True, "parse": {"threshold": 1.01}}
    often = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(served.post(CHAT, {**body, "stream_options": often}))
    prompt, seen = len(served.engine.target.render(PROMPTS[0])), {0: [], 1: []}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
        seen[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
    for counts in seen.values():
        assert counts[0] == 0 and counts[-1] == 24 and counts == sorted(counts) and len(set(counts)) > 3, counts
    assert last["usage"]["completion_tokens"] == 48 and not last["choices"]
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": False}):
        usages = [chunk["usage"] for chunk in chunks_of(served.post(CHAT, {**body, "stream_options": options}))]
        assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"] == 48
    for options in ({"continuous_usage_stats": True}, {}):
        assert all("usage" not in chunk for chunk in chunks_of(served.post(CHAT, {**body, "stream_options": options})))


@pytest.mark.slow
def test_a_request_without_a_promise_gets_a_warning(make_engine):
    engine = make_engine()
    with running(
        ThreadRunner(make_engine(calibrations=[calibrated(engine)])), engine, risk_settings=RiskSettings(0.05)
    ) as server:
        covered = server.chat(max_tokens=24)
        assert covered.json()["choices"][0]["parse"]["risk"] == 0.05 and "x-parse-warning" not in covered.headers
        assert covered.json()["choices"][0]["parse"]["unpromised"] is None
        for fields, reason in (
            ({"temperature": 1}, "there are promises for greedy answers"),
            ({"max_tokens": 8}, "max_new_tokens is 8"),
            ({"ignore_eos": True}, "omit ignore_eos"),
            ({"min_tokens": 3}, "omit min_tokens"),
            ({"chat_template_kwargs": {"think": True}}, "another 'think' of the chat template"),
            ({"parse": {"threshold": 0.5}}, "a promise chooses its own threshold"),
            ({"parse": {"draft_text": "4"}}, "covers only what the draft model writes"),
        ):
            for stream in (False, True):
                response = server.chat(**{"max_tokens": 24, "stream": stream, **fields})
                assert reason in response.headers["x-parse-warning"], fields
                last = chunks_of(response)[-1] if stream else response.json()
                statistics = last["choices"][0]["parse"]
                assert statistics["risk"] is None and reason in statistics["unpromised"]
        switched = server.chat(max_tokens=24, parse={"risk": 0.05}, chat_template_kwargs={"think": True})
        assert switched.status_code == 400 and "omit it" in switched.json()["error"]["message"]
        alone = server.chat(max_tokens=24, parse={"mode": "target"})  # loses nothing against the target
        assert "x-parse-warning" not in alone.headers and alone.json()["choices"][0]["parse"]["unpromised"] is None
