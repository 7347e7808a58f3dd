"""Handlers that turn a valid request body into its response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from pydantic import BaseModel
from starlette.types import Send

from parse_infer.calibration.promises import promised
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.audit import Audit
from parse_infer.serve.errors import ApiError, unknown_field, value_errors_as_400
from parse_infer.serve.event_stream import RequestedAnswers, answers
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.passthrough import RelayedRequest, Unknown, pass_through
from parse_infer.serve.protocol.chat import ChatBody
from parse_infer.serve.protocol.completion import CompletionBody
from parse_infer.serve.protocol.fields import MOST_UNKNOWN, Body
from parse_infer.serve.protocol.tokens import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from parse_infer.serve.response import AnswerWriter, CancellableResponse, Shape, write_whole
from parse_infer.serve.runner import Runner, size_of
from parse_infer.serve.settings import ApiSettings
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import changed_option

LONGEST_TOKENIZED = 1 << 18  # characters; a second of work


class RequestHandler:
    """Turns requests into jobs and events into responses.

    Args:
        note: called with the fields of every log record about an answer.
    """

    def __init__(
        self,
        runner: Runner,
        queue: AdmissionQueue,
        metrics: Metrics,
        settings: ApiSettings,
        audit: Audit | None = None,
        note: Callable[[Mapping[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.runner = runner
        self.queue = queue
        self.metrics = metrics
        self.model = settings.model or runner.name
        self._server = settings
        self._sampling = runner.default_sampling if settings.generation_config else Sampling()
        self._audit = audit
        self._note = note

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"this server does not serve the model {str(name)[:100]!r}; it serves {self.model!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def warnings(self, body: Body) -> list[str]:
        """Warnings about ignored fields. Raises ApiError for them if the server is strict."""
        switches = getattr(body, "chat_template_kwargs", None) or {}
        unread = (f"chat_template_kwargs.{name}" for name in switches if not self.runner.reads_option(name))
        unknown = [name[:60] for name in islice(chain(body.unknown(), unread), MOST_UNKNOWN)]
        if unknown and self._server.strict:
            raise unknown_field(ascii(unknown[0])[1:-1], type(body).model_fields)
        return [f"unknown fields ignored: {', '.join(unknown)}"] if unknown else []

    def answer(self, shape: Shape, body: ChatBody | CompletionBody) -> CancellableResponse:
        """The response to a completion request.

        Raises ApiError for requests that are invalid before admission, and Unknown for one that the target's server is
        to answer.
        """
        self.check_model(body.model)
        unknown = next(body.unknown(), None)
        if unknown is not None and self.runner.relays and not self._server.strict:
            raise Unknown(unknown)
        warnings = self.warnings(body)
        settings, unpromised = self._settings(body)
        if unpromised is not None:
            warnings.append(f"no risk promise covers this answer: {unpromised}")
        requested = RequestedAnswers(body.prompts, settings, body.draft_text, body.alone, streamed=bool(body.stream))
        writer = AnswerWriter(shape, body, self.model, warnings, unpromised, self._note)
        events = answers(self.runner, self.queue, self.metrics, requested, self._audit)
        return CancellableResponse(
            lambda send: writer.stream(events, send) if body.stream else writer.whole(events, send)
        )

    def tokenize(self, body: TokenizeBody) -> CancellableResponse:
        """The response to `/tokenize`, which has a seat in the queue and ends with its client."""
        size = len(body.prompt or "") if body.chat is None else size_of(body.chat)
        if size > LONGEST_TOKENIZED:
            raise ApiError(400, f"the text has {size} characters; /tokenize takes at most {LONGEST_TOKENIZED}")

        async def answer() -> TokenizeAnswer:
            if body.chat is not None:
                _, ids = await self.runner.render(body.chat)
            else:
                ids = await self.runner.encode(body.prompt or "", body.add_special_tokens is not False)
            texts = await self.runner.token_texts(ids) if body.return_token_strs else None
            return TokenizeAnswer(count=len(ids), max_model_len=self.runner.window, tokens=ids, token_strs=texts)

        return self._seated(body, answer)

    def detokenize(self, body: DetokenizeBody) -> CancellableResponse:
        """The response to `/detokenize`, as for `tokenize`."""

        async def answer() -> DetokenizeAnswer:
            return DetokenizeAnswer(prompt=await self.runner.decode(body.tokens))

        return self._seated(body, answer, "tokens")

    def _seated(
        self,
        body: TokenizeBody | DetokenizeBody,
        answer: Callable[[], Awaitable[BaseModel]],
        field: str | None = None,
    ) -> CancellableResponse:
        self.check_model(body.model)
        warnings = self.warnings(body)

        async def work(send: Send) -> None:
            async with self.queue.place(1):
                with value_errors_as_400(field):
                    written = await answer()
            await write_whole(send, written.model_dump_json().encode(), warnings)

        return CancellableResponse(work)

    def relay(self, request: RelayedRequest) -> CancellableResponse:
        """Pass a request through to the target's server, without a draft."""
        if not isinstance(model := request.model, str | None):
            raise ApiError(400, "model: give a text", "invalid_value", "model")
        self.check_model(model)
        return CancellableResponse(
            lambda send: pass_through(self.runner, self.queue, self.metrics, request, self._note, send)
        )

    def _settings(self, body: ChatBody | CompletionBody) -> tuple[Sequence[GenerationSettings], str | None]:
        """Settings of a prompt's `n` answers, and why the server's promise does not cover them (None: it does)."""
        risk = self._server.risk_settings.risk
        sampling = self._promised_sampling(body) if body.says("risk") else self._sampling
        settings = [body.settings(body.max_new_tokens, choice, sampling) for choice in range(body.choices)]
        if body.alone:
            return settings, None
        defaults = {"adaptive": self._server.adaptive}
        defaults |= {} if body.says("risk") else self._server.strict_defaults
        if body.draft_text is not None:
            defaults = {"strict_answer": self._server.strict_answer}
        unsaid = {name: value for name, value in defaults.items() if not body.says(name)}
        settings = [each.override(**unsaid) for each in settings]
        if body.draft_text is not None:
            reason = "a promise covers only what the draft model writes"
            return settings, None if risk is None else reason
        changed = changed_option(body.prompts[0], self.runner.template_options)
        covered = [promised(each, risk, self.runner.calibrations, changed) for each in settings]
        return [each for each, _ in covered], covered[0][1]

    def _promised_sampling(self, body: ChatBody | CompletionBody) -> Sampling:
        """Sampling of a promise that completes the body's own: the server's default if that is promised, else the
        first. The server's default where no promise has what the body says."""
        promises = [each.sampling for each in self.runner.calibrations]
        promises.sort(key=self._sampling.draws_like, reverse=True)
        return next((each for each in promises if body.sampling(each).draws_like(each)), self._sampling)
