"""What `ParseEngine` needs of a backend: two models that run somewhere, and one way to write an answer with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from parse_infer.calibration.schema import Calibration
from parse_infer.events import Event
from parse_infer.loop import PairWrapper, Verdict
from parse_infer.models.tokenizer_spec import TokenizerSpec
from parse_infer.request import Request
from parse_infer.settings import GenerationSettings

T = TypeVar("T")


class Backend(Protocol):
    """Runs the models of a `ParseEngine`.

    Attributes:
        target, draft: tokenizers, chat templates and context windows of the models; `draft` is None without one.
        threshold: the judge's calibrated threshold; None: it has none.
        calibration: made for this adapter and this backend, if known.
        train_problems: hashes of the prompts that the judge was trained on, as far as they are known.
        deterministic: a greedy text does not depend on how it is computed (float32 in this process).
        parallel: answers that it writes at the same time.
        adaptive: the default of `GenerationSettings.adaptive`.
        probe_tokens: tokens that the target's window must hold after a draft, for the judge's question.
    """

    threshold: float | None
    calibration: Calibration | None
    parallel: int
    adaptive: bool

    @property
    def target(self) -> TokenizerSpec: ...

    @property
    def draft(self) -> TokenizerSpec | None: ...

    @property
    def train_problems(self) -> frozenset[str]: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def probe_tokens(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """The models that answer, as a calibration records them."""
        ...

    def describe_drafters(self) -> dict[str, Any]:
        """The token proposers of both models."""
        ...

    def describe_machine(self) -> dict[str, Any]: ...

    def check(self, settings: GenerationSettings, calibration: Calibration | None) -> None:
        """Raise ValueError for settings that this backend cannot serve, with the calibration in use."""
        ...

    def draft_source(self, request: Request, draft_text: Any) -> Any:
        """The source of a request's drafts: `draft_text`, or the draft model where that is None.

        Raises ValueError without either.
        """
        ...

    def uses_draft(self, request: Request, source: Any) -> bool:
        """Whether the draft model writes a draft for this request; otherwise `adaptive` has nothing to decide."""
        ...

    def with_draft(
        self, request: Request, source: Any, wrap: PairWrapper, watched: bool
    ) -> AsyncGenerator[Event, None]:
        """Events of an answer from drafts, all but `Done`."""
        ...

    def alone(self, request: Request, speculate: bool, watched: bool) -> AsyncGenerator[Event, None]:
        """Events of an answer that the target writes without a draft, all but `Done`.

        Args:
            speculate: let the token proposer guess (lossless speculation).
        """
        ...

    def require_judge(self) -> Any:
        """The judge. Raises ValueError without one."""
        ...

    def draft_alone(self, request: Request, speculate: bool) -> AsyncGenerator[Event, None]:
        """Events of an answer that the draft model writes alone. Raises ValueError where a server runs it."""
        ...

    async def judge_text(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int] | None) -> Verdict:
        """Validity of `draft` after `context` at the cuts; None: where drafts are cut."""
        ...

    def clear_caches(self) -> None: ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, from synchronous code."""
        ...

    def turn(self) -> AbstractContextManager[Any]:
        """Hold the models for one answer where only one answer can be written at a time."""
        ...

    def close(self) -> None: ...
