"""Interface between the API server and an engine with either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parse_infer.calibration.schema import Calibration
from parse_infer.errors import ParseError
from parse_infer.events import Event
from parse_infer.models.prompts import Prompt, RenderedPrompt
from parse_infer.sampling import Sampling
from parse_infer.settings import GenerationSettings


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids of the target that the answer continues unchanged."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Job:
    """One requested answer.

    Attributes:
        alone: the target answers without a draft.
        watched: the client streams; else all events may come at the end.
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


class InvalidRequest(ParseError):
    """The backend cannot answer the request; the message says why."""


class Runner(Protocol):
    """Answers jobs with one engine. Call its methods only from the event loop's thread."""

    name: str
    """Name of the target."""
    parallel: int
    """Number of concurrent answers."""
    window: int
    """Context window in tokens, for prompt and answer."""
    threshold: float
    """Default threshold."""
    default_sampling: Sampling
    """Sampling of the target's generation config."""

    calibration: Calibration | None
    """Source of the settings for a `risk`."""

    def check_calibration(self) -> None:
        """Raise ValueError if the calibration was made with other models."""
        ...

    @property
    def running(self) -> int:
        """Number of answers in progress."""
        ...

    @property
    def gauges(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
        """Extra metrics of this backend: name to description and value."""
        ...

    async def encode(self, text: str, special_tokens: bool) -> list[int]: ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        ...

    async def token_texts(self, ids: Sequence[int]) -> list[str]: ...

    async def render(self, prompt: Prompt | TokenPrompt, drafted: bool = False) -> tuple[RenderedPrompt, list[int]]:
        """Render a prompt; return it with the target's token ids. `drafted`: also tokenize for the draft model.

        Raises InvalidRequest if the prompt is empty, too long, outside the vocabulary or invalid for the template.
        """
        ...

    def tokenizer_info(self) -> dict[str, Any]: ...

    def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        """Yield the events of the job's answer, `Done` last. Closing the generator cancels the job at once.

        Raises InvalidRequest before the first event, and other errors at any time.
        """
        ...

    def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Pass a chat request through to the target's server; yield its completion or chunks.

        Raises InvalidRequest before the first item.
        """
        ...

    def close(self) -> None:
        """Stop the runner after its last job."""
        ...
