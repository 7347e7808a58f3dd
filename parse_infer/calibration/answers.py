"""The texts whose losses a calibration counts: the target's alone, and those of every operating point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from parse_infer.calibration.joint_decoder import JointAnswer, JointDecoder, JointRow
from parse_infer.calibration.replay import Replay
from parse_infer.calibration.schema import LOCAL
from parse_infer.errors import CalibrationError, ModelError
from parse_infer.models.loading import LanguageModel
from parse_infer.request.answer import Answer
from parse_infer.request.output import FinishReason, Generation
from parse_infer.settings.acceptance import ACCEPT_NOTHING

if TYPE_CHECKING:
    from parse_infer.calibration.held_out import HasPrompt
    from parse_infer.calibration.settings import CalibrationSettings
    from parse_infer.engine import ParseEngine


class Text(Protocol):
    """An answer's text and why it ended."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True)
class Answers:
    """The answers to one problem.

    Attributes:
        alone: the target's, one for each sample.
        judged: for each sequence of operating points, and each of its points, one for each sample.
    """

    alone: Sequence[Text]
    judged: Sequence[Sequence[Sequence[Text]]]

    @property
    def target_seconds(self) -> float:
        first = self.alone[0]
        assert isinstance(first, Generation)
        return first.timings.total_s


@dataclass(frozen=True)
class DecodedText:
    """A `Text` of tokens that no loop has written."""

    text: str
    finish_reason: FinishReason


def replayed(engine: ParseEngine, problem: HasPrompt, settings: CalibrationSettings, timed: bool) -> Answers:
    """The answers by the engine's own loop. Of a timed problem the target's first is generated alone, to time it."""
    samples = [settings.generation(problem.id, i) for i in range(settings.samples)]
    slow = int(timed) if engine.deterministic else len(samples)
    if slow:
        engine.clear_caches()
    alone = [single(engine.generate_target(problem.prompt, sample)) for sample in samples[:slow]]
    with Replay(engine) as replay:
        replay.clear_caches()
        nothing = {"threshold": ACCEPT_NOTHING, "block_tokens": "whole"}
        alone += [replay.answer(problem.prompt, sample.override(**nothing)) for sample in samples[slow:]]
        judged = [
            [
                [replay.answer(problem.prompt, sample.override(**asdict(point))) for sample in samples]
                for point in order
            ]
            for order in settings.orders
        ]
    return Answers(alone, judged)


def batched(
    engine: ParseEngine, problems: Sequence[HasPrompt], settings: CalibrationSettings
) -> Iterator[tuple[HasPrompt, Answers]]:
    """The answers to problems, many at a time. Raises ValueError if this engine has no `JointDecoder`."""
    decoder = joint_decoder(engine, [engine.backend.judge], settings)
    points = tuple((0, point.threshold) for point in settings.orders[0])
    rows = [
        JointRow(problem.prompt, points, settings.max_new_tokens, sample.resume_sampling)
        for problem in problems
        for sample in (settings.generation(problem.id, i) for i in range(settings.samples))
    ]
    found, apart = decoder.answers(rows), targets_alone(engine, decoder, rows)
    for problem in problems:
        samples, alone = list(islice(found, settings.samples)), list(islice(apart, settings.samples))
        if None in samples:
            yield problem, replayed(engine, problem, settings, timed=False)
            continue
        texts = [[decoded_text(engine.target, answer.ids) for answer in sample or ()] for sample in samples]
        order = [list(each) for each in zip(*texts, strict=True)]  # the first point accepts nothing
        own = [decoded_text(engine.target, answer.ids) for answer in alone if answer is not None]
        yield problem, Answers(own or order[0], [order] * len(settings.orders))


def targets_alone(
    engine: ParseEngine, decoder: JointDecoder, rows: Sequence[JointRow]
) -> Iterator[JointAnswer | None]:
    """Decode the target's own answer to each row, in batches of their own.

    In float32 yield None: there an answer does not depend on its batch, so a point that accepts nothing has the same.
    In other dtypes rounding does, and a common batch would hide the answers that rounding loses.
    """
    if engine.deterministic:
        return iter([None] * len(rows))
    apart = [replace(row, points=((0, ACCEPT_NOTHING),)) for row in rows]
    return (each[0] if each else None for each in decoder.answers(apart))


def joint_decoder(engine: ParseEngine, judges: Sequence[object], settings: CalibrationSettings) -> JointDecoder:
    """The decoder of many answers by these judges. Raises ValueError if texts depend on more than tokens and
    thresholds."""
    try:
        if engine.describe().get("backend", LOCAL) != LOCAL:
            raise ModelError("the models are on servers")
        if "whole" in settings.blocks or settings.acceptance != "first_failure":
            raise ModelError("a draft is judged whole, and not by token: give --block-tokens auto, or a number")
        decoder = JointDecoder(engine.target, engine.draft, judges, settings.batch_size)
        if any(isinstance(length, int) and length < decoder.first_tokens for length in settings.blocks):
            raise ModelError(
                f"the judge compares the first {decoder.first_tokens} draft tokens with its training: give "
                "--block-tokens auto"
            )
        return decoder
    except ModelError as error:
        raise CalibrationError(
            f"batch_size is {settings.batch_size}, but {error}; a batch_size of 1 always works"
        ) from None


def single(found: Generation | list[Generation]) -> Generation:
    assert isinstance(found, Generation)
    return found


def decoded_text(model: LanguageModel, ids: Sequence[int]) -> DecodedText:
    """The answer whose tokens, up to an end token or the budget, are `ids`."""
    answer = Answer(model.tokenizer, model.eos_ids, (), len(ids))
    answer.add(ids, "target")
    return DecodedText(answer.whole_characters, "eos" if ids[-1] in model.eos_ids else "length")
