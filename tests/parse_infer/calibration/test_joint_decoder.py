"""Joint decoding: the engine's own answers, many at a time, and the same losses in a calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from data_tools.tasks.checkers import same_answer
from parse_infer.calibration.answers import batched, decoded_text
from parse_infer.calibration.joint_decoder import JointAnswer, JointDecoder, JointRow
from parse_infer.calibration.joint_tokens import DraftTokens
from parse_infer.calibration.measure import calibrate
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.engine import ParseEngine
from parse_infer.errors import CalibrationError, ModelError
from parse_infer.files import read_jsonl
from parse_infer.judge.floor import FlooredJudge
from parse_infer.judge.registry import find_rule
from parse_infer.judge.rules.min_p import MinP
from parse_infer.models.batch_decoder import Batch
from parse_infer.settings.acceptance import ACCEPT_NOTHING
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.calibration.test_calibration import Problem
from tests.parse_infer.language_models import printable, reduced_pair, word_tokenizer

JUDGES = ("min_p", "accept_threshold", "relaxed_acceptance", "typical_acceptance")
THRESHOLDS = (1.0, 0.9, 0.3, 0.01)
PROMPTS = ("Tom has 5 apples.", "Ann has 12 pens and a cat.", "How many?")
N = 16


def usual(lowest: float) -> dict[str, list[list[float]]]:
    """Drafts whose first two tokens have at least this mean log-probability, over 3."""
    return {"2": [[lowest, *[-1e9] * 6], [0.0, *[1e9] * 6]]}


@pytest.fixture
def pair(
    make_engine: Callable[..., ParseEngine], make_model: Callable[..., PreTrainedModel], request: pytest.FixtureRequest
) -> ParseEngine:
    """Random models, with many end tokens, or they would seldom write one. Sampled answers are of letters: inside a
    character the engine goes on with the random numbers of the last token."""
    reduced = "reduced" in request.node.name
    if reduced:
        rule = find_rule("min_p").load(word_tokenizer())
        engine = ParseEngine.from_models(*reduced_pair(make_model, noise=0.3), rule)
    else:
        engine = make_engine(noise=0.3)
    if "sampled" in request.node.name:
        for model in (engine.target, engine.draft):
            printable(model.model, model.tokenizer)
    for model in (engine.target,) if reduced else (engine.target, engine.draft):
        model.eos_ids = {*model.eos_ids, *range(5, model.n_embeddings, 25)}
        model.decoder.eos_ids = frozenset(model.eos_ids)
    return engine


def end_often(engine: ParseEngine) -> None:
    for model in (engine.target, engine.draft):
        model.eos_ids |= set(range(3, model.n_embeddings, 7))
        model.decoder.eos_ids = frozenset(model.eos_ids)


@pytest.fixture
def engines(pair: ParseEngine) -> list[ParseEngine]:
    target, draft = pair.target, pair.draft
    guesses = load_token_drafter("draft", target, draft)
    rules = [find_rule(judge).load(target.tokenizer) for judge in JUDGES]
    return [ParseEngine.from_models(target, draft, rule, target_drafter=guesses) for rule in rules]


def decoder(engines: list[ParseEngine], batch_size: int) -> JointDecoder:
    one = engines[0]
    return JointDecoder(one.target, one.draft, [each.backend.judge for each in engines], batch_size)


@pytest.mark.parametrize("vocabulary", ["equal", "reduced"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, top_k=6)], ids=["greedy", "sampled"])
def test_every_answer_is_the_engines(
    engines: list[ParseEngine], sampling: Sampling, vocabulary: str, monkeypatch: pytest.MonkeyPatch
):
    """Of every rule, threshold, prompt and seed, in batches of any size."""
    widths, logits = [], Batch.logits
    monkeypatch.setattr(Batch, "logits", lambda batch: widths.append(len(batch.runs)) or logits(batch))
    points = tuple((rule, each) for rule in range(len(engines)) for each in THRESHOLDS)
    rows = [
        JointRow(prompt, points, N, sampling if sampling.greedy else replace(sampling, seed=seed))
        for prompt in PROMPTS
        for seed in range(1 if sampling.greedy else 2)
    ]
    wanted = []
    for row in rows:
        plain = GenerationSettings(N, block_tokens=5, adaptive=False, strict_tokens=0, resume_sampling=row.sampling)
        wanted.append([engines[rule].generate(row.prompt, plain, threshold=each) for rule, each in points])
    distinct = [len({tuple(answer.token_ids) for answer in answers}) for answers in wanted]
    assert max(distinct) > 2, f"the points must differ for the test to say something: {distinct}"
    lengths = {len(answer.token_ids) for answers in wanted for answer in answers}
    assert len(lengths) > 1, "and some answers must end early"
    for batch_size in (1, 4, 64):
        widths.clear()
        found = list(decoder(engines, batch_size).answers(rows))
        assert max(widths) <= max(batch_size, len(points)), "the memory is bounded"
        for row, answers, own in zip(rows, found, wanted, strict=True):
            for (rule, threshold), answer, generation in zip(row.points, answers, own, strict=True):
                assert answer.ids == generation.token_ids, (batch_size, row.prompt, JUDGES[rule], threshold)
                kept = generation.stats.accepted_tokens
                assert answer.rejected >= len(answer.ids) - kept, "each target token stands for a rejected one"


@pytest.mark.parametrize("vocabulary", ["equal", "reduced"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=2)], ids=["greedy", "sampled"])
def test_every_answer_of_a_trained_head_is_the_engines(
    pair: ParseEngine, random_adapter: Callable[..., Any], sampling: Sampling, vocabulary: str
):
    """Of a head that judges all drafts, of one that knows some of them, of both with a floor, and of hidden states."""
    target, draft = pair.target, pair.draft
    every, some, other = (random_adapter(target.model, seed) for seed in (1, 2, 3))
    hidden = random_adapter(target.model, 5, stream=True, layers=(1, 2), second=False)
    some.config.logprobs["usual"], other.config.logprobs["usual"] = usual(-1.3), usual(-1.7)
    guesses = load_token_drafter("draft", target, draft)
    judges = [every, some, FlooredJudge(every, MinP(0.2)), FlooredJudge(other, MinP(0.2)), hidden]
    engines = [ParseEngine.from_models(target, draft, judge, target_drafter=guesses) for judge in judges]
    thresholds = [0.9, 0.5, 0.1, *([ACCEPT_NOTHING] if sampling.greedy else [])]
    points = tuple((judge, each) for judge in range(5) for each in thresholds)
    rows = [
        JointRow(prompt, points, N, sampling if sampling.greedy else replace(sampling, seed=7)) for prompt in PROMPTS
    ]
    fallbacks, lengths, kept = set(), set(), set()
    few, many = (JointDecoder(target, draft, judges, size).answers(rows) for size in (4, 64))
    for row, answers, same in zip(rows, few, many, strict=True):
        assert answers == same, "in batches of any size"
        plain = GenerationSettings(N, block_tokens=32, adaptive=False, strict_tokens=0, resume_sampling=row.sampling)
        for (judge, threshold), answer in zip(points, answers, strict=True):
            own = engines[judge].generate(row.prompt, plain, threshold=threshold)
            assert answer.ids == own.token_ids, (row.prompt, judge, threshold)
            fallbacks.add((judge in (1, 3), own.fallback))
            lengths.add(len(own.token_ids))
            kept.add(own.stats.accepted_tokens)
    assert fallbacks == {(False, None), (True, None), (True, "unusual_draft")}, "some must be unusual"
    assert len(lengths) > 1 and len(kept) > 3


@pytest.mark.parametrize("vocabulary", ["equal", "reduced"])
@pytest.mark.parametrize("room", [-1, 0, 1, 6])
def test_behind_the_draft_models_window_the_target_writes(engines: list[ParseEngine], vocabulary: str, room: int):
    target, draft, prompt = engines[0].target, engines[0].draft, PROMPTS[1]
    draft.window = len(draft.render(prompt)) + room
    target.window = len(target.render(prompt)) + 12
    points = tuple((0, each) for each in THRESHOLDS)
    (answers,) = decoder(engines, 4).answers([JointRow(prompt, points, N)])
    plain = GenerationSettings(N, block_tokens=5, adaptive=False, strict_tokens=0)
    own = [engines[0].generate(prompt, plain, threshold=each) for each in THRESHOLDS]
    assert [answer.ids for answer in answers] == [generation.token_ids for generation in own]
    kept = any(generation.stats.accepted_tokens for generation in own)
    assert kept is (room > 0), "the draft model must be heard where it has room"


@pytest.mark.parametrize("vocabulary", ["equal", "reduced"])
def test_behind_an_end_token_of_the_draft_model_the_target_writes(engines: list[ParseEngine], vocabulary: str):
    """If the target writes one and goes on."""
    target, draft, prompt = engines[0].target, engines[0].draft, PROMPTS[1]
    words = engines[0].generate_target(prompt, max_new_tokens=N).token_ids
    tokens = DraftTokens(draft, target)
    third = next(iter(tokens.of(words[2])[-1:]))
    assert words[2] not in target.eos_ids
    draft.eos_ids = {*draft.eos_ids, third}
    plain = GenerationSettings(N, block_tokens=5, adaptive=False, strict_tokens=0)
    (answers,) = decoder(engines, 4).answers([JointRow(prompt, tuple((0, each) for each in (0.9, 0.3)), N)]) or [[]]
    own = [engines[0].generate(prompt, plain, threshold=each) for each in (0.9, 0.3)]
    assert [answer.ids for answer in answers] == [each.token_ids for each in own]
    assert [answer.rejected for answer in answers] == [
        len(each.token_ids) - each.stats.accepted_tokens for each in own
    ]
    assert any(words[2] in each.token_ids[:-1] for each in own), "the target must write the token"


@pytest.mark.slow
def test_a_head_of_sampled_answers_reads_a_token_that_both_models_choose(
    pair: ParseEngine, random_adapter: Callable[..., Any]
):
    """A rejected one: of two likely tokens it is often drawn, and then the target's own."""
    thresholds = [i / 20 for i in range(20)]
    guesses = load_token_drafter("draft", pair.target, pair.draft)
    judge = random_adapter(pair.target.model, seed=2)
    engine = ParseEngine.from_models(pair.target, pair.draft, judge, target_drafter=guesses)
    for seed in range(4):
        sampling = Sampling(1.0, top_k=2, seed=seed)
        row = JointRow(PROMPTS[seed % 3], tuple((0, each) for each in thresholds), 2 * N, sampling)
        (answers,) = JointDecoder(engine.target, engine.draft, [engine.backend.judge], 64).answers([row]) or [[]]
        plain = GenerationSettings(2 * N, block_tokens=5, adaptive=False, strict_tokens=0, resume_sampling=sampling)
        own = [engine.generate(row.prompt, plain, threshold=each).token_ids for each in thresholds]
        assert [answer.ids for answer in answers] == own, seed


