"""Calibration end to end: replayed answers are the engine's own, losses are counted by problem, promises are kept."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from data_tools.tasks.checkers import same_answer
from parse_infer.calibration import settings as calibration_settings
from parse_infer.calibration.calibration_file import load_calibrations, save_calibrations
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.calibration.measure import calibrate, certify
from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.schema import Calibration, OperatingPoint, TestedPoint
from parse_infer.calibration.settings import CalibrationSettings, candidates
from parse_infer.engine import ParseEngine
from parse_infer.request.output import Generation
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.language_models import TokenCount
from tools import calibration_splits

THRESHOLDS = (*calibration_settings.THRESHOLDS[::5], calibration_settings.THRESHOLDS[-1])
PROMPTS = ["Tom has 5 apples.", "Ann has 12 pens and a cat.", "How many?"]


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    reference: str | None = None


@pytest.fixture
def engine(make_engine: Callable[..., ParseEngine], monkeypatch: pytest.MonkeyPatch) -> ParseEngine:
    monkeypatch.setattr(calibration_settings, "THRESHOLDS", THRESHOLDS)  # fewer, for time
    return make_engine(noise=0.15)


def middle_thresholds(engine: ParseEngine, prompt: str) -> list[float]:
    """Between the validities that occur, so that every setting differs from the next."""
    seen = sorted({s.validity for e in engine.stream(prompt, max_new_tokens=40) for s in getattr(e, "segments", [])})
    return [(a + b) / 2 for a, b in itertools.pairwise(seen)]


@pytest.mark.parametrize("acceptance", ["first_failure", "longest"])
@pytest.mark.parametrize("guesses", [None, "draft"])
@pytest.mark.slow
def test_replayed_answers_are_the_engines(engine: ParseEngine, guesses: str | None, acceptance: str):
    """Whatever the order of the settings, and whoever asked before; and most of it is not computed again."""
    if guesses:  # then nothing is drafted above a threshold of 1
        engine.backend.target_drafter = load_token_drafter(guesses, engine.target, engine.draft)
    for prompt in PROMPTS:
        thresholds = [1.1, *middle_thresholds(engine, prompt), 0.0]
        wanted = {}
        for block_tokens in ("whole", 8):
            for threshold in thresholds if block_tokens == "whole" else thresholds[::6]:  # each block takes a forward
                settings = GenerationSettings(40, threshold, block_tokens=block_tokens, acceptance=acceptance)
                wanted[settings] = engine.generate(prompt, settings)
        assert len({g.text for g in wanted.values()}) > 2, "the settings must differ for the test to say something"
        with Replay(engine) as replay:
            replay.clear_caches()
            for _ in range(2):
                for settings, generation in wanted.items():
                    answer = replay.answer(prompt, settings)
                    assert (answer.text, answer.token_ids) == (generation.text, generation.token_ids), settings
                    authors = [[(span.source, span.text) for span in g.spans] for g in (answer, generation)]
                    assert authors[0] == authors[1] and answer.finish_reason == generation.finish_reason
            with TokenCount(engine.target.model) as count:  # all of it is known by now
                for settings in reversed(wanted):
                    replay.answer(prompt, settings)
            assert count.widths == []
        with TokenCount(engine.target.model) as count:
            engine.generate(prompt, next(iter(wanted)))
        assert count.widths, "nobody remembers anything any more"


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value of plain containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value):
        return tensors(list(vars(value).values()))
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [found for part in value for found in tensors(part)] if isinstance(value, (list, tuple)) else []


def test_a_replay_keeps_only_the_states_at_which_an_answer_may_continue(engine: ParseEngine):
    """One for each prefix that some threshold accepts; the prompt's and the rest of the draft's are gone."""
    prompt = PROMPTS[0] * 20
    with Replay(engine) as replay:
        replay.clear_caches()
        for block_tokens in ("whole", 8):
            for threshold in (*THRESHOLDS, 0.0):
                replay.answer(prompt, GenerationSettings(40, threshold, block_tokens=block_tokens))
        verdicts = [part for key, part in replay.memory.parts.items() if key[0] == "verdict"]
        found = tensors(list(vars(replay.memory).values()))
    drafted = sum(len(key[2]) for key in replay.memory.parts if key[0] == "verdict")
    cuts = sum(len(verdict.cuts) + 1 for verdict in verdicts)
    states = sum(t.untyped_storage().nbytes() for t in found) / (4 * engine.target.model.config.hidden_size)
    assert len(verdicts) > 2 and 2 * cuts < drafted, "the test must have something to count"
    assert states <= cuts, f"{states:.0f} states are kept for {cuts} cuts of {len(verdicts)} drafts"


@pytest.mark.parametrize("block_tokens", ["whole", 8])
@pytest.mark.slow
def test_replayed_samples_are_the_engines(engine: ParseEngine, block_tokens):
    """Each seed has its own answers; drafts and what the judge says of them are shared."""
    plain = GenerationSettings(40, block_tokens=block_tokens, adaptive=False)
    prompt = PROMPTS[0]
    settings = [
        plain.override(threshold=threshold, resume_sampling=Sampling(0.8, top_p=0.9, seed=seed))
        for seed in range(3)
        for threshold in (1.1, *middle_thresholds(engine, prompt)[::4], 0.0)
    ]
    wanted = [engine.generate(prompt, each) for each in settings]
    n = len(settings) // 3
    assert len({g.text for g in wanted[:n]}) > 2, "the thresholds must differ for the test to say something"
    assert len({wanted[i * n].text for i in range(3)}) == 3, "and the seeds"
    with Replay(engine) as replay:
        replay.clear_caches()
        for _ in range(2):
            for each, generation in zip(settings, wanted, strict=True):
                assert replay.answer(prompt, each).token_ids == generation.token_ids, each
        with TokenCount(engine.target.model) as count:
            for each in reversed(settings):
                replay.answer(prompt, each)
        assert count.widths == []


def test_answers_that_would_differ_from_run_to_run_are_not_replayed(engine: ParseEngine):
    for sampling in ({"resume_sampling": Sampling(0.7)}, {"temperature": 0.7, "seed": 1}):
        with pytest.raises(ValueError, match="replays greedy drafts, and samples of the target with a seed only"):
            Replay(engine).answer("Hi", GenerationSettings().override(**sampling))


@pytest.mark.slow
def test_a_calibration_of_samples_promises_accuracy_at_its_temperature(engine: ParseEngine, tmp_path: Path):
    sampling = Sampling(0.9, top_k=40, seed=3)
    settings = replace(SETTINGS, sampling=sampling, samples=3, loss="accuracy", risks=(0.6, 0.9), timed=4)

    def right(problem: Problem, text: str) -> bool:
        return sum(map(ord, text)) % 2 == 0

    def ends(plain):
        return lambda *a, **o: replace(plain(*a, **o), finish_reason="eos")

    with pytest.MonkeyPatch.context() as patch:  # cut-off answers are wrong, and these models never end
        asked: list[str] = []
        plain = ends(ParseEngine.generate_target)
        patch.setattr(ParseEngine, "generate_target", lambda *a, **o: asked.append(a[1]) or plain(*a, **o))
        patch.setattr(Replay, "answer", ends(Replay.answer))
        found = run(engine, tmp_path / "samples", settings, check=right)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "records.jsonl").open()]
    assert found.sampling == replace(sampling, seed=None) and found.samples == 3
    assert len(asked) == 1 + 4, "one sample is timed, the first problem's twice to warm up"
    values = {3 * loss for row in rows for loss in row["losses"][0]}
    assert len(values) > 2 and min(values) < 0 < max(values), "wins and losses were seen"
    assert all(abs(value - round(value)) < 1e-9 for value in values), "thirds: the mean of three samples"
    assert all(row["losses"][0][0] == 0 for row in rows[4:]), "where nothing is accepted, the answers are the target's"
    assert all(0 <= 3 * row["target_right"] <= 3 for row in rows)
    assert all(pace >= 1 for row in rows[:4] for pace in row["tokens_per_forward"][0])
    point = found.tried[-1]
    assert point.losses == pytest.approx(sum(row["losses"][0][-1] for row in rows))
    save_calibrations(tmp_path / "calibration.json", [found])
    engine.calibrations = load_calibrations(tmp_path / "calibration.json")
    risk = next(risk for risk, place in found.promises.items() if place is not None)
    asked = {"max_new_tokens": 30, "risk": risk}
    for temperature in ({}, {"temperature": 0.9}, {"temperature": 0.5, "top_k": 40}):
        with pytest.raises(
            ValueError, match=r"there is no promise for .*; there are promises for temperature 0\.9, top_k 40"
        ):
            engine.generate(PROMPTS[0], **asked, **temperature)
    with pytest.raises(ValueError, match="greedy drafts only: omit draft_temperature"):
        engine.generate(PROMPTS[0], **asked, temperature=0.9, top_k=40, draft_temperature=0.5)
    promised = engine.generate(PROMPTS[0], **asked, temperature=0.9, top_k=40, seed=5)
    point = found.setting(risk).setting
    own = engine.generate(
        PROMPTS[0], max_new_tokens=30, **asdict(point), temperature=0.9, top_k=40, seed=5, draft_temperature=0
    )
    assert promised.token_ids == own.token_ids


def test_samples_and_losses_that_make_no_sense_together():
    for changes, message in [
        ({"samples": 2}, "samples is 2, with greedy answers: give 1"),
        ({"samples": 1.5}, "samples is 1.5; it must be a whole number"),
        ({"timed": 1.5}, "timed is 1.5; it must be a whole number"),
        ({"sampling": Sampling(0.7)}, "loss disagreement needs greedy answers: at temperature 0.7"),
        (
            {"sampling": Sampling(0.7), "loss": "lost", "samples": 0},
            "samples is 0, with temperature 0.7: give at least 1",
        ),
    ]:
        settings = {"samples": 4, **changes} if "loss disagreement" in message else changes
        with pytest.raises(ValueError, match=re.escape(message)):
            replace(SETTINGS, **settings)


def test_one_sample_differs_and_lossless_sampling_is_timed_without_its_seed(engine: ParseEngine, tmp_path: Path):
    """An audit compares answers of other random numbers. A seed fixes the lengths of lossless chains."""
    for model in (engine.target, engine.draft):  # or a random model would seldom end an answer
        model.eos_ids = {*model.eos_ids, *range(5, model.n_embeddings, 12)}
        model.decoder.eos_ids = frozenset(model.eos_ids)
    seeds: dict[bool, set[bool]] = {True: set(), False: set()}
    generate = engine.generate

    def watched(prompt: str, settings: GenerationSettings) -> object:
        if engine.pair_wrapper is None:  # timed
            seeds[settings.threshold > 1].add(settings.resume_sampling.seed is None)
        return generate(prompt, settings)

    engine.generate = watched
    settings = replace(
        SETTINGS, risks=(0.5, 0.9), loss="accuracy", sampling=Sampling(0.8), timed=1, thresholds=(0.5, 0.0)
    )
    problems = [Problem(f"p{i}", f"{PROMPTS[i % 3]} {i}") for i in range(11)]
    folder = tmp_path / "one"
    calibrate(engine, problems, lambda problem, text: len(text) % 2 == 0, same_answer, folder, settings)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert rows and all(all(row["disagreed"][0]) for row in rows)
    assert seeds == {True: {True}, False: {False}}


def test_the_order_goes_from_nothing_to_everything():
    orders = candidates()
    assert [order[0].block_tokens for order in orders] == ["whole", "auto"]
    for order in orders:
        thresholds = [setting.threshold for setting in order]
        assert thresholds == sorted(thresholds, reverse=True) and thresholds[0] > 1 and thresholds[-1] == 0
    with pytest.raises(ValueError, match="block_tokens is 'sometimes'; it must be a whole number"):
        candidates(["sometimes"])


SETTINGS = CalibrationSettings(risks=(0.2, 0.5), blocks=("whole",), loss="disagreement", max_new_tokens=30, timed=2)


def run(
    engine: ParseEngine,
    folder: Path,
    settings: CalibrationSettings = SETTINGS,
    n: int = 12,
    check=None,
    ask: str = "",
    reference: str | None = None,
):
    problems = [Problem(f"p{i}", f"{ask}{PROMPTS[i % 3]} {i}", reference) for i in range(n)]
    return calibrate(engine, problems, check or (lambda problem, text: None), same_answer, folder, settings, task="t")


@pytest.mark.slow
def test_a_calibration_counts_problems_and_resumes_after_an_interruption(engine: ParseEngine, tmp_path: Path):
    whole = run(engine, tmp_path / "whole")
    accepts_nothing, everything = whole.tried[0], whole.tried[-1]
    assert accepts_nothing.losses == 0, "above 1 the answer is the target's own"
    assert everything.losses > 0 and everything.setting.threshold == 0
    by_hand = 0
    for i in range(12):
        prompt = f"{PROMPTS[i % 3]} {i}"
        alone = engine.generate_target(prompt, max_new_tokens=30)
        by_hand += not same_answer(alone.text, engine.generate(prompt, max_new_tokens=30, threshold=0.0).text)
    assert everything.losses == by_hand
    assert everything.disagreement == pytest.approx(everything.bound), "here they count the same"
    assert accepts_nothing.disagreement == pytest.approx(accepts_nothing.bound) != everything.bound
    lines = (tmp_path / "whole" / "records.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 12
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    (torn / "records.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    again = run(engine, torn)
    assert [t.losses for t in again.tried] == [t.losses for t in whole.tried]
    assert (torn / "records.jsonl").read_text().splitlines(keepends=True)[:5] == lines[:5]
    with pytest.raises(ValueError, match=r"n_problems 12 and this one has 20"):
        run(engine, torn, n=20)
    with pytest.raises(ValueError, match="with problems"):
        run(engine, torn, ask="Say: ")  # other prompts under the same ids


@pytest.mark.parametrize("block_tokens", ["auto", "whole"])
@pytest.mark.slow
def test_each_text_is_timed_by_a_whole_answer(engine, random_adapter, tmp_path: Path, block_tokens):
    """A replay is not timed, and its blocks have one length; each text of a timed problem is answered once."""
    judge = random_adapter(engine.target.model)
    engine = ParseEngine.from_models(engine.target, engine.draft, judge)
    auto = replace(SETTINGS, blocks=(block_tokens,), timed=2, risks=(0.5,))
    with Replay(engine) as replay:
        for threshold in (0.9, 0.5, 0.1):
            replay.answer(PROMPTS[0], auto.generation().override(threshold=threshold, block_tokens=block_tokens))
    assert all(length.costs is None for length in engine.backend.block_lengths.values())
    asked: list[GenerationSettings] = []

    def generate(self: ParseEngine, prompt: str, settings: GenerationSettings, **options: Any) -> Any:
        if self.pair_wrapper is None:
            asked.append(settings)
        return plain(self, prompt, settings, **options)

    plain = ParseEngine.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParseEngine, "generate", generate)
        found = run(engine, tmp_path / "auto", auto, 6)
    records = [json.loads(line) for line in (tmp_path / "auto" / "records.jsonl").read_text().splitlines()]
    times = [set(row["seconds"][0]) for row in records[:2]]
    assert all(row["seconds"] == [] for row in records[2:])
    assert 2 + 2 <= sum(map(len, times)) <= len(asked) < 60, "one answer a text, and that which accepts nothing"
    assert {settings.block_tokens for settings in asked} == {block_tokens}
    assert found.made["timed_problems"] == 2


@pytest.mark.slow
def test_a_calibration_of_other_thresholds_is_not_continued(engine: ParseEngine, tmp_path: Path, monkeypatch):
    run(engine, tmp_path)
    monkeypatch.setattr(calibration_settings, "THRESHOLDS", calibration_settings.THRESHOLDS[:-1])
    with pytest.raises(ValueError, match="with thresholds"):
        run(engine, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="with timed"):
        run(engine, tmp_path, replace(SETTINGS, timed=3))
    with pytest.raises(ValueError, match="with problems"):
        run(engine, tmp_path, reference="corrected")


@pytest.mark.slow
def test_problems_that_are_not_timed_lose_the_same(engine: ParseEngine, tmp_path: Path, monkeypatch):
    """In float32 the target's own text comes from the setting that accepts nothing; only speeds need it alone."""
    whole = run(engine, tmp_path / "whole", replace(SETTINGS, timed=12))
    asked: list[str] = []
    plain = ParseEngine.generate_target
    monkeypatch.setattr(ParseEngine, "generate_target", lambda *a, **o: asked.append(a[1]) or plain(*a, **o))
    some = run(engine, tmp_path / "some", replace(SETTINGS, timed=3))
    assert len(asked) == 1 + 3, "the first one twice, to warm up"
    assert [(t.losses, t.bound, t.disagreement) for t in some.tried] == [
        (t.losses, t.bound, t.disagreement) for t in whole.tried
    ]
    records = [json.loads(line) for line in (tmp_path / "some" / "records.jsonl").read_text().splitlines()]
    assert [row["target_seconds"] is not None for row in records] == [True] * 3 + [False] * 9
    assert (whole.made["timed_problems"], some.made["timed_problems"]) == (12, 3)
    alone = sum(row["target_seconds"] for row in records[:3])
    assert some.tried[5].speedup == pytest.approx(alone / sum(row["seconds"][0][5] for row in records[:3]), abs=1e-3)
    with pytest.raises(ValueError, match="none of these problems was timed"):
        certify(some, [replace(o, target_seconds=None) for o in outcomes(2, lambda i, j: 0, lambda j: 1)], SETTINGS)
    with pytest.raises(ValueError, match="timed is 0: without a timed problem"):
        replace(SETTINGS, timed=0)
    asked.clear()
    engine.target.model.to(torch.bfloat16)
    run(engine, tmp_path / "rounded", replace(SETTINGS, timed=3, risks=(0.9,)))
    assert len(asked) == 1 + 12, "rounded numbers may differ from run to run"


