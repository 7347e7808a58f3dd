"""Calibrate a pair: answer problems with the target alone and with PARSE under every setting, and see what is lost.

Writes one record per problem as soon as it is there, so that an interrupted calibration goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from parse_infer.acceptance import ACCEPT_NOTHING, Acceptance, check_share
from parse_infer.calibration.candidates import RESUMES, candidates
from parse_infer.calibration.replay import Replay, ReplayedEngine
from parse_infer.calibration.risk import least_problems, n_passing, p_value, upper_bound
from parse_infer.calibration.schema import LOSSES, Calibration, Loss, OperatingPoint, TestedPoint, risks
from parse_infer.held_out import leave_out_learnt
from parse_infer.models.environment import describe_run
from parse_infer.models.prompts import Prompt
from parse_infer.models.sampling import Sampling
from parse_infer.record_store import RecordStore
from parse_infer.settings import GenerationSettings, Resume

SAMPLE_TEMPERATURE = 0.7  # of the answers that vote
_SOME = 50  # problems of which a usable target answers at least one


class CalibratedEngine(ReplayedEngine, Protocol):
    """What a calibration needs: a `ParseEngine` or a `Coordinator`, with a draft model and a judge."""

    @property
    def train_problems(self) -> frozenset[str]:
        """Hashes of the prompts that the judge was trained on, see `leave_out_learnt`."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether a greedy text is the same however it comes about: by guesses, packed or alone."""
        ...

    def describe(self) -> dict[str, Any]: ...

    def describe_drafters(self) -> dict[str, Any]: ...

    def describe_machine(self) -> dict[str, Any]: ...

    def generate_target(
        self, prompts: Prompt, settings: GenerationSettings | None = None, **overrides: Any
    ) -> Any: ...


class CalibrationProblem(Protocol):
    """What a calibration needs of a problem."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...


@dataclass(frozen=True)
class CalibrationSettings:
    """What is promised, and what is tried for it."""

    risks: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1)
    confidence: float = 0.9
    loss: Loss = "accuracy"
    resumes: tuple[Resume, ...] = RESUMES
    acceptance: Acceptance = GenerationSettings.acceptance
    max_new_tokens: int = 256
    samples: int = 0
    """With loss "disagreement": the target's own answer is what most of so many samples say; 0: its greedy answer."""
    timed: int = 100
    """Problems, the first ones, on which the target also answers by itself, to be timed. On the others its text comes
    from the setting that accepts nothing, which is several times faster and the same in float32; in other number types
    the target answers all of them by itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "risks", risks(self.risks))
        object.__setattr__(self, "resumes", tuple(dict.fromkeys(self.resumes)))
        check_share(self.confidence, "confidence")
        if self.loss not in get_args(Loss):
            raise ValueError(f"loss is {self.loss!r}; choose one of {', '.join(get_args(Loss))}")
        if self.samples and (self.samples < 3 or self.loss != "disagreement"):
            raise ValueError(
                f"samples is {self.samples}: a majority takes at least 3, and only loss disagreement asks for one"
            )
        if self.timed < 1:
            raise ValueError(f"timed is {self.timed}: without a timed problem no setting is known to be fast")
        candidates(self.resumes, self.acceptance)  # names a wrong value
        self.generation()

    @property
    def orders(self) -> list[list[OperatingPoint]]:
        return candidates(self.resumes, self.acceptance)

    @property
    def level(self) -> float:
        """Share of the error budget that each order of settings has."""
        return (1 - self.confidence) / len(self.resumes)

    def generation(self) -> GenerationSettings:
        return GenerationSettings(self.max_new_tokens, acceptance=self.acceptance, adaptive=False)


@dataclass(frozen=True)
class Outcome:
    """One problem. `losses`, `disagreed` and `seconds` have an entry for each setting, by order."""

    problem_id: str
    target_right: bool | None
    """None: nothing tells."""
    target_seconds: float | None
    """None: the target did not answer by itself, and `seconds` say nothing."""
    losses: list[list[float]]
    disagreed: list[list[bool]]
    """Whether the final answer is not that of the target's greedy one."""
    seconds: list[list[float]]
    """What an answer takes under each setting: its parts, measured once (`Replay`)."""

    @property
    def key(self) -> str:
        return self.problem_id


