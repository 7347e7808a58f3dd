"""Answers through the server: the engine's own text, streamed or not, for one client and for many."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, get_args

import httpx
import openai
import pytest

from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.decoding import adaptive
from parse_infer.decoding.adaptive import MIN_SAMPLES
from parse_infer.decoding.block_length import FIRST, BlockLength
from parse_infer.engine import ParseEngine
from parse_infer.request.events import Done, Drafted
from parse_infer.request.output import Fallback, Generation
from parse_infer.serve.admission import Limits
from parse_infer.serve.app import create_app
from parse_infer.serve.audit import Audit
from parse_infer.serve.choice_state import ChoiceState
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.protocol.chat import ChatCompletion
from parse_infer.serve.protocol.completion import Completion
from parse_infer.serve.runner import Job, Moment
from parse_infer.serve.settings import ApiSettings, RiskSettings
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling, seed_of
from parse_infer.text.prompts import Verbatim
from tests.parse_infer.serve.conftest import running

PROMPTS = [f"Tom has {n} apples. How many are left?" for n in range(8)]


def test_an_answer_that_nobody_reads_as_it_is_written_wakes_the_loop_once(make_engine, monkeypatch):
    """And loses no event for that."""
    runner = ThreadRunner(make_engine())

    async def events(streamed: bool) -> tuple[list[str], int]:
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *what: (woken.append(what), wake(*what))[1])
        job = Job(PROMPTS[0], GenerationSettings(24), streamed=streamed)
        found = [moment.event async for moment in runner.stream(job)]
        assert isinstance(found[-1], Done)
        return [str(event) for event in found[:-1]], len(woken)

    (streamed, several), (unwatched, once) = asyncio.run(events(True)), asyncio.run(events(False))
    assert streamed == unwatched and len(streamed) > 2
    assert once == 1 <= several <= len(streamed) + 2


def test_only_a_stream_begins_with_a_short_block(make_engine, monkeypatch):
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: False)  # not by measured time
    runner = ThreadRunner(make_engine())

    async def first(streamed: bool) -> int:
        job = Job(PROMPTS[0], GenerationSettings(48, mode="exact"), streamed=streamed)
        async with aclosing(runner.stream(job)) as moments:
            return (await anext(moments)).event.n_tokens

    assert [asyncio.run(first(streamed)) for streamed in (True, False)] == [FIRST, 48]
    runner.close()


def test_the_engine_is_loaded_in_the_thread_that_uses_it(make_engine):
    """In another one, OpenMP would keep a second set of threads; what goes wrong is raised here all the same."""
    threads = []

    def load() -> ParseEngine:
        threads.append(threading.current_thread().name)
        return make_engine()

    assert ThreadRunner(load).threshold == make_engine().threshold
    assert threads == ["parse-engine"]

    def fail() -> ParseEngine:
        raise OSError("no such adapter")

    with pytest.raises(OSError, match="no such adapter"):
        ThreadRunner(fail)


def streamed(client: openai.OpenAI, content: str, **options: Any) -> tuple[str, list[Any]]:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], stream=True, **options
        )
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    return "".join(texts), chunks


def whole(client: openai.OpenAI, content: str, **options: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **options)
    return answer.choices[0].message.content


@pytest.mark.parametrize("clients", [1, 16])
@pytest.mark.slow
def test_text_is_the_engines_streamed_or_not(served, clients):
    own = {prompt: served.engine.generate(prompt, max_new_tokens=32).text for prompt in PROMPTS}
    assert len(set(own.values())) > 1
    with served.client as client, ThreadPoolExecutor(clients) as pool:
        for answer in (whole, lambda *args, **options: streamed(*args, **options)[0]):
            texts = pool.map(lambda prompt, answer=answer: answer(client, prompt, max_tokens=32), PROMPTS * 2)
            assert list(texts) == [own[prompt] for prompt in PROMPTS * 2]


@pytest.mark.parametrize("block_tokens", ["whole", 6])
def test_characters_that_span_tokens_arrive_whole(served_bytes, block_tokens):
    own = served_bytes.engine.generate(PROMPTS[0], max_new_tokens=48, block_tokens=block_tokens)
    assert not own.text.isascii()
    with served_bytes.client as client:
        text, chunks = streamed(
            client, PROMPTS[0], max_tokens=48, extra_body={"parse": {"block_tokens": block_tokens}}
        )
    assert text == own.text and len(chunks) > 3


def test_a_stream_begins_with_the_role_and_ends_with_usage(served):
    own = served.engine.generate(PROMPTS[1], max_new_tokens=32)

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": PROMPTS[1]}],
                stream=True,
                stream_options={"include_usage": True},
                max_completion_tokens=32,
            )
            return [chunk async for chunk in stream]

    first, *middle, closing, last = asyncio.run(ask())
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == own.text
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert closing.choices[0].finish_reason == "length" and closing.choices[0].parse["rounds"] == own.stats.rounds
    assert not last.choices and last.usage.completion_tokens == 32
    assert last.usage.prompt_tokens == len(served.engine.target.render(PROMPTS[1]))


@pytest.mark.parametrize("at", [5, 20])
@pytest.mark.slow
def test_stop_strings_are_left_out_also_across_pieces(served, at):
    text = served.engine.generate(PROMPTS[2], max_new_tokens=32, threshold=0.0).text
    stop = text[at : at + 3]  # three tokens
    kept = text[: text.index(stop)]
    for threshold in (0.0, 1.01):  # inside the draft, and token by token
        text = served.engine.generate(PROMPTS[2], max_new_tokens=32, threshold=threshold).text
        kept = text[: text.index(stop)] if stop in text else text
        options = {"max_tokens": 32, "stop": [stop, text[:2] + "§"], "extra_body": {"parse": {"threshold": threshold}}}
        with served.client as client:
            assert whole(client, PROMPTS[2], **options) == kept
            assert streamed(client, PROMPTS[2], **options)[0] == kept
        answer = served.chat(PROMPTS[2], max_tokens=32, stop=stop, parse={"threshold": threshold}).json()["choices"][0]
        assert "".join(span["text"] for span in answer["parse"]["spans"]) == kept
        assert answer["finish_reason"] == ("stop" if stop in text else "length")


def test_what_is_sampled_depends_on_seed_and_number(served):
    fields = {"temperature": 1, "top_p": 0.9, "n": 2, "max_tokens": 24}
    texts = [c["message"]["content"] for c in served.chat(PROMPTS[3], seed=4, **fields).json()["choices"]]
    for seed, text in ((4, texts[0]), (seed_of(4, 1), texts[1])):
        sampling = Sampling(1, 0.9, seed=seed)
        own = served.engine.generate(PROMPTS[3], max_new_tokens=24, draft_sampling=sampling, resume_sampling=sampling)
        assert own.text == text
    assert texts[0] != texts[1]


def test_the_assistants_last_message_is_continued(served):
    messages = [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "text", "text": "1"}]},
    ]
    messages.append({"role": "assistant", "content": "one"})
    body = {"messages": messages, "max_tokens": 16, "continue_final_message": True}
    plain = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1"}, messages[2]]
    own = served.engine.generate(plain, max_new_tokens=16).text
    assert served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == own
    for wrong in ({**body, "continue_final_message": False}, {**body, "messages": messages[:2]}):
        error = served.post("/v1/chat/completions", wrong)
        assert error.status_code == 400 and error.json()["error"]["param"] == "continue_final_message"


def calibrated(engine: ParseEngine, disagreement: float = 0.1) -> Calibration:
    """Promises 0.01 where nothing is accepted, and 0.05 where everything is."""
    models = engine.describe()
    tried = [
        TestedPoint(OperatingPoint(1.01, 8), 0, 0.01, 1.0, 0.01),
        TestedPoint(OperatingPoint(0.0), 0, 0.04, 2.0, disagreement),
    ]
    return Calibration("t", 300, "x", "lost", 0.9, 24, models, tried, {0.01: 0, 0.05: 1})


def test_a_request_may_ask_for_a_promise(make_engine):
    engine = make_engine()
    promised = calibrated(engine)
    with running(ThreadRunner(make_engine(calibrations=[promised])), engine) as server:
        for risk, own in ((0.01, {"threshold": 1.01, "block_tokens": 8}), (0.05, {"threshold": 0.0})):
            text = engine.generate(PROMPTS[1], max_new_tokens=24, **own).text
            answer = server.chat(PROMPTS[1], max_tokens=24, parse={"risk": risk}).json()
            assert answer["choices"][0]["message"]["content"] == text
        wrong = server.chat(PROMPTS[1], max_tokens=24, parse={"risk": 0.02})
        assert wrong.status_code == 400 and "the nearest promise is 0.01" in wrong.json()["error"]["message"]


def test_a_promise_about_samples_covers_requests_with_its_sampling(make_engine):
    """A body that names a risk and no sampling gets the calibration's, and other sampling has no promise."""
    engine = make_engine()
    promised = replace(calibrated(engine), sampling=Sampling(0.9, top_k=40), samples=2)
    options = {"max_tokens": 24, "seed": 4}
    with running(ThreadRunner(make_engine(calibrations=[promised])), engine) as server:
        own = server.chat(PROMPTS[1], **options, temperature=0.9, top_k=40, parse={"risk": 0.05}).json()
        bare = server.chat(PROMPTS[1], **options, parse={"risk": 0.05}).json()
        texts = [answer["choices"][0]["message"]["content"] for answer in (own, bare)]
        assert texts[0] == texts[1] and bare["choices"][0]["parse"]["risk"] == 0.05
        other = server.chat(PROMPTS[1], **options, temperature=0.5, top_k=40, parse={"risk": 0.05})
        assert other.status_code == 400
        assert other.json()["error"]["message"].endswith("there are promises for temperature 0.9, top_k 40")


