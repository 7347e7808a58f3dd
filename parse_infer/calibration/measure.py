"""Calibrate a pair: compare the target alone with PARSE at every operating point, and sum the losses.

The calibration writes one record per problem, so that an interrupted run can resume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from parse_infer.calibration.answers import Answers, Text, batched, joint_decoder, replayed, single
from parse_infer.calibration.held_out import HasPrompt, check_ids, leave_out_learnt
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.calibration.risk import least_problems, n_passing, p_value, upper_bound
from parse_infer.calibration.schema import (
    LOSSES,
    Calibration,
    Loss,
    OperatingPoint,
    TestedPoint,
    risks,
)
from parse_infer.errors import CalibrationError
from parse_infer.models.environment import describe_run
from parse_infer.request.output import Generation
from parse_infer.settings.acceptance import ACCEPT_NOTHING, Acceptance, check_share, check_threshold
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import GREEDY, Sampling, seed_of

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine

# Fixed before any problem is seen. Evenly spaced in log-odds, because validities concentrate near 1.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 2)) for x in range(-18, 15)), 0.0)
BLOCKS: tuple[BlockTokens, ...] = ("whole", "auto")
SAMPLE_TEMPERATURE = 0.7  # of the target's samples for a majority answer
_MIN_TARGET_PROBLEMS = 50  # a usable target answers at least one of this many problems right


def candidates(
    blocks: Sequence[BlockTokens] = BLOCKS,
    acceptance: Acceptance = GenerationSettings.acceptance,
    thresholds: Collection[float] = (),
) -> list[list[OperatingPoint]]:
    """Return one sequence of operating points per length of blocks, from accepting nothing to the lowest threshold.

    Raises ValueError for empty `blocks`, an invalid length or an invalid threshold.
    """
    if not blocks:
        raise CalibrationError("block_tokens is empty; give auto, whole or numbers")
    for length in blocks:
        GenerationSettings(block_tokens=length)  # raises for an invalid one
    tried = sorted({ACCEPT_NOTHING, *map(check_threshold, thresholds)}, reverse=True) if thresholds else THRESHOLDS
    return [[OperatingPoint(t, length, acceptance) for t in tried] for length in dict.fromkeys(blocks)]


@dataclass(frozen=True)
class CalibrationSettings:
    """The risk levels to promise, and the operating points to try."""

    risks: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    confidence: float = 0.9
    loss: Loss = "lost"
    blocks: tuple[BlockTokens, ...] = BLOCKS
    acceptance: Acceptance = GenerationSettings.acceptance
    max_new_tokens: int = 256
    majority: int = 0
    """With loss "disagreement": number of target samples for a majority answer; 0: the target's greedy answer."""
    sampling: Sampling = GREEDY
    """The target's, and the seed of all samples (None: 0). Drafts are greedy."""
    samples: int = 1
    """Answers to each problem, each with a seed of its own; the loss of a problem is their mean."""
    timed: int = 100
    """Number of problems on which answers are timed: the target's alone, and each text of PARSE. On the others, the
    target's text comes from the operating point that accepts nothing, which is several times faster and, in float32,
    exact or of the same distribution. In other dtypes the target answers all problems alone."""
    thresholds: tuple[float, ...] = ()
    """Thresholds to try, chosen before any problem is seen; empty: `THRESHOLDS`. Accepting nothing is always tried."""
    batch_size: int = 1
    """Answers at a time to the problems that are not timed (`JointDecoder`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "risks", risks(self.risks))
        object.__setattr__(self, "blocks", tuple(dict.fromkeys(self.blocks)))
        check_share(self.confidence, "confidence")
        if self.loss not in get_args(Loss):
            raise CalibrationError(f"loss is {self.loss!r}; choose one of {', '.join(get_args(Loss))}")
        if self.majority and (self.majority < 3 or self.loss != "disagreement"):
            raise CalibrationError(
                f"majority is {self.majority}: it takes at least 3 samples, and only loss disagreement uses it"
            )
        if (self.samples > 1 and self.sampling.greedy) or self.samples < 1:
            fits = "1 for greedy answers, which are the same" if self.sampling.greedy else "at least 1"
            raise CalibrationError(f"samples is {self.samples}, with {self.sampling}: give {fits}")
        if self.loss == "disagreement" and not self.sampling.greedy:
            raise CalibrationError(
                f"loss disagreement needs greedy answers: at {self.sampling} the target's own "
                "answers disagree too; choose loss accuracy or lost"
            )
        if self.timed < 1:
            raise CalibrationError(f"timed is {self.timed}: without a timed problem no speedup is known")
        if self.batch_size < 1:
            raise CalibrationError(f"batch_size is {self.batch_size}; it must be at least 1")
        candidates(self.blocks, self.acceptance, self.thresholds)  # raises for an unknown value
        self.generation()

    @property
    def orders(self) -> list[list[OperatingPoint]]:
        return candidates(self.blocks, self.acceptance, self.thresholds)

    @property
    def level(self) -> float:
        """Share of the error budget for each sequence of operating points."""
        return (1 - self.confidence) / len(self.blocks)

    @property
    def binary(self) -> bool:
        """Whether losses are 0 or 1."""
        return self.loss != "accuracy" and self.samples == 1

    def generation(self, *purpose: object) -> GenerationSettings:
        """Settings of one sample of a problem; each `purpose` has its own random numbers."""
        plain = GenerationSettings(self.max_new_tokens, acceptance=self.acceptance, strict_tokens=0, adaptive=False)
        if self.sampling.greedy:
            return plain
        return plain.override(resume_sampling=replace(self.sampling, seed=seed_of(self.sampling.seed or 0, *purpose)))


@dataclass(frozen=True)
class Outcome:
    """Results on one problem. `losses`, `disagreed` and `seconds` have one entry per operating point, by sequence."""

    problem_id: str
    target_right: float | None
    """Share of the samples; None: the checker cannot decide."""
    target_seconds: float | None
    """None: nothing was timed on this problem."""
    losses: list[list[float]]
    disagreed: list[list[bool]]
    """Whether the final answer of the first sample differs from the target's, of another sample unless greedy."""
    seconds: list[list[float]]
    """Time of an answer at each operating point, the first sample's; points with the same text share one answer.
    Empty: not timed."""
    tokens_per_forward: list[list[float]] = field(default_factory=list)
    """Tokens per forward of the target in these answers."""

    @property
    def key(self) -> str:
        return self.problem_id


