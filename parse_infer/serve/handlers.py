"""Takes an accepted body to its response."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

from starlette.types import Send

from parse_infer.calibration.schema import promised
from parse_infer.models.sampling import Sampling
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.cancellable_response import Exchange
from parse_infer.serve.errors import ApiError, unknown_field
from parse_infer.serve.event_stream import answers
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.passthrough import relayed
from parse_infer.serve.protocol.chat import ChatBody
from parse_infer.serve.protocol.completion import CompletionBody
from parse_infer.serve.protocol.fields import MOST_UNKNOWN, Body
from parse_infer.serve.protocol.requested import RequestedAnswers
from parse_infer.serve.response import AnswerWriter, Shape, event_line, write_events, write_whole
from parse_infer.serve.risk_monitor import Audit
from parse_infer.serve.runner import Runner
from parse_infer.settings import GenerationSettings


class Desk:
    """Where requests are turned into jobs, and events into what the client reads.

    Args:
        model: the name under which the backend's target is served.
        risk: promise of the requests that name none, where the calibration covers them.
        adaptive: of the requests that do not say, see `GenerationSettings`.
        strict: refuse fields that this server does not know, instead of warning.
        sampling: of the requests that do not say.
        note: told what the log is told of every request.
    """

    def __init__(
        self,
        backend: Runner,
        line: AdmissionQueue,
        metrics: Metrics,
        model: str,
        risk: float | None = None,
        adaptive: bool = False,
        strict: bool = False,
        sampling: Sampling | None = None,
        audit: Audit | None = None,
        note: Callable[[Mapping[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.backend = backend
        self.line = line
        self.metrics = metrics
        self.model = model
        self._risk = risk
        self._adaptive = adaptive
        self._strict = strict
        self._sampling = sampling or Sampling()
        self._audit = audit
        self._note = note

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"the model {str(name)[:100]!r} is not served here, but {self.model!r} is"
            raise ApiError(404, message, "model_not_found", "model")

    def warnings(self, body: Body) -> list[str]:
        """What the response says of fields that are ignored. Raises ApiError for them where the server is strict."""
        unknown = [name[:60] for name in islice(body.unknown(), MOST_UNKNOWN)]
        if unknown and self._strict:
            raise unknown_field(ascii(unknown[0])[1:-1])
        return [f"ignored, as this server does not know them: {', '.join(unknown)}"] if unknown else []

    def answer(self, shape: Shape, body: ChatBody | CompletionBody) -> Exchange:
        """Raises ApiError for what cannot be answered, as far as that is known before the request is admitted."""
        self.check_model(body.model)
        warnings = self.warnings(body)
        settings, unpromised = self._settings(body)
        if unpromised is not None:
            warnings.append(f"nothing is promised for this answer: {unpromised}")
        requested = RequestedAnswers(body.prompts, settings, body.draft_text, body.alone, watched=bool(body.stream))
        writer = AnswerWriter(shape, body, self.model, warnings, unpromised, self._note)
        events = answers(self.backend, self.line, self.metrics, requested, self._audit)
        return Exchange(lambda send: writer.stream(events, send) if body.stream else writer.whole(events, send))

    def relay(self, body: ChatBody) -> Exchange:
        """The target's own server answers, without a draft."""
        self.check_model(body.model)
        warnings = self.warnings(body)
        fields = body.relayed(self._sampling)
        pieces = relayed(self.backend, self.line, self.metrics, body, fields, self.model, self._note)

        async def whole(send: Send) -> None:
            async with aclosing(pieces):
                (answer,) = [piece async for piece in pieces]
            await write_whole(send, json.dumps(answer, ensure_ascii=False).encode(), warnings)

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield event_line(piece)

        return Exchange(lambda send: write_events(send, chunks(), warnings) if body.stream else whole(send))

    def _settings(self, body: ChatBody | CompletionBody) -> tuple[Sequence[GenerationSettings], str | None]:
        """Of the `n` answers to a prompt; and why the server's promise does not cover them, where it does not."""
        settings = [body.settings(body.max_new_tokens, choice, self._sampling) for choice in range(body.choices)]
        if body.alone:
            return settings, None
        if body.draft_text is not None:
            reason = "a promise covers only what the draft model writes"
            return settings, None if self._risk is None else reason
        if not body.says_adaptive:
            settings = [each.override(adaptive=self._adaptive) for each in settings]
        found = [promised(each, self._risk, self.backend.calibration) for each in settings]
        return [each for each, _ in found], found[0][1]