@pytest.mark.slow
def test_a_server_with_two_calibrations_promises_by_the_sampling_of_a_request(make_engine):
    """Greedy requests keep whole drafts here, and sampled ones nothing."""
    engine = make_engine()
    greedy, warm = calibrated(engine), Sampling(0.9, top_k=40)
    sampled = replace(greedy, sampling=warm, samples=2, loss="accuracy", promises={0.05: 0})
    body = {"max_tokens": 24, "seed": 4}

    def said(answer) -> tuple[str, float | None, str]:
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"], choice["parse"]["risk"], choice["parse"]["unpromised"] or ""

    kept = engine.generate(PROMPTS[1], max_new_tokens=24, threshold=0.0).text
    own = {"threshold": 1.01, "block_tokens": 8, "resume_sampling": replace(warm, seed=4)}
    drawn = engine.generate(PROMPTS[1], max_new_tokens=24, **own).text
    runner = ThreadRunner(make_engine(calibrations=[greedy, sampled]))
    with running(runner, engine, risk_settings=RiskSettings(0.05, audit=1.0)) as server:
        for asked in ({}, {"parse": {"risk": 0.05}}):
            assert said(server.chat(PROMPTS[1], **body, **asked)) == (kept, 0.05, "")
            assert said(server.chat(PROMPTS[1], **body, **asked, temperature=0.9, top_k=40)) == (drawn, 0.05, "")
        completed = server.chat(PROMPTS[1], **body, temperature=0.9, parse={"risk": 0.05})
        assert said(completed) == (drawn, 0.05, ""), "the promise at this temperature has the rest of the sampling"
        assert said(server.chat(PROMPTS[1], **body, parse={"risk": 0.01}))[1] == 0.01
        reason = "no promise for temperature 0.6; there are promises for greedy answers and temperature 0.9, top_k 40"
        unpromised = said(server.chat(PROMPTS[1], **body, temperature=0.6))
        assert unpromised[1:] == (None, f"risk is 0.05, but there is {reason}")
        for temperature, risk, message in ((0.6, 0.05, reason), (0.9, 0.01, "the nearest promise is 0.05")):
            refused = server.chat(PROMPTS[1], **body, temperature=temperature, parse={"risk": risk})
            assert refused.status_code == 400 and message in refused.json()["error"]["message"]
        end = time.monotonic() + 10
        while not all(f'sampling="{each.sampling}"' in server.metrics for each in (greedy, sampled)):
            assert time.monotonic() < end, "an audit compares the answers of each sampling with its own rate"
            server.chat(PROMPTS[1], **body, temperature=0.9, top_k=40)


