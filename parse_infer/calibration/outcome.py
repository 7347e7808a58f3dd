"""One problem of a calibration: the losses of all operating points, and the time of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from parse_infer.calibration.answers import Answers, Text, single
from parse_infer.calibration.held_out import HasPrompt
from parse_infer.calibration.schema import OperatingPoint
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.errors import CalibrationError
from parse_infer.request.output import Generation
from parse_infer.settings.sampling import Sampling

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine

SAMPLE_TEMPERATURE = 0.7  # of the target's samples for a majority answer


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


def outcome_of(
    engine: ParseEngine,
    problem: HasPrompt,
    answers: Answers,
    check: Callable[[Any, str], bool | None],
    same: Callable[[str, str], bool],
    audited: Callable[[str, str], bool],
    settings: CalibrationSettings,
    timed: bool,
) -> Outcome:
    """One problem's losses, and the time of its answers if `timed`. Raises ValueError if the checker cannot decide."""
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
    chains of lossless sampling would not end where one more token is not faster."""
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
