"""Calibrate a pair: compare the target alone with PARSE at every operating point, and count the losses.

The calibration writes one record per problem, so that an interrupted run can resume.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from parse_infer.calibration.held_out import HasPrompt, check_ids, leave_out_learnt
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.risk import least_problems, n_passing, p_value, upper_bound
from parse_infer.calibration.schema import LOSSES, Calibration, Loss, OperatingPoint, TestedPoint, risks
from parse_infer.errors import CalibrationError
from parse_infer.models.environment import describe_run
from parse_infer.request.output import Generation
from parse_infer.settings.acceptance import ACCEPT_NOTHING, Acceptance, check_share
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import Sampling

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine

# Fixed before any problem is seen. Evenly spaced in log-odds, because validities concentrate near 1.
THRESHOLDS: tuple[float, ...] = (ACCEPT_NOTHING, *(1 / (1 + math.exp(x / 2)) for x in range(-18, 15)), 0.0)
BLOCKS: tuple[BlockTokens, ...] = ("whole", "auto")
SAMPLE_TEMPERATURE = 0.7  # of the target's samples for a majority answer
_MIN_TARGET_PROBLEMS = 50  # a usable target answers at least one of this many problems right


def candidates(
    blocks: Sequence[BlockTokens] = BLOCKS, acceptance: Acceptance = GenerationSettings.acceptance
) -> list[list[OperatingPoint]]:
    """Return one sequence of operating points per length of blocks, from accepting nothing to accepting everything.

    Raises ValueError for empty `blocks` or an invalid length.
    """
    if not blocks:
        raise CalibrationError("block_tokens is empty; give auto, whole or numbers")
    for length in blocks:
        GenerationSettings(block_tokens=length)  # raises for an invalid one
    return [[OperatingPoint(t, length, acceptance) for t in THRESHOLDS] for length in dict.fromkeys(blocks)]


@dataclass(frozen=True)
class CalibrationSettings:
    """The risk levels to promise, and the operating points to try."""

    risks: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    confidence: float = 0.9
    loss: Loss = "accuracy"
    blocks: tuple[BlockTokens, ...] = BLOCKS
    acceptance: Acceptance = GenerationSettings.acceptance
    max_new_tokens: int = 256
    samples: int = 0
    """With loss "disagreement": number of target samples for a majority answer; 0: the target's greedy answer."""
    timed: int = 100
    """Number of problems on which answers are timed: the target's alone, and each text of PARSE. On the others, the
    target's text comes from the operating point that accepts nothing, which is several times faster and exact in
    float32. In other dtypes the target answers all problems alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "risks", risks(self.risks))
        object.__setattr__(self, "blocks", tuple(dict.fromkeys(self.blocks)))
        check_share(self.confidence, "confidence")
        if self.loss not in get_args(Loss):
            raise CalibrationError(f"loss is {self.loss!r}; choose one of {', '.join(get_args(Loss))}")
        if self.samples and (self.samples < 3 or self.loss != "disagreement"):
            raise CalibrationError(
                f"samples is {self.samples}: a majority takes at least 3, and only loss disagreement uses a majority"
            )
        if self.timed < 1:
            raise CalibrationError(f"timed is {self.timed}: without a timed problem no speedup is known")
        candidates(self.blocks, self.acceptance)  # raises for an unknown value
        self.generation()

    @property
    def orders(self) -> list[list[OperatingPoint]]:
        return candidates(self.blocks, self.acceptance)

    @property
    def level(self) -> float:
        """Share of the error budget for each sequence of operating points."""
        return (1 - self.confidence) / len(self.blocks)

    def generation(self) -> GenerationSettings:
        return GenerationSettings(self.max_new_tokens, acceptance=self.acceptance, adaptive=False)


@dataclass(frozen=True)
class Outcome:
    """Results on one problem. `losses`, `disagreed` and `seconds` have one entry per operating point, by sequence."""

    problem_id: str
    target_right: bool | None
    """None: the checker cannot decide."""
    target_seconds: float | None
    """None: nothing was timed on this problem."""
    losses: list[list[float]]
    disagreed: list[list[bool]]
    """Whether the final answer differs from the target's greedy answer."""
    seconds: list[list[float]]
    """Time of an answer at each operating point; points with the same text share one answer. Empty: not timed."""

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
        engine.backend.check(GenerationSettings(block_tokens=length), None)
    digest = hashlib.sha256(json.dumps([[p.id, p.prompt] for p in problems]).encode()).hexdigest()[:16]
    config = {
        **{name: getattr(settings, name) for name in ("loss", "blocks", "acceptance", "max_new_tokens", "samples")},
        # Fix the number of problems too: adding problems until a promise holds would invalidate the test.
        **{
            "models": models,
            "drafters": engine.describe_drafters(),
            "task": task,
            "n_problems": len(problems),
            "problems": digest,
            "thresholds": hashlib.sha256(json.dumps(THRESHOLDS).encode()).hexdigest()[:16],
            "machine": engine.describe_machine(),  # seconds of two machines do not add up
        },
    }
    store = RecordStore(folder, config, Outcome, "calibration")
    timed = {problem.id for problem in problems[: settings.timed]}

    def same_for(problem: HasPrompt) -> Callable[[str, str], bool]:
        own = comparison(problem)
        return same if own is None else lambda one, other: one == other or own(one, other)

    def measure(pending: list[HasPrompt]) -> Iterator[Outcome]:
        _outcome(engine, pending[0], check, same_for(pending[0]), same, settings, timed=True)  # warm-up
        for problem in pending:
            yield _outcome(engine, problem, check, same_for(problem), same, settings, timed=problem.id in timed)
            _check_feasible([store.records[p.id] for p in problems if p.id in store.records], len(problems), settings)

    outcomes = run_missing(store, {problem.id: problem for problem in problems}, measure, "calibrate", console)
    made = {**engine.describe_machine(), **describe_run()}
    made["timed_problems"] = sum(outcome.target_seconds is not None for outcome in outcomes)
    calibration = Calibration(
        task, len(problems), digest, settings.loss, settings.confidence, settings.max_new_tokens, models, [], {}, made
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
            bound = upper_bound(losses, 1 - settings.confidence)
            differing = upper_bound([float(outcome.disagreed[i][j]) for outcome in outcomes], 1 - settings.confidence)
            places[i].append(len(tried))
            faster = round(speedup(outcomes, i, j), 4)
            tried.append(TestedPoint(setting, float(sum(losses)), round(bound, 6), faster, round(differing, 6)))
    promises: dict[float, int | None] = {}
    for risk in settings.risks:
        shown: list[int] = []
        for i in range(len(orders)):
            losses_of_each = ([outcome.losses[i][j] for outcome in outcomes] for j in range(len(orders[i])))
            shown += places[i][: n_passing(losses_of_each, risk, settings.level)]
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
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    audited: Callable[[str, str], bool],
    settings: CalibrationSettings,
    timed: bool,
) -> Outcome:
    plain = settings.generation()
    from_replay = engine.deterministic and not timed
    if not from_replay:
        engine.clear_caches()
        alone = engine.generate_target(problem.prompt, plain)
    majority = _majority(engine, problem, same, settings) if settings.samples else None
    losses: list[list[float]] = []
    disagreed: list[list[bool]] = []
    texts: list[list[str]] = []
    found: dict[tuple[str, bool], tuple[float, bool]] = {}
    with Replay(engine) as replay:
        replay.clear_caches()
        if from_replay:
            alone = replay.answer(problem.prompt, plain.override(threshold=ACCEPT_NOTHING, block_tokens="whole"))
        assert isinstance(alone, Generation)
        cut_off = alone.finish_reason == "length"
        right = check(problem, alone.text)
        if right is None and settings.loss == "accuracy":
            raise CalibrationError(
                f"the checker cannot decide on an answer to problem {problem.id}: calibrate with --loss disagreement"
            )
        right = right and not cut_off
        for order in settings.orders:
            losses.append([])
            disagreed.append([])
            texts.append([])
            for setting in order:
                answer = replay.answer(problem.prompt, plain.override(**asdict(setting)))
                key = answer.text, answer.finish_reason == "length"
                if key not in found:
                    lost = (key[1] and not cut_off) or not same(
                        alone.text if majority is None else majority, answer.text
                    )
                    if settings.loss == "accuracy":
                        lost = bool(right) and (key[1] or not check(problem, answer.text))
                    found[key] = float(lost), not audited(alone.text, answer.text)  # an audit has texts alone
                losses[-1].append(found[key][0])
                disagreed[-1].append(found[key][1])
                texts[-1].append(answer.text)
    if not timed:
        return Outcome(problem.id, right, None, losses, disagreed, [])
    seconds = [
        _time_each_text(engine, problem, plain, order, found)
        for order, found in zip(settings.orders, texts, strict=True)
    ]
    return Outcome(problem.id, right, round(alone.timings.total_s, 4), losses, disagreed, seconds)


