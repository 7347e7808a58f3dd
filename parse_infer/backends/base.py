"""`Backend`: the interface through which `ParseEngine` runs its models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from parse_infer.calibration.schema import Calibration
from parse_infer.decoding.loop import PairWrapper
from parse_infer.decoding.plan import Plan
from parse_infer.drafters.text import TextDrafter
from parse_infer.errors import PromptError
from parse_infer.judge.judge import Verdict
from parse_infer.request.events import Event
from parse_infer.request.request import Request
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.text.cuts import Segmenter
from parse_infer.text.tokenizer_spec import TokenizerSpec

T = TypeVar("T")
Source = TypeVar("Source")  # of drafts: a type of the backend


class Backend(Protocol[Source]):
    """Runs the models of a `ParseEngine`.

    Attributes:
        target, draft: tokenizers, chat templates and context windows; `draft` is None without a draft model,
            or if its server gets text.
        judge: scores the drafts; None: lossless speculation only.
        segmenter: finds the cuts of drafts.
        threshold: the judge's calibrated threshold, or None.
        calibrations: measured with this adapter and this backend, one for each sampling.
        train_problems: hashes of the training prompts of judge and models; empty if unknown.
        deterministic: greedy output is the same for every way to compute it (float32 in this process).
        parallel: maximum number of concurrent answers.
        adaptive, strict_tokens: defaults for these `GenerationSettings`.
        falls_back: if the drafts or the judge fail, the target answers alone (`Generation.fallback`). False, for
            measurements: the request fails.
        tokens_after_draft: tokens that a judge needs in the target's window after a draft.
    """

    threshold: float | None
    calibrations: tuple[Calibration, ...]
    parallel: int
    adaptive: bool
    falls_back: bool

    @property
    def strict_tokens(self) -> int: ...

    @property
    def judge(self) -> object: ...

    @property
    def segmenter(self) -> Segmenter: ...

    @property
    def target(self) -> TokenizerSpec: ...

    @property
    def draft(self) -> TokenizerSpec | None: ...

    @property
    def train_problems(self) -> frozenset[str]: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def tokens_after_draft(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """The backend's models, as a calibration file records them."""
        ...

    def describe_drafters(self) -> dict[str, Any]:
        """The token drafters of both models."""
        ...

    def describe_machine(self) -> dict[str, Any]: ...

    def load(self, running: int) -> int:
        """Requests on one copy of the target while `running` answers are in flight, other clients' included."""
        ...

    def check(self, settings: GenerationSettings, calibrations: Sequence[Calibration]) -> None:
        """Raise ValueError for settings that this backend cannot serve with the given calibrations."""
        ...

    def replayable(self, length: BlockTokens) -> BlockTokens:
        """The length of blocks to calibrate and serve in the place of `length`: a number for "auto" if drafts pass as
        text or the judge looks ahead, because the answer then depends on where blocks end, and "auto" ends them by
        measured times."""
        ...

    def lossless(self, settings: GenerationSettings) -> GenerationSettings:
        """The settings of lossless speculation, for a request to an engine without a judge."""
        ...

    def draft_source(self, request: Request, draft_text: str | TextDrafter | None) -> Source | PromptError:
        """Return the source of a request's drafts: `draft_text`, or the draft model if that is None. The
        `PromptError` is returned if the draft model refuses the prompt.

        Raises ValueError without either.
        """
        ...

    def plan(self, request: Request, source: Source, *, streamed: bool, replayed: bool) -> Plan:
        """Decide how to answer the request from this source of drafts."""
        ...

    def with_draft(
        self, request: Request, plan: Plan, source: Source, wrap: PairWrapper | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer from drafts, except `Done`."""
        ...

    def alone(self, request: Request, speculate: bool, streamed: bool) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer that the target writes without a draft, except `Done`.

        Args:
            speculate: use the target's token drafter (lossless speculation).
        """
        ...

    def draft_alone(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer that the draft model writes alone. Raise ValueError if a server runs it."""
        ...

    async def judge_text(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int] | None) -> Verdict:
        """Score `draft` after `context` at the cuts; None takes the cut policy for drafts."""
        ...

    def clear_caches(self) -> None: ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, from synchronous code."""
        ...

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that closes a stream, without waiting for other threads: the garbage collector may close one
        at any point."""
        ...

    def turn(self) -> AbstractContextManager[Any]:
        """Lock the models for one answer, on a backend without concurrency."""
        ...

    def close(self) -> None: ...