def calibrate(
    engine: ParseEngine,
    problems: Sequence[HasPrompt],
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    folder: str | Path,
    settings: CalibrationSettings | None = None,
    *,
    task: str = "",
    console: Console | None = None,
    comparison: Callable[[Any], Callable[[str, str], bool] | None] = lambda problem: None,
) -> Calibration:
    """Measure the problems that `folder` has no records of, and test the operating points.

    Args:
        engine: with target, draft model and judge.
        problems: with unique ids; `leave_out_learnt` drops the judge's training problems.
        check: whether a text answers a problem; None if unknown, which only loss "disagreement" supports.
        same: whether two texts give the same final answer.
        task: name of the task.
        comparison: returns, for a problem, the function that takes the place of `same` for unequal texts, or None.

    Raises:
        ValueError: too few problems for a risk, mostly training problems, a target that is never right, a pair that
            misses every risk even when it accepts nothing, or a folder with another calibration.
    """
    settings = settings or CalibrationSettings()
    check_problems(problems, settings)
    problems = leave_out_learnt(problems, engine.train_problems)
    check_problems(problems, settings)
    models = engine.describe()
    if not (models.get("draft") and models.get("adapter")):
        raise CalibrationError("a calibration needs a draft model, and a judge: an adapter, or judge='min_p'")
    settings = replace(settings, blocks=tuple(map(engine.backend.replayable, settings.blocks)))
    for length in settings.blocks:
        engine.backend.check(GenerationSettings(block_tokens=length), ())
    if settings.batch_size > 1:
        joint_decoder(engine, settings)  # raises
    digest = hashlib.sha256(json.dumps([[p.id, p.prompt] for p in problems]).encode()).hexdigest()[:16]
    config = {
        **{name: getattr(settings, name) for name in ("loss", "blocks", "acceptance", "max_new_tokens", "majority")},
        **({} if settings.sampling.greedy else {"sampling": asdict(settings.sampling), "samples": settings.samples}),
        # Fix the number of problems too: adding problems until a promise holds would invalidate the test.
        **{
            "models": models,
            "drafters": engine.describe_drafters(),
            "task": task,
            "n_problems": len(problems),
            "problems": digest,
            "thresholds": hashlib.sha256(
                json.dumps([point.threshold for point in settings.orders[0]]).encode()
            ).hexdigest()[:16],
            "machine": engine.describe_machine(),  # seconds of two machines do not add up
        },
    }
    store = RecordStore(folder, config, Outcome, "calibration")
    timed = {problem.id for problem in problems[: settings.timed]}

    def same_for(problem: HasPrompt) -> Callable[[str, str], bool]:
        own = comparison(problem)
        return same if own is None else lambda one, other: one == other or own(one, other)

    def measure(pending: list[HasPrompt]) -> Iterator[Outcome]:
        first, rest = pending, list[HasPrompt]()
        if settings.batch_size > 1:
            first, rest = ([p for p in pending if (p.id in timed) is each] for each in (True, False))
        if any(p.id in timed for p in first):  # warm-up
            found = replayed(engine, first[0], settings, timed=True)
            _outcome(engine, first[0], found, check, same_for(first[0]), same, settings, timed=True)
        each = ((p, replayed(engine, p, settings, p.id in timed)) for p in first)
        for problem, answers in itertools.chain(each, batched(engine, rest, settings) if rest else ()):
            yield _outcome(engine, problem, answers, check, same_for(problem), same, settings, problem.id in timed)
            _check_feasible([store.records[p.id] for p in problems if p.id in store.records], len(problems), settings)

    outcomes = run_missing(store, {problem.id: problem for problem in problems}, measure, "calibrate", console)
    made = {**engine.describe_machine(), **describe_run()}
    made["timed_problems"] = sum(outcome.target_seconds is not None for outcome in outcomes)
    calibration = Calibration(
        task,
        len(problems),
        digest,
        settings.loss,
        settings.confidence,
        settings.max_new_tokens,
        models,
        tried=[],
        promises={},
        sampling=replace(settings.sampling, seed=None),
        samples=settings.samples,
        made=made,
    )
    return certify(calibration, outcomes, settings)


