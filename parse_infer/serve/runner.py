"""Interface between the API server and an engine with either backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from parse_infer.backends.pool.passed_request import PassedRequest
from parse_infer.backends.pool.response_head import ResponseHead
from parse_infer.calibration.schema import Calibration
from parse_infer.errors import ParseError, PromptError
from parse_infer.models.loading import same_tokenizer
from parse_infer.request.events import Event
from parse_infer.serve.tokenizer_thread import TokenizerThread
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.chat_template import reads_option
from parse_infer.text.prompts import Chat, Prompt, RenderedPrompt, Verbatim
from parse_infer.text.thinking import Thinking
from parse_infer.text.tokenizer_spec import TokenizerSpec, reads_alike

if TYPE_CHECKING:
    from parse_infer.backends.pool.replicas import ReplicaPool  # needs an optional extra

Result = TypeVar("Result")
LONG_TEXT = 1 << 16  # characters


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids of the target that the answer continues unchanged."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Job:
    """One requested answer.

    Attributes:
        alone: the target answers without a draft.
        streamed: the client streams; else all events may come at the end.
        audit: not a client's: `Runner.running` leaves it out.
        thinking: where the target thinks, in an answer to a chat; None: it does not.
    """

    prompt: Prompt
    settings: GenerationSettings
    draft_text: str | None = None
    alone: bool = False
    streamed: bool = True
    audit: bool = False
    thinking: Thinking | None = None


@dataclass(frozen=True)
class Moment:
    """An event, and when it happened (`time.perf_counter`)."""

    event: Event
    at: float


class InvalidRequest(ParseError):
    """The engine cannot answer the request; the message says why."""


class Runner(ABC):
    """Answers jobs with one engine. Call its methods only from the event loop's thread.

    It tokenizes long texts in another thread than short ones, which so never wait for them.

    Args:
        target: the target, for its tokens and limits.
        draft: tokenizer and chat template of the draft model.

    Attributes:
        name: name of the target.
        window: context window in tokens, for prompt and answer.
        template_options: chat template options of all prompts.
        default_sampling: sampling of the target's generation config.
        parallel: number of concurrent answers.
        threshold: default threshold.
        calibrations: sources of the settings for a `risk`, one for each sampling.
        thinks: the target thinks before it answers.
        relays: the target has a server, which answers requests that a draft cannot speed up.
    """

    relays = False
    parallel: int
    threshold: float
    calibrations: tuple[Calibration, ...]

    def __init__(self, target: TokenizerSpec, draft: TokenizerSpec | None = None) -> None:
        self.name = target.name
        self.window = target.window
        self.template_options = target.template_options
        self.default_sampling = target.default_sampling
        self.thinks = target.thinking_marks is not None
        self._target = target
        self._draft = draft
        self._shares_tokens = draft is not None and same_tokenizer(draft.tokenizer, target.tokenizer)
        self._short, self._long = (TokenizerThread(target, draft) for _ in range(2))
        longest_token = max(map(len, target.tokenizer.get_vocab()))
        self._longest_prompt = self.window * longest_token  # characters

    def reads_option(self, name: str) -> bool:
        """Whether the chat template of a model reads the option."""
        models = (self._target, self._draft) if self._draft is not None else (self._target,)
        return any(reads_option(model.tokenizer, name) for model in models)

    @abstractmethod
    def check_calibrations(self) -> None:
        """Raise ValueError if a calibration was made with other models."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of answers in progress."""

    @property
    def gauges(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
        """Extra metrics of this runner: name to description and value."""
        return {}

    @property
    def pools(self) -> Mapping[str, ReplicaPool]:
        """The replicas of each model that runs on servers, by role."""
        return {}

    @abstractmethod
    def stream(self, job: Job) -> AsyncGenerator[Moment, None]:
        """Yield the events of the job's answer, `Done` last. Closing the generator cancels the job at once.

        Raises InvalidRequest before the first event, and other errors at any time.
        """

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        return await self.ask(lambda own: own.tokenizer.encode(text, add_special_tokens=special_tokens), len(text))

    async def decode(self, ids: Sequence[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""

        def decoded(own: TokenizerSpec) -> str:
            own.check_tokens(ids)
            return str(own.tokenizer.decode(list(ids)))

        return await self.ask(decoded, len(ids))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        return await self.ask(lambda own: [str(own.tokenizer.convert_ids_to_tokens(i)) for i in ids], len(ids))

    async def render(self, prompt: Prompt | TokenPrompt, drafted: bool = False) -> tuple[RenderedPrompt, list[int]]:
        """Render a prompt; return it with the target's token ids. `drafted`: also tokenize for the draft model.

        Raises InvalidRequest if the prompt is empty, too long, outside the vocabulary or invalid for the template.
        """
        size = size_of(prompt)
        self.check_length("prompt", size, "tokens" if isinstance(prompt, TokenPrompt) else "characters")
        return await self._call(lambda thread: self._rendered(thread, prompt, drafted), size)

    async def thinking(self, prompt: RenderedPrompt, ids: Sequence[int]) -> Thinking | None:
        """The thinking of the answer to a rendered prompt; None if the target does not think."""
        return await self.ask(lambda own: own.thinking(prompt, ids), 1) if self.thinks else None

    def check_length(self, name: str, size: int, unit: str = "characters") -> None:
        """Raise InvalidRequest for a text that cannot fit the context window, before the work of tokenizing it."""
        if size > (self.window if unit == "tokens" else self._longest_prompt):
            raise InvalidRequest(
                f"the {name} has {size} {unit}, which cannot fit the context window of {self.window} tokens"
            )

    def tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self._target.tokenizer
        special = {
            name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "max_model_len": self.window,
            "chat_template": tokenizer.chat_template,
            **{name: None if token is None else str(token) for name, token in special.items()},
        }

    def relay(self, request: PassedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Pass a request on to the target's server, if the runner `relays`.

        See `ServerBackend.relay`. Raises ApiError, also in the middle of a response.
        """
        raise NotImplementedError("this runner has no server")

    def unavailable(self) -> str | None:
        """Why the runner can answer nothing now; None: it can."""
        return None

    def close(self) -> None:
        """Stop the runner after its last job."""
        self._short.close()
        self._long.close()

    async def ask(self, question: Callable[[TokenizerSpec], Result], size: int) -> Result:
        """Call `question` with a copy of the target's tokenizer in a thread. A ValueError becomes InvalidRequest.

        Args:
            size: characters or tokens that the question is about.
        """
        return await self._call(lambda thread: question(thread.target), size)

    async def _call(self, question: Callable[[TokenizerThread], Result], size: int) -> Result:
        try:
            return await (self._short if size <= LONG_TEXT else self._long).call(question)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def _rendered(
        self, thread: TokenizerThread, prompt: Prompt | TokenPrompt, drafted: bool
    ) -> tuple[RenderedPrompt, list[int]]:
        own = thread.target
        if isinstance(prompt, TokenPrompt):
            own.check_tokens(prompt.ids)
            prompt = Verbatim.of_tokens(prompt.ids, own.tokenizer)
        rendered = RenderedPrompt.of(prompt)
        ids = own.render(rendered.prompt)
        rendered.remember(self._target, ids)
        draft = thread.draft if drafted else None
        if draft is None or (self._shares_tokens and reads_alike(draft, own, rendered)):
            return rendered, ids  # the draft model takes the same tokens
        theirs = rendered if self._shares_tokens else rendered.as_text
        with suppress(PromptError):  # the backend's to handle: the target may answer alone
            theirs.remember(self._draft, draft.encode(theirs.prompt))
        return rendered, ids


_TEXTS = ("content", "reasoning", "reasoning_content")  # of a message


def size_of(prompt: Prompt | TokenPrompt) -> int:
    """Return the number of a prompt's characters, without its template, or of its tokens."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.ids)
    if isinstance(prompt, Chat):
        return sum(len(str(message.get(part, ""))) for message in prompt.messages for part in _TEXTS)
    return len(prompt.text) if isinstance(prompt, Verbatim) else len(str(prompt))