@pytest.mark.slow
def test_the_majority_of_samples_may_be_the_targets_own_answer(engine: ParseEngine, tmp_path: Path):
    """Answers count as the same where their lengths have the same remainder, so that there are three kinds."""

    def same(one: str, other: str) -> bool:
        return len(one) % 3 == len(other) % 3

    settings = replace(SETTINGS, majority=5, risks=(0.9,))
    problems = [Problem(f"p{i}", f"{PROMPTS[i]} {i}") for i in range(3)]
    found = calibrate(engine, problems, lambda problem, text: None, same, tmp_path, settings, task="t")
    lost = 0
    for problem in problems:
        texts = [
            engine.generate_target(problem.prompt, max_new_tokens=30, resume_sampling=Sampling(0.7, seed=seed)).text
            for seed in range(5)
        ]
        kinds = [len(text) % 3 for text in texts]
        majority = max(kinds, key=lambda kind: (kinds.count(kind), -kinds.index(kind)))
        own = engine.generate_target(problem.prompt, max_new_tokens=30).text
        lost += len(own) % 3 != majority
    assert found.tried[0].losses == lost, "where nothing is accepted, the greedy answer is compared with the majority"
    never = {"same": lambda one, other: False, "comparison": lambda problem: same}
    own = calibrate(engine, problems, lambda p, t: None, folder=tmp_path / "own", settings=settings, task="t", **never)
    assert own.tried[0].losses == lost, "a problem may have its own comparison"
    assert own.tried[0].disagreement == 1, "an audit knows no problem, and compares by `same`"
    for wrong in ({"majority": 2}, {"majority": 5, "loss": "lost"}):
        with pytest.raises(ValueError, match="it takes at least 3 samples"):
            replace(SETTINGS, **wrong)


