"""The coordinator's promises, over small servers in this process: the local engine's answers, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from parse_infer.backends.pool.client import RequestRejected
from parse_infer.backends.pool.retries import Failing, Unavailable
from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.request.events import Accepted, Done, Drafted, Resumed, Verified
from parse_infer.request.output import Generation
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.settings.acceptance import maximal_valid_prefix
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text import tokenizer_spec
from parse_infer.text.cuts import CutPolicy
from tests.parse_infer.backends.conftest import CUTS
from tests.parse_infer.backends.fake_server import FakeServer
from tests.parse_infer.language_models import language_model, printable, word_tokenizer
from tests.parse_infer.serve.conftest import running

PROMPT = "Tom has 5 apples."
PROMPTS = [PROMPT, "How many?", "Ann sells 48 clips.", "2 + 2"]
WHOLE = {"block_tokens": "whole"}  # as `auto` is over servers


def partial_threshold(engine: ParseEngine, prompt: str = PROMPT) -> float:
    """One at which some segments of the first draft are kept, but not all."""
    _, verified, *_ = itertools.islice(engine.stream(prompt, max_new_tokens=40, **WHOLE), 2)
    validity = [segment.validity for segment in verified.segments]
    between = [(a + b) / 2 for a, b in itertools.pairwise(sorted(validity))]  # a server tells it to a few digits less
    return next(t for t in between if 0 < maximal_valid_prefix(validity, t) < len(validity))


def same(ours: Generation, theirs: Generation) -> bool:
    """Above a threshold of 1 the text alone: the local engine drafts, and over servers the target answers alone."""
    spans = [[(s.text, s.source, s.n_tokens) for s in each.spans] for each in (ours, theirs)]
    alone = not ours.stats.draft_tokens
    results = [(each.token_ids, each.finish_reason) for each in (ours, theirs)]
    return results[0] == results[1] and (alone or spans[0] == spans[1])


@pytest.mark.parametrize("local_rows", [0, 3])
@pytest.mark.parametrize("options", [{}, {"block_tokens": 12}, {"acceptance": "longest"}, {"stop": ("e",)}])
@pytest.mark.slow
def test_answers_are_those_of_the_local_engine(engine, connect, options, local_rows):
    coordinator, (_target,), draft = connect(engine, local_rows=local_rows)
    for threshold in (0.0, partial_threshold(engine), 1.01):
        settings = {"max_new_tokens": 40, "threshold": threshold, "block_tokens": "whole", **options}
        found = coordinator.generate(PROMPTS, **settings)
        wanted = [engine.generate(prompt, **settings) for prompt in PROMPTS]
        assert all(map(same, found, wanted))
    assert coordinator.running == 0
    assert not (local_rows and draft.bodies)


@pytest.mark.parametrize("block_tokens", ["whole", 12])
def test_the_judge_without_training_is_the_same_over_servers(engine, connect, block_tokens):
    judge = MinP(0.1).load(engine.target.tokenizer)
    engine = ParseEngine.from_models(engine.target, engine.draft, judge, cut_policy=CUTS)
    coordinator, *_ = connect(engine)
    wanted = [engine.generate(prompt, max_new_tokens=40, block_tokens=block_tokens) for prompt in PROMPTS]
    found = coordinator.generate(PROMPTS, max_new_tokens=40, block_tokens=block_tokens)
    assert all(map(same, found, wanted)) and any(answer.stats.accepted_tokens for answer in wanted)


@pytest.mark.slow
def test_without_a_judge_an_answer_is_lossless_speculation(engine, connect):
    bare = ParseEngine.from_models(engine.target, engine.draft)
    coordinator, *_ = connect(bare)
    expected = [engine.generate_target(prompt, max_new_tokens=40).token_ids for prompt in PROMPTS]
    found = coordinator.generate(PROMPTS, max_new_tokens=40)
    assert [answer.token_ids for answer in found] == expected and all(answer.lossless for answer in found)
    assert any(answer.stats.accepted_tokens for answer in found)
    sampled = coordinator.generate(PROMPTS[0], max_new_tokens=40, temperature=0.8)  # then the target writes alone
    assert sampled.lossless and not sampled.stats.draft_tokens
    with pytest.raises(ValueError, match="has no judge"):
        coordinator.generate(PROMPTS[0], threshold=0.5)


def test_scores_have_the_cuts_of_the_local_engine(engine, connect):
    """More cuts than `max_cuts`: a judge that appends no tokens scores them all."""
    coordinator, *_ = connect(engine)
    response, cuts = "Tom has 5 apples. " * 8, CutPolicy("tokens", every=1)
    ours, theirs = (each.score(PROMPT, response, cut_policy=cuts) for each in (engine, coordinator))
    assert len(theirs.segments) == len(ours.segments) > cuts.max_cuts


def test_a_read_needs_a_token_behind_the_scored_response(make_engine, connect):
    engine = make_engine()
    coordinator, *_ = connect(engine)
    engine.target.window = n = len(engine.target.render(PROMPT)) + len("He has 5.")
    assert engine.score(PROMPT, "He has 5.", finished=False).segments
    with pytest.raises(ValueError, match=f"have {n + 1} tokens, beyond the context window"):
        coordinator.score(PROMPT, "He has 5.", finished=False)


def test_lossless_answers_ask_no_judge(engine, connect, monkeypatch):
    coordinator, *_ = connect(engine)
    scorers = (engine.backend.verifier.scorer, coordinator.backend.judge.judge)
    for scorer in scorers:
        monkeypatch.setattr(scorer, "score", lambda *_: pytest.fail("the judge was asked"), raising=True)
    alone = engine.generate_target(PROMPT, max_new_tokens=24).token_ids
    for each in (engine, coordinator):
        for settings in ({"mode": "exact"}, {"mode": "exact", "block_tokens": 6}):
            assert each.generate(PROMPT, max_new_tokens=24, **settings).token_ids == alone


def test_the_engine_answers_in_a_notebook_and_in_threads(engine, connect):
    """A notebook's event loop runs in the thread that asks."""
    coordinator, *_ = connect(engine)
    settings = {"max_new_tokens": 24, "threshold": 0.0, **WHOLE}
    wanted = [engine.generate(prompt, **settings).token_ids for prompt in PROMPTS]

    async def cell() -> list[list[int]]:
        streamed = list(coordinator.stream(PROMPTS[0], **settings))[-1].generation
        return [streamed.token_ids, *(each.token_ids for each in coordinator.generate(PROMPTS[1:], **settings))]

    assert asyncio.run(cell()) == wanted
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: coordinator.generate(prompt, **settings).token_ids, PROMPTS))
    assert found == wanted
    assert coordinator.generate(PROMPTS[0], **settings).token_ids == wanted[0]