def test_a_draft_that_ends_before_its_head_can_tell_is_left_to_the_engine(
    pair: ParseEngine, random_adapter: Callable[..., Any]
):
    adapter = random_adapter(pair.target.model)
    adapter.config.logprobs["usual"] = {"12": usual(-9.0)["2"]}
    end_often(pair)
    prompts = [f"{PROMPTS[i % 3]} {i}" for i in range(12)]
    short = [len(pair.generate_draft(prompt, max_new_tokens=N).token_ids) < 12 for prompt in prompts]
    assert any(short) and not all(short)
    rows = [JointRow(prompt, ((0, 0.5),), N) for prompt in prompts]
    found = JointDecoder(pair.target, pair.draft, [adapter], 4).answers(rows)
    assert [answers is None for answers in found] == short


def test_a_validity_that_is_no_number_is_rejected(engines: list[ParseEngine], monkeypatch: pytest.MonkeyPatch):
    rule = engines[0].backend.judge
    monkeypatch.setattr(type(rule), "validity_of_each", lambda self, found: torch.full((len(found.ids),), torch.nan))
    (answers,) = decoder(engines[:1], 4).answers([JointRow(PROMPTS[0], ((0, 0.0),), N)])
    assert answers[0].ids == engines[0].generate_target(PROMPTS[0], max_new_tokens=N).token_ids