def test_a_promised_sampling_is_the_servers_own_if_it_can_be(make_engine):
    engine = make_engine()
    greedy = calibrated(engine)
    sampled = replace(greedy, sampling=Sampling(0.9, top_k=40), samples=2)
    with running(ThreadRunner(make_engine(calibrations=[sampled, greedy])), engine) as server:
        own = server.chat(PROMPTS[1], max_tokens=24, parse={"risk": 0.05}).json()["choices"][0]
        assert own["message"]["content"] == engine.generate(PROMPTS[1], max_new_tokens=24, threshold=0.0).text


def test_any_error_of_the_check_reaches_the_caller(make_engine, monkeypatch):
    runner = ThreadRunner(make_engine())
    monkeypatch.setattr(ParseEngine, "check_calibrations", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.check_calibrations()
    runner.close()


def audited(metrics: str) -> Counter[str]:
    found = re.findall(r'^parse_audited_total\{result="(\w+)",risk="0.05",.*\} (\d+)', metrics, re.MULTILINE)
    return Counter({result: int(count) for result, count in found})


@pytest.mark.slow
def test_a_server_promises_what_its_calibration_covers_and_watches_it(make_engine, capfd):
    """Random models agree on nothing: drafts that are accepted whole break "at most 10 % differ" at once."""
    engine = make_engine()
    differing, risk_settings = 0, RiskSettings(0.05, audit=1.0)
    with running(
        ThreadRunner(make_engine(calibrations=[calibrated(engine)])), engine, risk_settings=risk_settings
    ) as server:
        for i in range(6):
            prompt = f"{PROMPTS[i % 3]} {i}"
            answer = server.chat(prompt, max_tokens=24).json()["choices"][0]
            assert answer["parse"]["risk"] == 0.05
            own = engine.generate(prompt, max_new_tokens=24, threshold=0)
            assert answer["message"]["content"] == own.text
            differing += own.text != engine.generate_target(prompt, max_new_tokens=24).text
            end = time.monotonic() + 10
            while (counts := audited(server.metrics))["same"] + counts["differs"] <= i:
                assert time.monotonic() < end, counts
        assert counts["differs"] == differing >= 3
        assert 'parse_promise_implausible{risk="0.05",sampling="greedy answers"} 1.0' in server.metrics
        own = server.chat(PROMPTS[0], max_tokens=24, parse={"risk": 0.01}).json()["choices"][0]["parse"]
        assert own["risk"] == 0.01, "a request may ask for another promise"
        parts = {"threshold": 0.5}, {"mode": "target"}, {"draft_text": "4"}
        for uncovered in ({"temperature": 1}, {"max_tokens": 8}, *({"parse": part} for part in parts)):
            fields = {"max_tokens": 24, **uncovered}
            assert server.chat(PROMPTS[0], **fields).json()["choices"][0]["parse"]["risk"] is None
    warned = [line for line in capfd.readouterr().err.splitlines() if "promise implausible" in line]
    assert len(warned) == 1 and json.loads(warned[0])["risk"] == 0.05


@pytest.mark.slow
def test_an_audit_ends_after_the_time_of_a_request(make_engine, monkeypatch, capfd):
    runner = ThreadRunner(make_engine(calibrations=[calibrated(make_engine())]))
    stream = runner.stream

    async def stuck(job: Job) -> AsyncGenerator[Moment, None]:
        if job.audit:
            await asyncio.sleep(60)
        async with aclosing(stream(job)) as moments:
            async for moment in moments:
                yield moment

    monkeypatch.setattr(runner, "stream", stuck)
    log, end = "", time.monotonic() + 20
    with running(runner, make_engine(), Limits(request_s=1.0), risk_settings=RiskSettings(0.05, audit=1.0)) as server:
        assert server.chat(PROMPTS[0], max_tokens=24).status_code == 200
        while "audit failed" not in log:
            assert time.monotonic() < end
            time.sleep(0.02)
            log += capfd.readouterr().err
    assert "TimeoutError" in log


def test_an_audit_is_no_answer_in_progress(make_engine):
    """Else one answer fewer would count as waiting."""
    runner = ThreadRunner(make_engine())

    async def counted(audit: bool) -> int:
        job = Job(PROMPTS[0], GenerationSettings(200), alone=True, audit=audit)
        async with aclosing(runner.stream(job)) as moments:
            await anext(moments)
            return runner.running

    assert [asyncio.run(counted(audit)) for audit in (False, True)] == [1, 0]
    runner.close()


def test_the_rate_that_is_audited_is_the_one_that_was_calibrated(make_engine):
    """Answers with an unusual draft were calibrated, those of other fallbacks were not."""
    engine = make_engine()
    runner = ThreadRunner(make_engine(calibrations=[calibrated(engine)]))
    audit = Audit(runner, Metrics(), RiskSettings(audit=1.0), limit_s=60)
    own = engine.generate_target(PROMPTS[0], max_new_tokens=24)

    async def audited(fallback: Fallback | None) -> bool:
        before = audit._tests["greedy answers", "0.05"].observations
        choice = ChoiceState(0, Job(PROMPTS[0], GenerationSettings(24, risk=0.05)), 1, 0.0)
        choice.generation = replace(own, fallback=fallback)
        audit.consider(choice)
        if audit._task is not None:
            await audit._task
            audit._task = None
        return audit._tests["greedy answers", "0.05"].observations > before

    kinds = (None, *get_args(Fallback))
    assert [kind for kind in kinds if asyncio.run(audited(kind))] == [None, "unusual_draft"]
    runner.close()


@pytest.mark.slow
def test_parse_options_are_the_engines(served):
    def generate(**options: Any) -> Generation:
        return served.engine.generate(PROMPTS[4], max_new_tokens=24, **options)

    draft = "The answer is 4."
    for parse, own in [
        ({"threshold": 1.01, "keep_greedy_match": False}, generate(threshold=1.01, keep_greedy_match=False)),
        ({"mode": "exact", "block_tokens": 8}, generate(mode="exact", block_tokens=8)),
        ({"block_tokens": 8}, generate(block_tokens=8)),
        ({"block_tokens": "whole"}, generate(block_tokens="whole")),
        ({"draft_text": draft, "threshold": 0}, generate(draft_text=draft, threshold=0)),
        ({"mode": "target"}, served.engine.generate_target(PROMPTS[4], max_new_tokens=24)),
    ]:
        answer = served.chat(PROMPTS[4], max_tokens=24, parse=parse).json()
        statistics = answer["choices"][0]["parse"]
        assert answer["choices"][0]["message"]["content"] == own.text
        spans = [(s.text, s.source, s.n_tokens, s.validity) for s in own.spans]
        assert [tuple(span.values()) for span in statistics["spans"]] == [
            (text, source, n, pytest.approx(validity)) for text, source, n, validity in spans
        ]
        assert (
            statistics["accepted_tokens"] == own.stats.accepted_tokens
            and statistics["kept"] == own.stats.acceptance_rate
        )
        assert answer["usage"]["completion_tokens"] == len(own.token_ids)
        assert set(statistics["timings"]) > {"draft_s", "verify_s", "resume_s", "total_s"}
        ChatCompletion.model_validate(answer)  # what the OpenAPI schema promises
    predicted = served.chat(PROMPTS[4], max_tokens=24, prediction={"type": "content", "content": draft}).json()
    own = generate(draft_text=draft)
    assert predicted["choices"][0]["message"]["content"] == own.text
    assert predicted["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": own.stats.accepted_tokens,
        "rejected_prediction_tokens": own.stats.draft_tokens - own.stats.accepted_tokens,
    }


def test_a_promise_for_other_models_is_refused_at_the_start(make_engine):
    engine = make_engine()
    other = calibrated(engine)
    other = replace(other, models={**other.models, "dtype": "bfloat16"})
    runner = ThreadRunner(make_engine(calibrations=[other]))
    try:
        for risk_settings in (RiskSettings(0.05), RiskSettings(audit=0.5)):
            with pytest.raises(ValueError, match="made with another dtype"):
                create_app(runner, ApiSettings(risk_settings=risk_settings))
        create_app(runner)  # of no concern without a promise
    finally:
        runner.close()


def test_an_empty_draft_is_no_draft():
    choice = ChoiceState(0, Job(PROMPTS[0], GenerationSettings(8)), 1, 0.0)
    for n_tokens, drafted in ((0, False), (3, True), (0, True)):
        choice.take(Moment(Drafted(1, "", n_tokens), 0.0))
        assert choice.drafted is drafted


@pytest.mark.slow
def test_metrics_count_the_decisions_of_adaptive_requests(make_engine, monkeypatch):
    monkeypatch.setattr(adaptive, "CLEAR_SPEEDUP", math.inf)  # else the pace on this machine decides
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        for n in range(2 * MIN_SAMPLES):  # as long as nothing is known, both are tried
            assert server.chat(PROMPTS[n % 4], max_tokens=8, parse={"adaptive": True}).status_code == 200
        server.chat(PROMPTS[0], max_tokens=8)
        for decided in ({"mode": "target"}, {"draft_text": "4"}):  # there is nothing to decide
            server.chat(PROMPTS[0], max_tokens=8, parse=decided)
        decisions = re.findall(r'^parse_decisions_total\{decision="(\w+)"\} (\S+)$', server.metrics, re.MULTILINE)
    assert dict(decisions) == {"draft": str(float(MIN_SAMPLES)), "alone": str(float(MIN_SAMPLES))}


def test_the_server_sets_the_default_of_adaptive(make_engine):
    with running(ThreadRunner(make_engine()), make_engine(), adaptive=True) as server:
        for fields in (
            {},
            {"parse": {"threshold": 0.5}},
            {"parse": {"adaptive": False}},
            {"parse": {"mode": "target"}},
        ):
            assert server.chat(PROMPTS[0], max_tokens=8, **fields).status_code == 200
        decisions = re.findall(r'^parse_decisions_total\{decision="(\w+)"\} (\S+)$', server.metrics, re.MULTILINE)
    assert dict(decisions) == {"draft": "2.0"}, "the other two set adaptive themselves"


def test_events_carry_drafts_and_rejections_as_they_happen(served):
    parse = {"events": True, "block_tokens": 8, "threshold": 1.0}  # which no validity reaches
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "stream": True, "max_tokens": 32, "parse": parse}
    events, text, busy = [], "", []
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if "event" in choice.get("parse", {}):
                    events.append(choice["parse"])
                    busy.append(served.queue.answers)
                text += choice["delta"].get("content", "")
        assert line == "" or line == "data: [DONE]"
    assert [event["event"] for event in events[:3]] == ["drafted", "verified", "accepted"]
    assert (
        events[2]["text"] + events[2]["rejected"]
        == events[0]["text"]
        == "".join(s["text"] for s in events[1]["segments"])
    )
    assert max(event["round"] for event in events) > 1 and busy[0] == 1
    assert "".join(event["text"] for event in events if event["event"] in ("accepted", "resumed")) == text
    assert text == served.engine.generate(PROMPTS[0], max_new_tokens=32, threshold=1.0, block_tokens=8).text