def test_closing_a_stream_waits_for_no_other_thread(engine, connect):
    """The garbage collector may close one in a thread for which the event loop waits."""
    coordinator, *_ = connect(engine)
    stream = coordinator.stream(PROMPT, max_new_tokens=24, threshold=0.0, **WHOLE)
    next(stream)
    assert coordinator.running == 1

    async def close() -> None:
        await asyncio.wait_for(asyncio.to_thread(stream.close), 30)

    coordinator.backend.run(close())
    coordinator.generate(PROMPT, max_new_tokens=24, threshold=0.0, **WHOLE)
    assert coordinator.running == 0


def verified(engine: ParseEngine, prompt: str = PROMPT, **settings) -> Verified:
    return next(event for event in engine.stream(prompt, **settings) if isinstance(event, Verified))


def test_a_response_has_the_score_of_the_local_engine(engine, connect):
    coordinator, (target,), _ = connect(engine)
    response = engine.generate_target(PROMPT, max_new_tokens=60).text
    for cut_policy, finished in ((None, True), (CutPolicy("tokens", every=9), False)):
        target.bodies.clear()
        found, own = (each.score(PROMPT, response, cut_policy, finished) for each in (coordinator, engine))
        assert [(s.text, s.n_tokens) for s in found.segments] == [(s.text, s.n_tokens) for s in own.segments]
        assert [s.validity for s in found.segments] == pytest.approx([s.validity for s in own.segments], abs=1e-4)
        assert len(target.bodies) == 1 and found.threshold == own.threshold
    with pytest.raises(ValueError, match="give the text to score"):
        coordinator.score(PROMPT, " ")


@pytest.mark.parametrize("over_servers", [True, False])
@pytest.mark.slow
def test_many_prompts_are_taken_as_they_are_needed(engine, connect, over_servers):
    coordinator = connect(engine, parallel=2)[0] if over_servers else engine
    own = [g.text for g in engine.generate(PROMPTS * 5, max_new_tokens=6)]
    taken = []

    def prepared():
        for prompt in PROMPTS * 5:
            taken.append(prompt)
            yield coordinator.events(prompt, GenerationSettings(6), streamed=False)

    found = coordinator.collect(prepared())
    texts = [next(found).text]
    assert len(taken) == (8 if over_servers else 1) < len(own)
    assert [*texts, *(g.text for g in found)] == own and len(taken) == len(own)