def test_where_nothing_is_kept_the_target_writes(engines: list[ParseEngine], monkeypatch: pytest.MonkeyPatch):
    widths, logits = [], Batch.logits
    monkeypatch.setattr(Batch, "logits", lambda batch: widths.append(len(batch.runs)) or logits(batch))
    rows = [JointRow(prompt, ((0, ACCEPT_NOTHING), (0, 0.0)), N) for prompt in PROMPTS]
    for prompt, (alone, drafted) in zip(PROMPTS, decoder(engines, 2).answers(rows), strict=True):
        assert alone.ids == engines[0].generate_target(prompt, max_new_tokens=N).token_ids
        assert drafted.ids == engines[0].generate_draft(prompt, max_new_tokens=N).token_ids
        assert (alone.rejected, drafted.rejected) == (len(alone.ids), 0)
    assert max(widths) == 2, "a row waits until all of its answers have room"


def test_the_target_alone_runs_no_draft_model(engines: list[ParseEngine], monkeypatch: pytest.MonkeyPatch):
    """Points that accept nothing have one answer, whatever their judges: a batch of two has room for two prompts."""
    ran, logits = [], Batch.logits
    monkeypatch.setattr(
        Batch, "logits", lambda batch: ran.append((batch._decoder.model, len(batch.runs))) or logits(batch)
    )
    groups, group = [], JointDecoder._group
    monkeypatch.setattr(JointDecoder, "_group", lambda self, rows: groups.append(len(rows)) or group(self, rows))
    rows = [JointRow(prompt, ((0, ACCEPT_NOTHING), (1, ACCEPT_NOTHING)), N) for prompt in PROMPTS]
    for prompt, answers in zip(PROMPTS, decoder(engines[:2], 2).answers(rows), strict=True):
        alone = engines[0].generate_target(prompt, max_new_tokens=N).token_ids
        assert [(each.ids, each.rejected) for each in answers] == [(alone, len(alone))] * 2
    assert all(model is engines[0].target.model for model, _ in ran), "nothing is drafted"
    assert max(width for _, width in ran) == 2
    assert groups == [2, 1], "no more prompts are prefilled together than rows are decoded"


