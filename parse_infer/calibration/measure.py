"""Calibrate a pair: compare the target alone with PARSE at every operating point, and sum the losses.

The calibration writes one record per problem, so that an interrupted run can resume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from parse_infer.calibration.answers import batched, joint_decoder, replayed
from parse_infer.calibration.held_out import HasPrompt, check_ids, leave_out_learnt
from parse_infer.calibration.outcome import Outcome, outcome_of
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.calibration.risk import least_problems, n_passing, p_value, upper_bound
from parse_infer.calibration.schema import LOSSES, Calibration, TestedPoint
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.errors import CalibrationError
from parse_infer.models.environment import describe_run
from parse_infer.settings.generation import GenerationSettings

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine

_MIN_TARGET_PROBLEMS = 50  # a usable target answers at least one of this many problems right


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
        joint_decoder(engine, [engine.backend.judge], settings)  # raises
    asked = [[p.id, p.prompt, getattr(p, "reference", None)] for p in problems]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    config = {
        **{name: getattr(settings, name) for name in ("loss", "blocks", "acceptance", "max_new_tokens", "majority")},
        **({} if settings.sampling.greedy else {"sampling": asdict(settings.sampling), "samples": settings.samples}),
        # Fix the number of problems too: adding problems until a promise holds would invalidate the test.
        **{
            "models": models,
            "drafters": engine.describe_drafters(),
            "task": task,
            "n_problems": len(problems),
            "timed": settings.timed,
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
            outcome_of(engine, first[0], found, check, same_for(first[0]), same, settings, timed=True)
        each = ((p, replayed(engine, p, settings, p.id in timed)) for p in first)
        for problem, answers in itertools.chain(each, batched(engine, rest, settings) if rest else ()):
            yield outcome_of(engine, problem, answers, check, same_for(problem), same, settings, problem.id in timed)
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
    needed = least_problems(settings.risks[0], settings.level, binary=settings.binary or settings.loss == "accuracy")
    if len(problems) < needed:
        shared = " (the lengths of blocks share the error budget)" if len(settings.blocks) > 1 else ""
        raise CalibrationError(
            f"risk {settings.risks[0]} at confidence {settings.confidence} takes at least {needed} problems{shared}, "
            f"and there are {len(problems)}: give more, or a larger risk"
        )


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