def test_a_threshold_above_1_gives_the_targets_answer(engine, connect):
    coordinator, _, draft = connect(engine)
    alone = engine.generate_target(PROMPTS, max_new_tokens=40)
    found = coordinator.generate(PROMPTS, max_new_tokens=40, threshold=1.01)
    assert [g.token_ids for g in found] == [g.token_ids for g in alone]
    draft.bodies.clear()
    found = coordinator.generate_target(PROMPTS, max_new_tokens=40)
    assert [g.token_ids for g in found] == [g.token_ids for g in alone] and not draft.bodies


def test_events_carry_the_answer_as_it_is_written(engine, connect):
    coordinator, _, _ = connect(engine)
    threshold = partial_threshold(engine)
    *events, done = coordinator.stream(PROMPT, max_new_tokens=40, threshold=threshold, **WHOLE)
    assert isinstance(done, Done)
    assert [type(e) for e in events[:3]] == [Drafted, Verified, Accepted]
    assert "".join(e.text for e in events if isinstance(e, (Accepted, Resumed))) == done.generation.text
    local = engine.generate(PROMPT, max_new_tokens=40, threshold=threshold, **WHOLE)
    validities = [s.validity for s in local.spans if s.source == "draft"]
    assert [s.validity for s in done.generation.spans if s.source == "draft"] == pytest.approx(validities, abs=1e-4)
    stream = coordinator.stream(PROMPT, max_new_tokens=40, threshold=threshold)
    next(stream)
    stream.close()
    assert coordinator.running == 0


def test_the_target_reads_a_long_prompt_while_the_draft_is_written(engine, connect):
    coordinator, (target,), _ = connect(engine, cache_block=4)
    prompt, settings = "Tom has 5 apples. " * 20, {"max_new_tokens": 30, "threshold": 0.0, **WHOLE}
    assert same(coordinator.generate(prompt, **settings), engine.generate(prompt, **settings))
    first = target.bodies[0]
    assert first["prompt"] == engine.target.render(prompt)[:-1] and first["max_tokens"] == 1
    assert "logprobs" not in first


@pytest.mark.slow
def test_a_draft_model_may_have_other_tokens(engine, connect, make_model, random_adapter):
    words = word_tokenizer()
    other = language_model(printable(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words), words, "o")
    local = ParseEngine.from_models(engine.target, other, engine.backend.judge, cut_policy=CUTS)
    assert isinstance(local.backend.drafter, ModelDrafter) and not local.backend.drafter.shares_tokens
    coordinator, _, _ = connect(local)
    for threshold in (0.0, 0.5, 1.01):
        settings = {"max_new_tokens": 40, "threshold": threshold, **WHOLE}
        found = coordinator.generate(PROMPTS, **settings)
        assert all(map(same, found, local.generate(PROMPTS, **settings)))


def test_given_drafts_need_no_draft_server(engine, connect):
    coordinator, _, draft = connect(engine)
    text = "Tom has 5 apples.\nHe eats 2.\nSo 3 are left."
    for threshold in (0.0, 0.5):
        settings = {"max_new_tokens": 40, "threshold": threshold, "draft_text": text}
        assert same(
            coordinator.generate(PROMPT, **settings),
            engine.generate(PROMPT, **WHOLE | settings),
        )
    assert not draft.bodies


def test_a_server_without_token_ids_gets_text(engine, connect):
    judge = ZeroShotJudge(engine.target.model, engine.target.tokenizer, CUTS)
    local = ParseEngine.from_models(engine.target, engine.draft, judge)
    coordinator, _, _ = connect(local)
    _, verified, *_ = itertools.islice(local.stream(PROMPT, max_new_tokens=40), 2)
    for threshold in sorted(segment.validity for segment in verified.segments)[::2]:
        settings = {"max_new_tokens": 40, "threshold": threshold - 1e-6, "acceptance": "longest"}
        assert same(
            coordinator.generate(PROMPT, **settings),
            local.generate(PROMPT, **WHOLE | settings),
        )