def test_a_character_that_the_target_begins_it_ends(engines: list[ParseEngine], monkeypatch: pytest.MonkeyPatch):
    """As in the engine's loop: whatever the rule would keep there."""
    two = engines[0].target.tokenizer.encode("é", add_special_tokens=False)
    assert len(two) == 2
    for prompt in PROMPTS:
        places: list[int] = []

        def own(self: JointDecoder, logits: object, sampling: Sampling, place: int, places=places) -> int:
            places.append(place)
            return two[(len(places) - 1) % 2]

        monkeypatch.setattr(JointDecoder, "_own", own)
        rule = engines[0].backend.judge
        monkeypatch.setattr(type(rule), "validity_of_each", lambda self, found: torch.ones(len(found.ids)))
        (answers,) = decoder(engines[:1], 4).answers([JointRow(prompt, ((0, 0.5),), N)])
        assert places == [] and answers[0].rejected == 0, "everything is kept"
        once = iter([torch.zeros(1)])
        monkeypatch.setattr(type(rule), "validity_of_each", lambda self, found, once=once: next(once, torch.ones(1)))
        (answers,) = decoder(engines[:1], 4).answers([JointRow(prompt, ((0, 0.5),), N)])
        assert places == [0, 1] and answers[0].ids[:2] == two, "one token is rejected, and the target writes two"


def test_answers_that_stay_the_same_are_decoded_once(
    make_engine: Callable[..., ParseEngine], monkeypatch: pytest.MonkeyPatch
):
    """Although the target draws its own token at one point, and a rule keeps the same one at the other."""
    engine = make_engine(noise=0)
    widths, logits = [], Batch.logits
    monkeypatch.setattr(Batch, "logits", lambda batch: widths.append(len(batch.runs)) or logits(batch))
    rule = find_rule("min_p").load(engine.target.tokenizer)
    rows = [JointRow(prompt, ((0, ACCEPT_NOTHING), (0, 0.5)), N) for prompt in PROMPTS]
    for alone, drafted in JointDecoder(engine.target, engine.draft, [rule]).answers(rows):
        assert alone.ids == drafted.ids and (alone.rejected, drafted.rejected) == (len(alone.ids), 0)
    assert max(widths) == len(PROMPTS)


@pytest.mark.parametrize(("sampling", "judge"), [(Sampling(), "rule"), (Sampling(1.0), "rule"), (Sampling(), "head")])
def test_a_calibration_in_batches_counts_the_same_losses(
    engines: list[ParseEngine], random_adapter: Callable[..., Any], tmp_path: Path, sampling: Sampling, judge: str
):
    """Of the head's problems, some have drafts that end before it can tell whether it knows them."""
    engine = engines[0]
    if judge == "head":
        adapter = random_adapter(engine.target.model, seed=2)
        adapter.config.logprobs["usual"] = {"12": usual(-1.5)["2"]}
        end_often(engine)
        engine = ParseEngine.from_models(engine.target, engine.draft, adapter)
    problems = [Problem(f"p{i}", f"{PROMPTS[i % 3]} {i}") for i in range(12)]
    records = {}
    for size in (1, 6):
        settings = CalibrationSettings(
            risks=(0.9,),
            blocks=(5,) if judge == "rule" else ("auto",),
            loss="disagreement" if sampling.greedy else "lost",
            max_new_tokens=N,
            sampling=sampling,
            samples=1 if sampling.greedy else 2,
            timed=2,
            thresholds=(0.5, 0.1, 0.01),
            batch_size=size,
        )
        folder = tmp_path / str(size)
        calibrate(engine, problems, lambda problem, text: len(text) % 2 == 0, same_answer, folder, settings)
        records[size] = {row["problem_id"]: row for _, row in read_jsonl(folder / "records.jsonl")}
    for id, row in records[1].items():
        other = records[6][id]
        assert (row["target_seconds"] is None) is (other["target_seconds"] is None)
        if sampling.greedy:
            assert (other["losses"], other["disagreed"]) == (row["losses"], row["disagreed"]), id
    assert len(records[6]) == len(problems) and len(records[6]["p0"]["losses"][0]) == 4
    if sampling.greedy:
        assert any(row["losses"][0][-1] for row in records[1].values()), "some answers must differ"