def calibrate(
    engine: CalibratedEngine,
    problems: Sequence[CalibrationProblem],
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    folder: str | Path,
    settings: CalibrationSettings | None = None,
    *,
    task: str = "",
    console: Console | None = None,
) -> Calibration:
    """Measure what is not measured yet in `folder`, and test the settings.

    Args:
        engine: with target, draft model and judge.
        problems: with different ids; those that the judge was trained on are left out, see `leave_out_learnt`.
        check: whether a text answers a problem; None where nothing tells (then only loss "disagreement" is possible).
        same: whether two texts give the same final answer.
        task: what the problems are.

    Raises:
        ValueError: too few problems for a risk, mostly training problems of the judge, a target that is never right, a
            pair that cannot keep any of the risks even where it accepts nothing, or a folder with another calibration.
    """
    settings = settings or CalibrationSettings()
    check_problems(problems, settings)
    problems = leave_out_learnt(problems, engine.train_problems)
    check_problems(problems, settings)
    models = engine.describe()
    if not (models.get("draft") and models.get("adapter")):
        raise ValueError("a calibration needs a draft model, and a judge: an adapter, or zero_shot=True")
    digest = hashlib.sha256(json.dumps([[p.id, p.prompt] for p in problems]).encode()).hexdigest()[:16]
    config = {
        **{name: getattr(settings, name) for name in ("loss", "resumes", "acceptance", "max_new_tokens", "samples")},
        # The number of problems too: adding some until a promise holds would be no test of it.
        **{
            "models": models,
            "drafters": engine.describe_drafters(),
            "task": task,
            "n_problems": len(problems),
            "problems": digest,
        },
    }
    store = RecordStore(folder, config, Outcome, "calibration")
    outcomes = _measure(engine, problems, check, same, settings, store, console)
    made = {**engine.describe_machine(), **describe_run()}
    made["timed_problems"] = sum(outcome.target_seconds is not None for outcome in outcomes)
    calibration = Calibration(
        task, len(problems), digest, settings.loss, settings.confidence, settings.max_new_tokens, models, [], {}, made
    )
    return certify(calibration, outcomes, settings)


def certify(calibration: Calibration, outcomes: Sequence[Outcome], settings: CalibrationSettings) -> Calibration:
    """`calibration` with what these outcomes show: every setting that was tried, and the promises."""
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
    """Of setting j in order i against the target alone, on the outcomes that were timed. ValueError without any."""
    timed = [(o.target_seconds, o.seconds[i][j]) for o in outcomes if o.target_seconds is not None]
    if not timed:
        raise ValueError("none of these problems was timed: calibrate in a new folder with a larger --timed")
    return sum(alone for alone, _ in timed) / sum(seconds for _, seconds in timed)


def check_problems(problems: Sequence[CalibrationProblem], settings: CalibrationSettings) -> None:
    """Raise ValueError unless the problems can show what is to be promised."""
    if not problems:
        raise ValueError("there are no problems to calibrate on: choose another task, split or limit")
    name, count = Counter(p.id for p in problems).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{count} problems have the id {name!r}: give each its own")
    needed = least_problems(settings.risks[0], settings.level)
    if len(problems) < needed:
        shared = " (the ways to resume share the error budget)" if len(settings.resumes) > 1 else ""
        raise ValueError(
            f"risk {settings.risks[0]} at confidence {settings.confidence} takes at least {needed} problems{shared}, "
            f"and there are {len(problems)}: give more, or a larger risk"
        )