@pytest.mark.parametrize("fault", ["500", "cut", "gone", "half", "nonsense"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_failed_stream_is_retried_without_repeating_a_token(engine, connect, fault, streamed):
    coordinator, targets, _ = connect(engine, n_targets=2)
    settings = {"max_new_tokens": 60, "threshold": partial_threshold(engine), "block_tokens": 12}
    wanted = engine.generate(PROMPT, **WHOLE | settings)
    for server in targets:
        server.faults.extend([None, fault, None, fault])
    if streamed:
        *events, done = coordinator.stream(PROMPT, **settings)
        assert same(done.generation, wanted)
        assert "".join(e.text for e in events if isinstance(e, (Accepted, Resumed))) == wanted.text
    else:
        assert same(coordinator.generate(PROMPT, **settings), wanted)


@pytest.mark.slow
def test_requests_of_an_answer_stay_with_a_server_and_answers_are_spread(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=2)
    coordinator.generate(PROMPT, max_new_tokens=40, block_tokens=12, threshold=0.9)
    assert not all(server.bodies for server in targets)
    coordinator.generate(PROMPTS * 3, max_new_tokens=20)
    assert all(server.bodies for server in targets)


@pytest.mark.slow
def test_one_server_of_several_may_be_offline_at_the_start(engine, connect, caplog):
    coordinator, targets, _ = connect(engine, n_targets=2)
    servers, text = coordinator.backend._target.servers, coordinator.generate(PROMPT, max_new_tokens=20).text
    address, servers.members[0].url = servers.members[0].url, "http://127.0.0.1:9"
    coordinator.backend.run(coordinator.backend.handshake())
    (said,) = (record.getMessage() for record in caplog.records if record.name == "parse_infer.backends")
    assert said.startswith("the target server http://127.0.0.1:9/v1/models does not answer")
    assert [g.text for g in coordinator.generate([PROMPT] * 3, max_new_tokens=20)] == [text] * 3
    servers.members[0].url = address  # it is back
    targets[0].bodies.clear()
    coordinator.backend.run(asyncio.sleep(1.2))
    coordinator.generate([PROMPT] * 4, max_new_tokens=20)
    assert targets[0].bodies


@pytest.mark.slow
def test_servers_that_stay_offline_are_an_error_of_one_sentence(engine, connect):
    coordinator, (target,), _ = connect(engine, patience_s=0.3)
    target.faults.extend(["nonsense"] * 100)
    with pytest.raises(Unavailable, match=r"the target servers failed 4 times: .* incomplete JSON"):
        coordinator.generate_target(PROMPT, max_new_tokens=20)
    target.faults.clear()
    assert coordinator.generate(PROMPT, max_new_tokens=20).text
    coordinator.backend._target.servers.members[0].url = "http://127.0.0.1:9"
    with pytest.raises(Unavailable, match=r"no target server answers: .* does not answer"):
        coordinator.generate(PROMPT, max_new_tokens=20)


def test_bad_requests_and_servers_are_refused_in_one_sentence(engine, connect):
    coordinator, _, _ = connect(engine)
    for message, settings in (
        ("no calibration for --backend vllm was given", {"risk": 0.01}),
        ("is not a generation setting", {"thresold": 0.5}),
    ):
        with pytest.raises(ValueError, match=message):
            coordinator.generate(PROMPT, **settings)
    with pytest.raises(ValueError, match="empty"):
        coordinator.generate(["fine", " "])


def test_servers_may_require_a_key(engine, connect):
    coordinator, _, _ = connect(engine, keys=("secret", "secret"))
    assert coordinator.generate(PROMPT, max_new_tokens=8).text
    for wrong in (None, "guess"):
        with pytest.raises(RequestRejected, match=r"rejects a request \(401\): Unauthorized: give its API key with"):
            connect(engine, keys=("secret", wrong))


def test_a_server_with_other_tokens_is_refused(engine, connect, make_model):
    coordinator, _, draft = connect(engine)
    words = word_tokenizer()
    draft.lm = language_model(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words, "o")
    with pytest.raises(ValueError, match=r"the draft server .* has other tokens than 'draft'"):
        coordinator.backend.run(coordinator.backend.handshake())


@pytest.mark.slow
def test_sampled_answers_follow_their_seed(engine, connect):
    coordinator, _, _ = connect(engine)
    sampling = Sampling(temperature=1.0, seed=3)
    settings = {"max_new_tokens": 30, "threshold": 0.5, "draft_sampling": sampling, "resume_sampling": sampling}
    assert same(coordinator.generate(PROMPT, **settings), coordinator.generate(PROMPT, **settings))
    other = Sampling(temperature=1.0, seed=4)
    assert not same(
        coordinator.generate(PROMPT, **settings),
        coordinator.generate(PROMPT, **{**settings, "draft_sampling": other, "resume_sampling": other}),
    )


@pytest.mark.slow
def test_a_useless_draft_is_given_up(engine, connect):
    coordinator, _, draft = connect(engine, parallel=1)
    draft.pause = 0.02
    found = coordinator.generate([PROMPT] * 9, max_new_tokens=20, threshold=1.0, adaptive=False)
    assert all(g.stats.draft_tokens for g in found)
    coordinator.adaptive = True  # as it is, unless a test says otherwise
    found = coordinator.generate([PROMPT] * 20, max_new_tokens=20, threshold=1.0)
    assert {tuple(g.token_ids) for g in found} == {tuple(engine.generate_target(PROMPT, max_new_tokens=20).token_ids)}
    assert [bool(g.stats.draft_tokens) for g in found[6:]] == [False] * 14


@pytest.mark.parametrize("local_rows", [0, 4])
def test_a_prompt_beyond_the_draft_models_window_is_the_targets_alone(make_engine, connect, local_rows):
    engine = make_engine(draft_window=10)
    coordinator, _, draft = connect(engine, local_rows=local_rows)
    notes = []
    coordinator.controller.note = lambda *_, kept=None: notes.append(kept)
    wanted = engine.generate_target(PROMPT, max_new_tokens=20).token_ids
    for adaptive in (False, True):
        found = coordinator.generate(PROMPT, max_new_tokens=20, threshold=0.0, adaptive=adaptive)
        assert found.token_ids == wanted and found.stats.draft_tokens == 0
    assert not draft.bodies and not notes, "an empty draft is no measurement"


def test_the_controller_gets_the_number_of_accepted_tokens(engine, connect, monkeypatch):
    coordinator, _, _ = connect(engine)
    notes = []
    monkeypatch.setattr(coordinator.controller, "note", lambda *_, kept=None: notes.append(kept))
    found = coordinator.generate(PROMPT, max_new_tokens=20, threshold=0.0, adaptive=True)
    assert found.stats.accepted_tokens and notes == [found.stats.accepted_tokens]


def test_an_answer_continues_beyond_the_token_limit_of_a_server(engine, connect, monkeypatch):
    """As vLLM has where a model's generation_config.json has max_new_tokens."""
    write = FakeServer._write
    monkeypatch.setattr(
        FakeServer, "_write", lambda self, p, b: write(self, p, {**b, "max_tokens": min(8, b["max_tokens"])})
    )
    coordinator, (target,), _ = connect(engine)
    alone = engine.generate_target(PROMPT, max_new_tokens=24)
    assert coordinator.generate_target(PROMPT, max_new_tokens=24).token_ids == alone.token_ids
    assert sum("logprobs" not in body for body in target.bodies) == -(-len(alone.token_ids) // 8) > 1
    *_, done = coordinator.stream(PROMPT, max_new_tokens=24, threshold=1.01)
    assert done.generation.token_ids == alone.token_ids and done.generation.stats.rounds == 1


@pytest.mark.slow
def test_an_answer_that_ends_without_a_token_fails_and_keeps_the_server(engine, connect, monkeypatch):
    coordinator, _, _ = connect(engine)
    monkeypatch.setattr(FakeServer, "_write", lambda self, prompt, body: iter(()))
    with pytest.raises(Failing, match="has ended an answer without a token"):
        coordinator.generate_target(PROMPT, max_new_tokens=8)
    with running(LoopRunner(coordinator), engine) as served:
        assert served.chat(PROMPT, max_tokens=8, parse={"mode": "target"}).status_code == 503


def test_requests_override_the_penalties_of_a_generation_config(engine, connect):
    """vLLM takes them from the model's generation_config.json where a request leaves them out."""
    coordinator, (target,), draft = connect(engine)
    coordinator.generate(PROMPT, max_new_tokens=24, threshold=0.0)
    coordinator.generate_target(PROMPT, max_new_tokens=24)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
    writing = [body for body in (*target.bodies, *draft.bodies) if not body.get("prompt_logprobs")]
    assert len(writing) > len(draft.bodies) and all(body | neutral == body for body in writing)


@pytest.mark.slow
def test_health_checks_of_a_server_that_fails_at_the_start_run_in_the_request_loop(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=2, patience_s=5.0)
    targets[0].faults.append("500")
    coordinator.backend.run(coordinator.backend.handshake())
    with running(LoopRunner(coordinator), engine) as served:  # on another event loop
        targets[0].bodies.clear()
        end = time.monotonic() + 10
        while not targets[0].bodies:  # a health check there has it judge a draft, and it repeats
            assert time.monotonic() < end, "the server was not checked again"
            assert served.chat(max_tokens=8).status_code == 200
        for target in targets:
            target.bodies.clear()
        for _ in range(2):
            for target in targets:
                target.faults.append("500")
            with ThreadPoolExecutor(4) as clients:
                assert [a.status_code for a in clients.map(lambda _: served.chat(max_tokens=8), range(4))] == [200] * 4
        assert all(target.bodies for target in targets), "each has its share of the requests"


@pytest.mark.slow
def test_several_answers_to_a_request_are_written_side_by_side(engine, connect):
    coordinator, _, draft = connect(engine)
    draft.pause = 0.1
    with running(LoopRunner(coordinator), engine) as served:
        most = []
        request = {"max_tokens": 24, "n": 3, "temperature": 1.0, "seed": 5, "parse": {"draft_temperature": 0}}
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(lambda: served.chat(PROMPT, **request))
            while not answer.done():
                most.append(coordinator.running)
                time.sleep(0.005)
        assert max(most) == 3
        texts = [choice["message"]["content"] for choice in answer.result().json()["choices"]]
        assert [choice["index"] for choice in answer.result().json()["choices"]] == [0, 1, 2]
        draft.pause = 0.0
        alone = [served.chat(PROMPT, **{**request, "n": 1}).json()["choices"][0]["message"]["content"]]
        assert texts[:1] == alone, "the first one has the seed as it is given"


@pytest.mark.parametrize("local_rows", [0, 3])
@pytest.mark.parametrize("ends", ["ignore_eos", "stop_token_ids", "min_tokens", "min_tokens and stop"])
@pytest.mark.slow
def test_an_answer_ends_where_the_local_engines_does(engine, connect, ends, local_rows):
    """Requests hold the end tokens, and the number of tokens before one may end the answer."""
    free = engine.generate_target(PROMPT, max_new_tokens=40).token_ids
    for part in (engine.target, engine.draft):
        part.eos_ids = {free[8]}
        part.decoder.eos_ids = frozenset(part.eos_ids)
    coordinator, (target,), _ = connect(engine, local_rows=local_rows)
    options = {
        "ignore_eos": {"ignore_eos": True},
        "stop_token_ids": {"ignore_eos": True, "stop_token_ids": [free[30]]},
        "min_tokens": {"min_tokens": 20},
        "min_tokens and stop": {"min_tokens": 20, "stop_token_ids": free[:2], "stop": ("e",)},
    }[ends]
    for threshold in (0.0, partial_threshold(engine), 1.01):
        for block_tokens in ("whole", 12):
            settings = {"max_new_tokens": 40, "threshold": threshold, "block_tokens": block_tokens, **options}
            for ours, prompt in zip(coordinator.generate(PROMPTS[:2], **settings), PROMPTS, strict=False):
                assert same(ours, engine.generate(prompt, **WHOLE | settings)), (
                    threshold,
                    block_tokens,
                    prompt,
                )
            alone = engine.generate_target(PROMPT, **settings)
            target.bodies.clear()
            assert same(coordinator.generate_target(PROMPT, **settings), alone) and len(target.bodies) == 1
            target.faults.extend(["cut"] if threshold > 1 else [])  # a broken stream is resumed
            *_, done = coordinator.stream(PROMPT, **settings)
            assert same(done.generation, engine.generate(PROMPT, **WHOLE | settings))
    written = [body for body in target.bodies if body["max_tokens"] > 1]
    assert all(body.get("min_tokens", 0) <= body["max_tokens"] for body in written), "vLLM refuses it"


def test_a_prompt_is_rendered_once_for_models_that_read_it_alike(engine, connect, monkeypatch):
    coordinator, _, _ = connect(engine)
    calls, render = [], tokenizer_spec.render_prompt
    monkeypatch.setattr(tokenizer_spec, "render_prompt", lambda *arguments: calls.append(1) or render(*arguments))
    assert coordinator.generate(PROMPT, max_new_tokens=8, threshold=0.0).stats.draft_tokens
    assert len(calls) == 1