def _time_each_text(
    engine: ParseEngine,
    problem: HasPrompt,
    plain: GenerationSettings,
    order: Sequence[OperatingPoint],
    texts: Sequence[str],
) -> list[float]:
    """Return the seconds of an answer at each operating point, timed once for points with the same text. Above a
    threshold of 1 the answer takes another way to the same text, so it is timed on its own."""
    took: dict[tuple[str, bool], float] = {}
    keys = [(text, point.threshold > 1) for text, point in zip(texts, order, strict=True)]
    for key in dict.fromkeys(keys):
        same = [point for point, other in zip(order, keys, strict=True) if other == key]
        engine.clear_caches()
        timed = engine.generate(problem.prompt, plain.override(**asdict(same[len(same) // 2])))
        assert isinstance(timed, Generation)
        if timed.fallback not in (None, "unusual_draft"):
            raise CalibrationError(f"an answer to problem {problem.id} has no draft ({timed.fallback}): run it again")
        took[key] = round(timed.timings.total_s, 4)
    return [took[key] for key in keys]


def _majority(
    engine: ParseEngine,
    problem: HasPrompt,
    same: Callable[[str, str], bool],
    settings: CalibrationSettings,
) -> str:
    """Return the first sample of the target whose final answer has the most votes."""
    texts = []
    for seed in range(settings.samples):
        sampling = Sampling(SAMPLE_TEMPERATURE, seed=seed)
        sample = engine.generate_target(problem.prompt, settings.generation(), resume_sampling=sampling)
        assert isinstance(sample, Generation)
        texts.append(sample.text)
    votes = [sum(same(one, other) for other in texts) for one in texts]
    return texts[votes.index(max(votes))]


def _check_feasible(outcomes: Sequence[Outcome], n_problems: int, settings: CalibrationSettings) -> None:
    """Raise ValueError as soon as no outcome of the remaining problems can support a promise."""
    some = len(outcomes) >= min(_MIN_TARGET_PROBLEMS, n_problems)
    if settings.loss == "accuracy" and some and not any(outcome.target_right for outcome in outcomes):
        raise CalibrationError(
            f"the target answers none of the first {len(outcomes)} problems right, so it has nothing to lose and "
            "a promise would say nothing: check task, chat template and checker"
        )
    for i in range(len(settings.blocks)):
        lost = [outcome.losses[i][0] for outcome in outcomes]
        best = [*lost, *[0.0] * (n_problems - len(lost))]
        if p_value(best, settings.risks[-1]) <= settings.level:
            return
    raise CalibrationError(
        f"even where nothing of a draft is accepted, {sum(lost):g} of {len(lost)} problems count as lost "
        f"({LOSSES[settings.loss]}), so no risk up to {settings.risks[-1]} can be promised for this pair on "
        f"{n_problems} problems: in bfloat16 the target's own answers differ from run to run; use float32, more "
        "problems, or a larger risk"
    )