def test_outside_float32_the_targets_answers_come_from_batches_of_their_own(pair: ParseEngine, monkeypatch):
    rule = find_rule("min_p").load(pair.target.tokenizer)
    engine = ParseEngine.from_models(pair.target, pair.draft, rule)
    settings = CalibrationSettings(risks=(0.9,), blocks=(5,), max_new_tokens=N, thresholds=(0.5,), batch_size=4)
    problems = [Problem(f"p{i}", f"Tom has {i} apples.") for i in range(3)]
    (_, first), *_ = found = list(batched(engine, problems, settings))
    assert all(list(each.alone) == list(each.judged[0][0]) for _, each in found)
    decode = JointDecoder.answers

    def rounded(decoder: JointDecoder, rows: Any) -> Any:
        """Rounding gives the target's own batches another token."""
        apart = [JointAnswer([7, 8])] if len(rows[0].points) == 1 else None
        return (apart or each for each in decode(decoder, rows))

    monkeypatch.setattr(JointDecoder, "answers", rounded)
    monkeypatch.setattr(ParseEngine, "deterministic", property(lambda engine: False))
    (_, other), *_ = batched(engine, problems, settings)
    assert list(other.judged[0]) == list(first.judged[0])
    assert list(other.alone) == [decoded_text(pair.target, [7, 8])]


def test_judges_and_pairs_that_have_no_joint_answers_are_refused(
    make_model: Callable[..., PreTrainedModel], random_adapter: Callable[..., Any], pair: ParseEngine, tmp_path: Path
):
    problems = [Problem(f"p{i}", "Tom has 5 apples.") for i in range(3)]
    settings = CalibrationSettings(risks=(0.9,), blocks=(5,), loss="disagreement", timed=1, batch_size=4)
    with pytest.raises(CalibrationError, match=r"batch_size is 4, but this judge looks ahead, or .* of 1 always"):
        calibrate(pair, problems, lambda *_: None, same_answer, tmp_path / "a", settings)
    rule = find_rule("min_p").load(pair.target.tokenizer)
    engine = ParseEngine.from_models(pair.target, pair.draft, rule)
    whole = replace(settings, blocks=("whole",))
    with pytest.raises(CalibrationError, match=r"batch_size is 4, but a draft is judged whole"):
        calibrate(engine, problems, lambda *_: None, same_answer, tmp_path / "b", whole)
    assert not list(tmp_path.iterdir()), "nothing was written"
    with pytest.raises(CalibrationError, match="batch_size is 0; it must be at least 1"):
        replace(settings, batch_size=0)
    fly = find_rule("fly").load(pair.target.tokenizer)
    with pytest.raises(ModelError, match="looks ahead, or needs passes of its own"):
        JointDecoder(pair.target, pair.draft, [fly])
    stream = ParseEngine.from_models(pair.target, pair.draft, random_adapter(pair.target.model, stream=True))
    with pytest.raises(CalibrationError, match="batch_size is 4, but this judge looks ahead, or needs passes"):
        calibrate(stream, problems, lambda *_: None, same_answer, tmp_path / "c", settings)
    adapter = random_adapter(pair.target.model)
    adapter.config.logprobs["usual"] = {"8": usual(-1.0)["2"]}
    head = ParseEngine.from_models(pair.target, pair.draft, adapter)
    with pytest.raises(CalibrationError, match=r"compares the first 8 draft tokens with .*: give --block-tokens auto"):
        calibrate(head, problems, lambda *_: None, same_answer, tmp_path / "d", settings)
    assert not list(tmp_path.iterdir())
    other = reduced_pair(make_model)[1]
    with pytest.raises(ModelError, match="different tokens"):
        JointDecoder(pair.target, other, [rule])