def outcomes(n: int, lost: Callable[[int, int], float], seconds: Callable[[int], float]) -> list[Outcome]:
    """Loss of problem i under setting j, and the seconds of setting j; of one order."""
    places = range(len(calibration_settings.THRESHOLDS))
    return [
        Outcome(
            f"p{i}",
            True,
            2.0,
            losses=[[lost(i, j) for j in places]],
            disagreed=[[lost(i, j) > 0 for j in places]],
            seconds=[[seconds(j) for j in places]],
        )
        for i in range(n)
    ]


def blank(**changes) -> Calibration:
    fields = {"task": "t", "n_problems": 300, "problems": "x", "loss": "lost", "confidence": 0.9}
    return Calibration(**fields, max_new_tokens=30, models={}, tried=[], promises={}, **changes)


@pytest.mark.slow
def test_the_fastest_setting_that_was_shown_is_promised():
    """Setting j loses j problems of 300 and takes 2 - j/60 seconds; more is lost than 5 % from the eighth on."""
    settings = CalibrationSettings(risks=(0.01, 0.05), blocks=("whole",))
    found = certify(blank(), outcomes(300, lambda i, j: float(i < j), lambda j: 2 - j / 60), settings)
    assert [tried.losses for tried in found.tried[:4]] == [0, 1, 2, 3]
    assert found.promises[0.01] == 0, "one loss in 300 does not show 1 % at 90 %"
    place = found.promises[0.05]
    assert found.tried[place].bound <= 0.05 < found.tried[place + 1].bound
    assert found.tried[place].speedup == pytest.approx(2 / (2 - place / 60), abs=1e-3)
    # What may be streamed in service: how often answers differed here, or the promise itself where it is about that.
    assert found.disagreement(0.05) == found.tried[place].disagreement == found.tried[place].bound
    assert replace(found, loss="disagreement").disagreement(0.05) == 0.05
    more = replace(found.tried[place], disagreement=0.2)
    voted = replace(found, loss="disagreement", tried=[*found.tried[:place], more, *found.tried[place + 1 :]])
    assert voted.disagreement(0.05) == 0.2, "with a majority as the reference, the greedy answer may differ more"
    # A setting that is slower than a stricter one is never chosen.
    slow = certify(blank(), outcomes(300, lambda i, j: float(i < j), lambda j: 2 + j), settings)
    assert slow.promises == {0.01: 0, 0.05: 0}
    # Testing stops at the first that fails, although a laxer one would pass by itself.
    gap = certify(blank(), outcomes(300, lambda i, j: float(j == 3 and i < 50), lambda j: 2 - j / 60), settings)
    assert gap.promises[0.05] == 2
    # Two orders share the budget: what one order alone could show is not shown.
    both = [
        replace(o, losses=o.losses * 2, disagreed=o.disagreed * 2, seconds=o.seconds * 2)
        for o in outcomes(240, lambda i, j: 0.0, lambda j: 1)
    ]
    assert certify(blank(), both, CalibrationSettings(risks=(0.01,))).promises == {0.01: None}
    one = outcomes(240, lambda i, j: 0.0, lambda j: 1)
    assert certify(blank(), one, CalibrationSettings(risks=(0.01,), blocks=("whole",))).promises[0.01] is not None