def certify(calibration: Calibration, outcomes: Sequence[Outcome], settings: CalibrationSettings) -> Calibration:
    """Return `calibration` with the tested operating points and the promises that these outcomes support."""
    orders = settings.orders
    tried: list[TestedPoint] = []
    places: list[list[int]] = []
    for i, order in enumerate(orders):
        places.append([])
        for j, setting in enumerate(order):
            losses = [outcome.losses[i][j] for outcome in outcomes]
            bound = upper_bound(losses, 1 - settings.confidence, binary=settings.binary)
            differing = upper_bound([float(outcome.disagreed[i][j]) for outcome in outcomes], 1 - settings.confidence)
            places[i].append(len(tried))
            faster = round(speedup(outcomes, i, j), 4)
            tried.append(TestedPoint(setting, float(sum(losses)), round(bound, 6), faster, round(differing, 6)))
    promises: dict[float, int | None] = {}
    for risk in settings.risks:
        shown: list[int] = []
        for i in range(len(orders)):
            losses_of_each = ([outcome.losses[i][j] for outcome in outcomes] for j in range(len(orders[i])))
            shown += places[i][: n_passing(losses_of_each, risk, settings.level, binary=settings.binary)]
        promises[risk] = max(shown, key=lambda place: tried[place].speedup, default=None)
    return replace(calibration, tried=tried, promises=promises)


def speedup(outcomes: Sequence[Outcome], i: int, j: int) -> float:
    """Speedup of operating point j in sequence i over the target alone. Raise ValueError without timed outcomes."""
    timed = [(o.target_seconds, o.seconds[i][j]) for o in outcomes if o.target_seconds is not None]
    if not timed:
        raise CalibrationError("none of these problems was timed: calibrate in a new folder with a larger --timed")
    return sum(alone for alone, _ in timed) / sum(seconds for _, seconds in timed)


def check_problems(problems: Sequence[HasPrompt], settings: CalibrationSettings) -> None:
    """Raise ValueError unless the problems suffice for the smallest risk level."""
    check_ids(problems)
    needed = least_problems(settings.risks[0], settings.level)
    if len(problems) < needed:
        shared = " (the lengths of blocks share the error budget)" if len(settings.blocks) > 1 else ""
        raise CalibrationError(
            f"risk {settings.risks[0]} at confidence {settings.confidence} takes at least {needed} problems{shared}, "
            f"and there are {len(problems)}: give more, or a larger risk"
        )


