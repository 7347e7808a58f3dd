"""What the server needs of whatever answers: the local engine, or another backend with the same few questions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parse_infer.calibration.schema import Calibration
from parse_infer.events import Event
from parse_infer.models.prompts import Prompt, RenderedPrompt
from parse_infer.models.sampling import Sampling
from parse_infer.settings import GenerationSettings


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids of the target that an answer continues as they stand."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Job:
    """One answer that somebody wants.

    Attributes:
        alone: by the target, without a draft.
        watched: somebody reads it as it is written; otherwise its events may come all at once at the end.
    """

    prompt: Prompt
    settings: GenerationSettings
    draft_text: str | None = None
    alone: bool = False
    watched: bool = True


@dataclass(frozen=True)
class Moment:
    """An event, and when it happened (`time.perf_counter`)."""

    event: Event
    at: float


class InvalidRequest(ValueError):
    """The backend cannot answer this; the sentence says why."""


class Runner(Protocol):
    """Asked from the event loop's thread only."""

    name: str
    """The target's."""
    parallel: int
    """Answers that it writes at the same time."""
    window: int
    """Tokens that prompt and answer may have together."""
    threshold: float
    """The one that is used where none is given."""
    default_sampling: Sampling
    """What the target's generation config asks for."""

    calibration: Calibration | None
    """What `risk` goes by."""

    def check_calibration(self) -> None:
        """Raises ValueError where it was made with other models."""
        ...

    @property
    def running(self) -> int:
        """Answers that are being written now."""
        ...

    @property
    def gauges(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
        """More metrics of this backend, by name: what they tell, and their value."""
        ...

    async def encode(self, text: str, special_tokens: bool) -> list[int]: ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        ...

    async def token_texts(self, ids: Sequence[int]) -> list[str]: ...

    async def render(self, prompt: Prompt | TokenPrompt, drafted: bool = False) -> tuple[RenderedPrompt, list[int]]:
        """The prompt, which knows its tokens now, and those of the target; `drafted`: for the draft model too.

        Raises InvalidRequest where it is empty, too long, outside the vocabulary or refused by the chat template.
        """
        ...

    def tokenizer_info(self) -> dict[str, Any]: ...

    def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        """What happens while the job's answer is written, `Done` last. Closing the generator ends the work at once.

        Raises InvalidRequest before the first event, and any other error whenever it happens.
        """
        ...

    def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """What the target's own server answers to a chat request with these fields: a completion, or its chunks.

        Raises InvalidRequest before anything is answered.
        """
        ...

    def close(self) -> None:
        """No jobs follow."""
        ...