def test_what_cannot_be_promised_is_said_before_any_work(engine: ParseEngine, tmp_path: Path):
    before = engine.target.decoder.forwards
    cases = [
        (
            replace(SETTINGS, risks=(0.01,)),
            "risk 0.01 at confidence 0.9 takes at least 230 problems, and there are 12",
        ),
        (
            replace(SETTINGS, risks=(0.01,), blocks=("whole", "auto")),
            "at least 299 problems (the lengths of blocks share the error budget)",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            run(engine, tmp_path / "none", settings)
    assert engine.target.decoder.forwards == before and not (tmp_path / "none").exists()
    for changes, message in [
        ({"risks": (1.5,)}, "risk is 1.5; it must be a number between 0 and 1"),
        ({"risks": ()}, "name at least one risk"),
        ({"confidence": 0.0}, "confidence is 0.0"),
        ({"loss": "regret"}, "loss is 'regret'; choose one of accuracy, lost, disagreement"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            replace(SETTINGS, **changes)


@pytest.mark.slow
def test_training_problems_show_nothing_whatever_their_ids(
    engine: ParseEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They are known by their prompts: most of them are refused, a few are left out."""
    before, prompts = engine.target.decoder.forwards, [f"{PROMPTS[i % 3]} {i}" for i in range(12)]

    def learn(prompts: Sequence[str]) -> None:
        learnt = frozenset(map(prompt_hash, prompts))
        monkeypatch.setattr(engine.backend.judge, "train_problems", learnt, raising=False)

    learn(prompts[:7])
    with pytest.raises(
        ValueError,
        match=r"7 of the 12 problems are among those that the adapter",
    ):
        run(engine, tmp_path / "refused")
    assert engine.target.decoder.forwards == before and not (tmp_path / "refused").exists()
    learn(prompts[:1])
    found = run(engine, tmp_path / "left_out")
    records = [json.loads(line)["problem_id"] for line in (tmp_path / "left_out" / "records.jsonl").open()]
    assert found.n_problems == 11 and records == [f"p{i}" for i in range(1, 12)]
    with pytest.raises(ValueError, match="takes at least 12 problems, and there are 11"):
        run(engine, tmp_path / "few", replace(SETTINGS, risks=(0.18,)))


@pytest.mark.slow
def test_answers_that_the_budget_cuts_off_are_wrong(engine: ParseEngine, tmp_path: Path, monkeypatch):
    """A checker may find the right number in them, and with a larger budget they go on."""
    settings = replace(SETTINGS, loss="lost", risks=(0.5,), timed=12)
    with pytest.raises(ValueError, match="answers none of the first 12 problems right"):
        run(engine, tmp_path / "all", settings, check=lambda problem, text: True)
    end_target(monkeypatch)
    with pytest.raises(ValueError, match="even where nothing of a draft is accepted"):
        run(engine, tmp_path / "parse", settings, check=lambda problem, text: True)
    with pytest.raises(ValueError, match="even where nothing of a draft is accepted"):
        run(engine, tmp_path / "disagreement", replace(settings, loss="disagreement"))
    end_replays(monkeypatch)
    found = run(engine, tmp_path / "none", settings, check=lambda problem, text: True)
    assert found.tried[-1].losses == 0


def end_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target's answers end before their budget cuts them off."""
    plain = ParseEngine.generate_target
    monkeypatch.setattr(ParseEngine, "generate_target", lambda *a, **o: replace(plain(*a, **o), finish_reason="eos"))


def end_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for PARSE's answers."""
    plain = Replay.answer

    monkeypatch.setattr(Replay, "answer", lambda *arguments: replace(plain(*arguments), finish_reason="eos"))


@pytest.mark.slow
def test_a_target_that_is_never_right_has_nothing_to_lose(engine: ParseEngine, tmp_path: Path):
    settings = replace(SETTINGS, loss="lost")
    with pytest.raises(ValueError, match="answers none of the first 12 problems right"):
        run(engine, tmp_path / "a", settings, check=lambda problem, text: False)
    with pytest.raises(ValueError, match="the checker cannot decide on an answer to problem p0"):
        run(engine, tmp_path / "b", settings)


@pytest.mark.slow
def test_a_pair_that_loses_even_without_drafts_is_refused_early(engine: ParseEngine, tmp_path: Path, monkeypatch):
    """The target answers differently from run to run, as rounding may make it."""
    end_replays(monkeypatch)
    plain = ParseEngine.generate_target

    def other(*arguments: Any, **options: Any) -> Generation:
        answer = plain(*arguments, **options)
        return replace(answer, text=answer.text + " indeed", finish_reason="eos")

    monkeypatch.setattr(ParseEngine, "generate_target", other)
    settings = replace(SETTINGS, loss="lost", risks=(0.2,), timed=12)
    with pytest.raises(ValueError, match="even where nothing of a draft is accepted"):
        run(engine, tmp_path, settings, check=lambda problem, text: text.endswith("indeed"))
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) < 12


@pytest.mark.slow
def test_requests_go_by_the_promise(engine: ParseEngine, make_engine, tmp_path: Path):
    calibration = run(engine, tmp_path / "run")
    path = tmp_path / "calibration.json"
    save_calibrations(path, [calibration])
    assert load_calibrations(path) == (replace(calibration, made=json.loads(json.dumps(calibration.made))),)
    engine.calibrations = load_calibrations(path)
    tried = calibration.setting(0.5)
    wanted = engine.generate(PROMPTS[0], threshold=tried.setting.threshold, block_tokens=tried.setting.block_tokens)
    assert engine.generate(PROMPTS[0], risk=0.5).token_ids == wanted.token_ids
    with pytest.raises(ValueError, match=r"risk is 0.03, but it was not tested; the nearest promise is 0.2"):
        engine.generate(PROMPTS[0], risk=0.03)
    for changes, message in [
        ({"threshold": 0.5}, "risk and threshold were both given"),
        ({"draft_text": "4"}, "risk and draft_text were both given"),
        ({"block_tokens": 8}, "risk and block_tokens were both given"),
        ({"mode": "exact"}, "risk and mode were both given"),
        ({"keep_greedy_match": False}, "risk and keep_greedy_match were both given"),
        ({"resume_sampling": Sampling(0.7)}, "no promise for temperature 0.7; there are promises for greedy answers"),
        ({"max_new_tokens": 8}, "covers answers of up to 30 tokens and max_new_tokens is 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(PROMPTS[0], risk=0.5, **changes)
    other = make_engine(noise=0.3, calibrations=load_calibrations(path))
    assert other.generate(PROMPTS[0], max_new_tokens=5).token_ids  # of no concern without a risk
    with pytest.raises(ValueError, match="made with another draft"):
        other.generate(PROMPTS[0], risk=0.5)
    models = engine.describe()
    for part, value in (
        ("adapter", "x"),
        ("cut_policy", {"kind": "tokens"}),
        ("template_options", {"thinking": True}),
    ):
        with pytest.raises(ValueError, match=f"made with another {part}"):
            calibration.check(models | {part: value})
    other.calibrations = ()
    with pytest.raises(ValueError, match="this engine has no calibration: run `parse-infer calibrate`"):
        other.generate(PROMPTS[0], risk=0.5)


def test_a_draft_model_in_another_number_type_is_another(engine: ParseEngine, make_engine):
    calibration = replace(blank(), models=engine.describe())
    assert "dtype" not in calibration.models["draft"], "as in older calibrations, it is the target's"
    other = make_engine(noise=0.15)
    calibration.check(other.describe())
    other.draft.model.bfloat16()
    with pytest.raises(ValueError, match=r"another draft \(draft\) than is loaded \(draft in bfloat16\)"):
        calibration.check(other.describe())
    other.target.model.bfloat16()
    with pytest.raises(ValueError, match=r"another dtype \(float32\) than is loaded \(bfloat16\)"):
        calibration.check(other.describe())


def test_a_risk_without_a_promise_is_one_sentence():
    nothing = blank(made={})
    with pytest.raises(ValueError, match="the calibration shows no promise"):
        replace(nothing, promises={0.1: None}).setting(0.1)
    shown = replace(
        nothing, tried=[TestedPoint(OperatingPoint(2.0), 0, 0.01, 1.0, 0.01)], promises={0.01: None, 0.1: 0}
    )
    with pytest.raises(ValueError, match=r"no setting was shown to keep it; the nearest promise is 0.1"):
        shown.setting(0.01)


@pytest.mark.slow
def test_random_halves_of_a_calibration(tmp_path: Path, capsys):
    """Setting j loses a problem with chance j / 200; what is promised at 5 % loses about that on the other half."""
    luck = Random(3)
    numbers = [luck.random() for _ in range(1000)]
    rows = outcomes(1000, lambda i, j: float(numbers[i] < j / 200), lambda j: 2 - j / 60)
    config = {"loss": "lost", "blocks": ["whole"], "max_new_tokens": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert calibration_splits.main([str(tmp_path), "--risk", "0.001,0.05", "--splits", "20"]) == 0
    assert calibration_splits.main([str(tmp_path), "--splits", "0"]) == 2
    impossible, shown = json.loads((tmp_path / "splits.json").read_text())["rows"]
    assert impossible["shown"] == 0 and impossible["speedup"] == 1 and impossible["lost"] == 0
    assert shown["shown"] == 1 and 0.02 < shown["lost"] < 0.05 and shown["above"] <= 0.3
    assert shown["lost_range"][0] < shown["lost"] < shown["lost_range"][1]
    assert 1.05 < shown["speedup"] < 2
    some = [row if i < 7 else replace(row, target_seconds=None, seconds=[]) for i, row in enumerate(rows)]
    earlier = [{k: v for k, v in asdict(row).items() if k != "tokens_per_forward"} for row in some]  # had none
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in earlier))
    assert calibration_splits.main([str(tmp_path), "--risk", "0.05"]) == 0, "each half has some that were timed"
    found = json.loads((tmp_path / "splits.json").read_text())["rows"][0]
    assert found["lost"] == pytest.approx(shown["lost"], abs=0.01) and 1.05 < found["speedup"] < 2
    none = [replace(row, target_seconds=None, seconds=[]) for row in rows]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in none))
    capsys.readouterr()
    assert calibration_splits.main([str(tmp_path)]) == 2
    assert "none of these problems was timed" in capsys.readouterr().err
    thirds = [replace(row, losses=[[(x - 0.5) / 3 for x in row.losses[0]]]) for row in rows]
    (tmp_path / "config.json").write_text(json.dumps(config | {"sampling": {"temperature": 0.7}, "samples": 3}))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in thirds))
    assert calibration_splits.main([str(tmp_path), "--risk", "0.05"]) == 0, "means over samples are no 0 or 1"
    few = [replace(row, losses=[row.losses[0][:3]], disagreed=[row.disagreed[0][:3]]) for row in rows]
    few = [row if row.target_seconds is None else replace(row, seconds=[row.seconds[0][:3]]) for row in few]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in few))
    own = CalibrationSettings((0.05,), blocks=("whole",), thresholds=(0.5, 0.2))
    save_calibrations(tmp_path / "calibration.json", [certify(blank(), few, own)])
    assert calibration_splits.main([str(tmp_path), "--risk", "0.05"]) == 0, "of a few thresholds"
    assert json.loads((tmp_path / "splits.json").read_text())["rows"][0]["shown"] == 1
    (tmp_path / "calibration.json").unlink()
    assert calibration_splits.main([str(tmp_path)]) == 2
    assert "tried other thresholds, and has no calibration.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert calibration_splits.main([str(tmp_path)]) == 2 and "has no blocks and loss" in capsys.readouterr().err
    assert calibration_splits.main([str(tmp_path / "gone")]) == 2
    assert "holds no calibration: run `parse-infer calibrate" in capsys.readouterr().err