def _measure(
    engine: CalibratedEngine,
    problems: Sequence[CalibrationProblem],
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    settings: CalibrationSettings,
    store: RecordStore[Outcome],
    console: Console | None,
) -> list[Outcome]:
    timed = {problem.id for problem in (problems[: settings.timed] if engine.deterministic else problems)}
    pending = [problem for problem in problems if problem.id not in store.records]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True)) as progress:
        bar = progress.add_task("calibrate", total=len(problems), completed=len(problems) - len(pending))
        if pending:
            _outcome(engine, pending[0], check, same, settings, timed=True)  # not counted: first calls are slower
        for problem in pending:
            store.append(_outcome(engine, problem, check, same, settings, timed=problem.id in timed))
            progress.advance(bar)
            _check_hope([store.records[p.id] for p in problems if p.id in store.records], len(problems), settings)
    return [store.records[problem.id] for problem in problems]


def _outcome(
    engine: CalibratedEngine,
    problem: CalibrationProblem,
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    settings: CalibrationSettings,
    timed: bool,
) -> Outcome:
    plain = settings.generation()
    target_seconds = None
    if timed:
        engine.clear_caches()
        alone = engine.generate_target(problem.prompt, plain)
        target_seconds = round(alone.timings.total_s, 4)
    majority = _majority(engine, problem, same, settings) if settings.samples else None
    losses: list[list[float]] = []
    disagreed: list[list[bool]] = []
    seconds: list[list[float]] = []
    found: dict[str, tuple[float, bool]] = {}
    with Replay(engine) as replay:
        replay.clear_caches()
        if not timed:
            alone, _ = replay.answer(problem.prompt, plain.override(threshold=ACCEPT_NOTHING, resume="finish"))
        right = check(problem, alone.text)
        if right is None and settings.loss == "accuracy":
            raise ValueError(
                f"nothing tells whether an answer to problem {problem.id} is right: calibrate with --loss disagreement"
            )
        for order in settings.orders:
            losses.append([])
            disagreed.append([])
            seconds.append([])
            for setting in order:
                answer, took = replay.answer(problem.prompt, plain.override(**asdict(setting)))
                if answer.text not in found:
                    lost = not same(alone.text if majority is None else majority, answer.text)
                    if settings.loss == "accuracy":
                        lost = bool(right) and not check(problem, answer.text)
                    found[answer.text] = float(lost), not same(alone.text, answer.text)
                losses[-1].append(found[answer.text][0])
                disagreed[-1].append(found[answer.text][1])
                seconds[-1].append(round(took, 4))
    return Outcome(problem.id, right, target_seconds, losses, disagreed, seconds)


def _majority(
    engine: CalibratedEngine,
    problem: CalibrationProblem,
    same: Callable[[str, str], bool],
    settings: CalibrationSettings,
) -> str:
    """The final answer that most samples of the target have, in the first of these samples."""
    texts = []
    for seed in range(settings.samples):
        sampling = Sampling(SAMPLE_TEMPERATURE, seed=seed)
        texts.append(engine.generate_target(problem.prompt, settings.generation(), resume_sampling=sampling).text)
    votes = [sum(same(one, other) for other in texts) for one in texts]
    return texts[votes.index(max(votes))]


def _check_hope(outcomes: Sequence[Outcome], n_problems: int, settings: CalibrationSettings) -> None:
    """Stop as soon as it is certain that nothing can be promised, whatever the remaining problems bring."""
    if settings.loss == "accuracy" and len(outcomes) >= min(_SOME, n_problems):
        if not any(outcome.target_right for outcome in outcomes):
            raise ValueError(
                f"the target answers none of the first {len(outcomes)} problems right, so it has nothing to lose and "
                "a promise would say nothing: check task, chat template and checker"
            )
    for i in range(len(settings.resumes)):
        lost = [outcome.losses[i][0] for outcome in outcomes]
        best = [*lost, *[0.0] * (n_problems - len(lost))]
        if p_value(best, settings.risks[-1]) <= settings.level:
            return
    raise ValueError(
        f"even where nothing of a draft is accepted, {sum(lost):g} of {len(lost)} problems count as lost "
        f"({LOSSES[settings.loss]}), so no risk up to {settings.risks[-1]} can be promised for this pair on "
        f"{n_problems} problems: in bfloat16 the target's own answers differ from run to run; use float32, more "
        "problems, or a larger risk"
    )