def _outcome(
    engine: ParseEngine,
    problem: HasPrompt,
    answers: Answers,
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    audited: Callable[[str, str], bool],
    settings: CalibrationSettings,
    timed: bool,
) -> Outcome:
    reference = _majority(engine, problem, same, settings) if settings.majority else None
    checked: dict[tuple[str, bool], bool | None] = {}

    def right(answer: Text) -> bool | None:
        """Whether an answer is right and ends; each text is checked once."""
        key = answer.text, answer.finish_reason == "length"
        if key not in checked:
            found = check(problem, answer.text)
            checked[key] = None if found is None else found and not key[1]
        return checked[key]

    alone = answers.alone
    own = [right(answer) for answer in alone]
    if None in own and settings.loss != "disagreement":
        raise CalibrationError(
            f"the checker cannot decide on an answer to problem {problem.id}: calibrate with --loss disagreement"
        )
    compared = [alone[0].text if reference is None else reference]

    @cache
    def differs(text: str, length: bool) -> bool:
        """Whether a greedy answer is another than the target's."""
        return (length and alone[0].finish_reason != "length") or not same(compared[0], text)

    @cache
    def unlike(text: str) -> bool:
        if not (settings.sampling.greedy or settings.samples > 1):
            return True  # an audit compares answers of other random numbers
        return not audited(alone[-1].text, text)  # an audit has texts alone

    def loss(mine: Sequence[Text]) -> float:
        if settings.loss == "disagreement":
            return float(differs(mine[0].text, mine[0].finish_reason == "length"))
        pairs = [(float(bool(a)), float(bool(right(b)))) for a, b in zip(own, mine, strict=True)]
        lost = [a - b for a, b in pairs] if settings.loss == "accuracy" else [a * (1 - b) for a, b in pairs]
        return sum(lost) / len(lost)

    losses = [[loss(mine) for mine in order] for order in answers.judged]
    disagreed = [[unlike(mine[0].text) for mine in order] for order in answers.judged]
    share = None if None in own else sum(map(bool, own)) / len(own)
    if not timed:
        return Outcome(problem.id, share, None, losses, disagreed, [])
    taken = [
        _time_each_text(engine, problem, settings, order, [mine[0] for mine in found])
        for order, found in zip(settings.orders, answers.judged, strict=True)
    ]
    seconds = [[round(each.timings.total_s, 4) for each in order] for order in taken]
    paces = [[round(len(e.token_ids) / max(1, e.stats.target_forwards), 4) for e in order] for order in taken]
    return Outcome(problem.id, share, round(answers.target_seconds, 4), losses, disagreed, seconds, paces)


def _time_each_text(
    engine: ParseEngine,
    problem: HasPrompt,
    settings: CalibrationSettings,
    order: Sequence[OperatingPoint],
    answers: Sequence[Text],
) -> list[Generation]:
    """Return a timed answer at each operating point, one for points with the same text. Above a threshold of 1 the
    answer takes another way to the same text, so it is timed on its own, and sampled without a seed, with which the
    chains of lossless sampling would not end where they stop paying."""
    took: dict[tuple[str, bool], Generation] = {}
    plain = settings.generation(problem.id, 0)
    keys = [(answer.text, point.threshold > 1) for answer, point in zip(answers, order, strict=True)]
    for key in dict.fromkeys(keys):
        same = [point for point, other in zip(order, keys, strict=True) if other == key]
        engine.clear_caches()
        point = same[len(same) // 2]
        own = plain.override(**asdict(point))
        if point.threshold > 1:
            own = own.override(resume_sampling=replace(own.resume_sampling, seed=None))
        timed = single(engine.generate(problem.prompt, own))
        if timed.fallback not in (None, "unusual_draft"):
            raise CalibrationError(f"an answer to problem {problem.id} has no draft ({timed.fallback}): run it again")
        took[key] = timed
    return [took[key] for key in keys]


def _majority(
    engine: ParseEngine,
    problem: HasPrompt,
    same: Callable[[str, str], bool],
    settings: CalibrationSettings,
) -> str:
    """Return the first sample of the target whose final answer has the most votes."""
    texts = []
    for seed in range(settings.majority):
        sampling = Sampling(SAMPLE_TEMPERATURE, seed=seed)
        sample = engine.generate_target(problem.prompt, settings.generation(), resume_sampling=sampling)
        texts.append(single(sample).text)
    votes = [sum(same(one, other) for other in texts) for one in texts]
    return texts[votes.index(max(votes))]


def _check_feasible(outcomes: Sequence[Outcome], n_problems: int, settings: CalibrationSettings) -> None:
    """Raise ValueError as soon as no outcome of the remaining problems can support a promise."""
    some = len(outcomes) >= min(_MIN_TARGET_PROBLEMS, n_problems)
    if settings.loss != "disagreement" and some and not any(outcome.target_right for outcome in outcomes):
        raise CalibrationError(
            f"the target answers none of the first {len(outcomes)} problems right, so it has nothing to lose and "
            "a promise would say nothing: check task, chat template and checker"
        )
    for i in range(len(settings.blocks)):
        lost = [outcome.losses[i][0] for outcome in outcomes]
        least = -1.0 if settings.loss == "accuracy" else 0.0
        best = [*lost, *[least] * (n_problems - len(lost))]
        if p_value(best, settings.risks[-1], settings.level, binary=settings.binary) <= settings.level:
            return
    raise CalibrationError(
        f"even where nothing of a draft is accepted, the loss is {sum(lost):g} on {len(lost)} problems "
        f"({LOSSES[settings.loss]}), so no risk up to {settings.risks[-1]} can be promised for this pair on "
        f"{n_problems} problems: in bfloat16 the target's own answers differ from run to run; use float32, more "
        "problems, or a larger risk"
    )
