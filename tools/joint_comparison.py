"""A comparison's judges in one measurement, for pairs too slow to run each alone: rules, and trained judges on
log-probabilities.

The answers of all judges come from joint decoding (`parse_infer.calibration.joint_decoder`), in `texts`. Then the
distinct answers of each judge to some of the problems are timed, as requests of their own, in `times`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_tools.tasks.task import Problem, Task
from parse_infer.backends.local.load import load_judge
from parse_infer.calibration.answers import decoded_text, joint_decoder, single, targets_alone
from parse_infer.calibration.held_out import leave_out_learnt
from parse_infer.calibration.joint_decoder import JointAnswer, JointDecoder, JointRow
from parse_infer.calibration.measure import certify, check_problems
from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.schema import Calibration
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.judge.judge import Judge
from parse_infer.models.environment import describe_run
from parse_infer.settings.generation import GenerationSettings
from parse_infer.token_drafters.registry import load_token_drafter


@dataclass(frozen=True)
class Texts:
    """The answers to one problem.

    Attributes:
        answers: for each sample its distinct answers, each with the number of its tokens, and whether it ends right.
        places: by judge, for each sample and operating point, which of these answers it has.
        rejected: likewise, the number of draft tokens that the judge did not keep.
        alone: for each sample, which of these answers the target has alone (`targets_alone`); none: that of the point
            that accepts nothing.
    """

    problem_id: str
    answers: list[list[tuple[int, bool]]]
    places: dict[str, list[list[int]]]
    rejected: dict[str, list[list[int]]]
    alone: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.problem_id


@dataclass(frozen=True)
class Times:
    """Seconds and tokens per target forward of answers to one problem, for its first sample: of the target alone, of
    lossless speculation, and by judge of each operating point."""

    problem_id: str
    target: float
    lossless: tuple[float, float]
    rules: dict[str, list[tuple[float, float]]]

    @property
    def key(self) -> str:
        return self.problem_id


class JointComparison:
    """Judges by name, each with its `judge` and `adapter` as in `LocalOptions`, and settings, which differ in their
    thresholds only.

    Raises:
        ValueError: settings that joint decoding does not serve.
    """

    def __init__(self, judges: Mapping[str, tuple[str | None, str | None, CalibrationSettings]], folder: Path) -> None:
        self.judges = {name: (judge, adapter) for name, (judge, adapter, _) in sorted(judges.items())}
        self.settings = {name: own for name, (_, _, own) in sorted(judges.items())}
        self.folder, self.one = folder, next(iter(self.settings.values()))
        for name, chosen in self.judges.items():
            if chosen == (None, None):
                raise ParseError(f"{name} has a batch_size above 1 and no judge: name a `judge` or an `adapter`")
        if self.one.loss == "disagreement" or len(self.one.orders) > 1:
            raise ParseError("batch_size above 1 needs loss accuracy or lost, and one length of blocks")

    def measure(
        self, engine: ParseEngine, task: Task, problems: Sequence[Problem], where: str
    ) -> dict[str, tuple[list[Outcome], Calibration, list[dict[str, float]]]]:
        """Decode and time what is missing; return the records, the calibration and the `sizes` of each judge."""
        own, models = self.one, engine.describe()
        judges: dict[str, Judge] = {}
        for name, (judge, adapter) in self.judges.items():
            if (loaded := load_judge(engine.target, adapter, judge)) is not None:
                judges[name] = loaded
        decoder = joint_decoder(engine, [*judges.values()], own)
        learnt = engine.train_problems.union(*(getattr(judge, "train_problems", ()) for judge in judges.values()))
        problems = leave_out_learnt(problems, learnt)
        check_problems(problems, own)
        config: dict[str, Any] = {
            "judges": {name: judge.fingerprint for name, judge in judges.items()},
            "thresholds": {name: self._thresholds(name) for name in self.judges},
            "task": where,
            "sampling": asdict(own.sampling),
            "samples": own.samples,
            "max_new_tokens": own.max_new_tokens,
            "models": models,
        }
        by_id = {problem.id: problem for problem in problems}
        texts = RecordStore(self.folder / "texts", config, Texts, "comparison")
        found = run_missing(
            texts, by_id, lambda pending: self._texts(engine, decoder, task, judges, pending), "answers"
        )
        timing = {"blocks": own.blocks, "acceptance": own.acceptance, "machine": engine.describe_machine()}
        times = RecordStore(self.folder / "times", config | timing, Times, "comparison")
        timed = {problem.id: problem for problem in problems[: own.timed]}
        run_missing(times, timed, lambda pending: self._times(engine, judges, texts.records, pending), "times")
        calibration = Calibration(
            where,
            len(problems),
            "",
            own.loss,
            own.confidence,
            own.max_new_tokens,
            models,
            tried=[],
            promises={},
            sampling=replace(own.sampling, seed=None),
            samples=own.samples,
            made={**engine.describe_machine(), **describe_run()},
        )
        results = {}
        for name, judge in judges.items():
            outcomes = [self._outcome(name, texts, times.records.get(texts.problem_id)) for texts in found]
            of_rule = replace(calibration, models=models | {"adapter": judge.fingerprint})
            results[name] = outcomes, certify(of_rule, outcomes, self.settings[name]), self.sizes(name, found)
        return results

    def sizes(self, name: str, found: Sequence[Texts]) -> list[dict[str, float]]:
        """For each operating point, the mean number of tokens of an answer, and of those that the target wrote."""
        answers = sum(len(texts.answers) for texts in found)
        sizes = []
        for point in range(len(self._thresholds(name))):
            tokens = written = 0
            for texts in found:
                for distinct, places, rejected in zip(
                    texts.answers, texts.places[name], texts.rejected[name], strict=True
                ):
                    tokens += distinct[places[point]][0]
                    written += rejected[point]
            sizes.append({"tokens": tokens / answers, "written": written / answers})
        return sizes

    def _thresholds(self, name: str) -> list[float]:
        return [point.threshold for point in self.settings[name].orders[0]]

    def _sample(self, problem: Problem, number: int) -> GenerationSettings:
        return self.one.generation(problem.id, number)

    def _texts(
        self,
        engine: ParseEngine,
        decoder: JointDecoder,
        task: Task,
        judges: Mapping[str, Judge],
        pending: Sequence[Problem],
    ) -> Iterator[Texts]:
        own = self.one
        points = tuple((number, each) for number, name in enumerate(judges) for each in self._thresholds(name))
        samples = [
            (problem, self._sample(problem, i).resume_sampling) for problem in pending for i in range(own.samples)
        ]
        rows = [JointRow(problem.prompt, points, own.max_new_tokens, sampling) for problem, sampling in samples]
        found, apart = decoder.answers(rows), targets_alone(engine, decoder, rows)
        engines = self._engines(engine, judges)
        for problem in pending:
            decoded, alone = list(islice(found, own.samples)), list(islice(apart, own.samples))
            each = [row or self._replayed(engines, problem, i) for i, row in enumerate(decoded)]
            yield self._record(engine, task, problem, each, alone)

    def _replayed(self, engines: Mapping[str, ParseEngine], problem: Problem, sample: int) -> list[JointAnswer]:
        """The answers that joint decoding leaves to the engine (`JointDecoder.answers`)."""
        answers = []
        for name, own in engines.items():
            with Replay(own) as replay:
                for number in range(len(self._thresholds(name))):
                    found = replay.answer(problem.prompt, self._at(self._sample(problem, sample), name, number))
                    written = len(found.token_ids) - found.stats.accepted_tokens
                    answers.append(JointAnswer(found.token_ids, written))
        return answers

    def _record(
        self,
        engine: ParseEngine,
        task: Task,
        problem: Problem,
        samples: Sequence[Sequence[JointAnswer]],
        alone: Sequence[JointAnswer | None],
    ) -> Texts:
        checked: dict[str, bool] = {}
        answers: list[list[tuple[int, bool]]] = []
        places: dict[str, list[list[int]]] = {name: [] for name in self.judges}
        rejected: dict[str, list[list[int]]] = {name: [] for name in self.judges}
        own: list[int] = []
        for sample, target in zip(samples, alone, strict=True):
            known: dict[tuple[int, ...], int] = {}
            numbers = iter([known.setdefault(tuple(each.ids), len(known)) for each in sample])
            if target is not None:
                own.append(known.setdefault(tuple(target.ids), len(known)))
            counts = iter([each.rejected for each in sample])
            distinct = []
            for ids in known:
                answer = decoded_text(engine.target, ids)
                if answer.finish_reason != "length" and answer.text not in checked:
                    checked[answer.text] = bool(task.check(problem, answer.text))
                distinct.append((len(ids), answer.finish_reason != "length" and checked[answer.text]))
            answers.append(distinct)
            for name in self.judges:
                places[name].append([next(numbers) for _ in self._thresholds(name)])
                rejected[name].append([next(counts) for _ in self._thresholds(name)])
        return Texts(problem.id, answers, places, rejected, own)

    def _engines(self, engine: ParseEngine, judges: Mapping[str, Judge]) -> dict[str, ParseEngine]:
        target, draft = engine.target, engine.draft
        return {
            name: ParseEngine.from_models(
                target, draft, judge, target_drafter=load_token_drafter("draft", target, draft)
            )
            for name, judge in judges.items()
        }

    def _times(
        self, engine: ParseEngine, judges: Mapping[str, Judge], texts: Mapping[str, Texts], pending: Sequence[Problem]
    ) -> Iterator[Times]:
        engines = self._engines(engine, judges)

        def timed(own: ParseEngine, problem: Problem, settings: GenerationSettings | None) -> tuple[float, float]:
            own.clear_caches()
            plain = self._sample(problem, 0)
            answer = (
                own.generate_target(problem.prompt, plain)
                if settings is None
                else own.generate(problem.prompt, settings)
            )
            taken = single(answer)
            return round(taken.timings.total_s, 4), round(
                len(taken.token_ids) / max(1, taken.stats.target_forwards), 4
            )

        def measure(problem: Problem) -> Times:
            plain, known = self._sample(problem, 0), texts[problem.id]
            first = next(iter(engines.values()))
            # Without a seed the chains of lossless sampling end where they stop paying.
            nothing = replace(plain.resume_sampling, seed=None)
            alone, _ = timed(first, problem, None)
            lossless = timed(
                first, problem, self._at(plain, next(iter(self.judges)), 0).override(resume_sampling=nothing)
            )
            rules: dict[str, list[tuple[float, float]]] = {}
            for name, own in engines.items():
                rules[name], took = [lossless], dict[tuple[int, int], tuple[float, float]]()
                loops = zip(known.places[name][0], known.rejected[name][0], strict=True)
                for number, loop in enumerate(list(loops)[1:], 1):
                    if loop not in took:
                        took[loop] = timed(own, problem, self._at(plain, name, number))
                    rules[name].append(took[loop])
            return Times(problem.id, alone, lossless, rules)

        measure(pending[0])  # warm-up, in which the lengths of blocks are learnt
        for problem in pending:
            yield measure(problem)

    def _at(self, plain: GenerationSettings, name: str, number: int) -> GenerationSettings:
        return plain.override(**asdict(self.settings[name].orders[0][number]))

    def _outcome(self, name: str, texts: Texts, times: Times | None) -> Outcome:
        """One problem as the calibration of one rule counts it; the first point is the target alone."""
        rights = [
            [float(answers[place][1]) for place in places]
            for answers, places in zip(texts.answers, texts.places[name], strict=True)
        ]
        own = [right[0] for right in rights]
        if texts.alone:
            own = [float(answers[place][1]) for answers, place in zip(texts.answers, texts.alone, strict=True)]
        lost = [
            [target - each if self.one.loss == "accuracy" else target * (1 - each) for each in right]
            for target, right in zip(own, rights, strict=True)
        ]
        losses = [sum(each) / len(each) for each in zip(*lost, strict=True)]
        share = sum(own) / len(own)
        unlike = [[True] * len(losses)]  # as nobody compared the texts
        if times is None:
            return Outcome(texts.problem_id, share, None, [losses], unlike, [])
        seconds, paces = ([list(each)] for each in zip(*times.rules[name], strict=True))
        return Outcome(texts.problem_id, share, times.target, [losses], unlike, seconds, paces)