def test_completions_continue_text_and_tokens_as_they_stand(served):
    ids = served.engine.target.tokenizer.encode(PROMPTS[5])
    tokens = [ids, [*ids[:7], 257]]  # with one of the template's own
    texts = [served.engine.generate(Verbatim(p), max_new_tokens=16).text for p in PROMPTS[:2]]
    own = [
        served.engine.generate(Verbatim.of_tokens(p, served.engine.target.tokenizer), max_new_tokens=16).text
        for p in tokens
    ]
    with served.client as client:
        for prompt, wanted in ((PROMPTS[0], texts[:1]), (PROMPTS[:2], texts), (tokens[0], own[:1]), (tokens, own)):
            answer = client.completions.create(model="tiny", prompt=prompt)
            assert [choice.text for choice in answer.choices] == wanted
            chunks = list(client.completions.create(model="tiny", prompt=prompt, stream=True, max_tokens=16))
            for index, text in enumerate(wanted):
                mine = [c.text for chunk in chunks for c in chunk.choices if c.index == index]
                assert "".join(mine) == text
    answer = served.post("/v1/completions", {"prompt": tokens, "n": 2}).json()
    Completion.model_validate(answer)
    assert answer["usage"]["prompt_tokens"] == len(ids) + 8 and answer["usage"]["completion_tokens"] == 64


def test_tokenize_and_the_model_list(served):
    with served.client as client:
        assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    tokens = served.post("/tokenize", {"prompt": "3 apples", "add_special_tokens": False}).json()
    assert tokens["tokens"] == served.engine.target.tokenizer.encode("3 apples", add_special_tokens=False)
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 2048
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "3 apples"}
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "3"}], "return_token_strs": True}).json()
    assert chat["tokens"] == served.engine.target.render("3") and chat["token_strs"][0] == "<|user|>"
    info = httpx.get(served.url + "/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and "assistant" in info["chat_template"]
