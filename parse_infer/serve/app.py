"""The FastAPI application and its routes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from parse_infer.calibration.promises import check_default_risk
from parse_infer.errors import SettingsError
from parse_infer.serve import errors
from parse_infer.serve.admission import AdmissionQueue
from parse_infer.serve.audit import Audit
from parse_infer.serve.errors import ApiError, ErrorBody
from parse_infer.serve.handlers import RequestHandler
from parse_infer.serve.large_bodies import ReadingRoute
from parse_infer.serve.metrics import Metrics
from parse_infer.serve.middleware import RequestMiddleware
from parse_infer.serve.page import page_file
from parse_infer.serve.passthrough import OTHER, other_request, passing_route
from parse_infer.serve.protocol.chat import ChatBody, ChatCompletion, ChatShape
from parse_infer.serve.protocol.completion import Completion, CompletionBody, CompletionShape
from parse_infer.serve.protocol.tokens import (
    DetokenizeAnswer,
    DetokenizeBody,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeBody,
)
from parse_infer.serve.runner import Runner
from parse_infer.serve.settings import ApiSettings

if TYPE_CHECKING:
    from parse_infer.serve.traces import Traces  # needs an optional extra

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid."},
    "5XX": {"model": ErrorBody, "description": "The server failed or is unavailable."},
}


def _streams(model: type) -> dict[int | str, dict[str, Any]]:
    events: dict[str, Any] = {"text/event-stream": {}}  # OpenAPI 3.1 has no schema for the events of a stream
    return {200: {"model": model, "description": "The answer, or its chunks with stream: true.", "content": events}}


def create_app(
    runner: Runner,
    settings: ApiSettings | None = None,
    traces: Traces | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """Build the OpenAI-compatible API, metrics and demo page of one runner.

    Args:
        metrics: new ones, which something else may serve too; None: those of this application alone.

    Raises:
        ValueError: no calibration proves the risk, an audit has no calibration, or the target of
            `strict_answer` does not think.

    `app.state.queue` is the admission queue, `app.state.metrics` the metrics.
    """
    settings, metrics, started = settings or ApiSettings(), metrics or Metrics(), int(time.time())
    limits, risk_settings = settings.limits, settings.risk_settings
    queue = AdmissionQueue(limits, runner.parallel)
    if settings.strict_answer and not runner.thinks:
        raise SettingsError(
            f"strict_answer is for models that think, but {runner.name!r} has no marks around its thinking: omit "
            "--strict-answer, or name them with --thinking-marks"
        )
    check_default_risk(risk_settings.expected.override(**settings.strict_defaults), runner.calibrations)
    audit = Audit(runner, metrics, risk_settings, limits.request_s) if risk_settings.audit else None
    if risk_settings.risk is not None or audit is not None:
        runner.check_calibrations()
    handler = RequestHandler(runner, queue, metrics, settings, audit, *(() if traces is None else (traces.note,)))
    app = FastAPI(
        title="PARSE",
        summary="OpenAI's API over a draft model whose answers the target verifies.",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    app.state.queue, app.state.metrics = queue, metrics
    own: dict[str, Any] = {} if traces is None else {"trace_headers": traces.headers}
    app.add_middleware(RequestMiddleware, keys=settings.keys, body_bytes=limits.body_bytes, metrics=metrics, **own)
    app.add_exception_handler(ApiError, errors.answer_api_error)
    app.add_exception_handler(HTTPException, errors.answer_http_error)
    app.add_exception_handler(RequestValidationError, errors.answer_invalid_body)
    metrics.watch("parse_answers_running", "Answers in progress.", lambda: runner.running)
    metrics.watch("parse_answers_waiting", "Queued answers.", lambda: max(0, queue.answers - runner.running))
    metrics.watch("parse_parallel", "Largest number of concurrent answers.", lambda: runner.parallel)
    metrics.watch_pools(runner.pools)
    for name, (text, value) in runner.gauges.items():
        metrics.watch(name, text, value, "livemin")
    metrics.watch("parse_retry_after_seconds", "Retry-After of a full queue.", queue.retry_after, "livemax")

    app.state.reading = asyncio.Lock()
    app.router.route_class = passing_route(handler.relay) if runner.relays else ReadingRoute

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_streams(ChatCompletion))
    async def chat(body: ChatBody) -> Response:
        return handler.answer(ChatShape(), body)

    @app.post("/v1/completions", response_model=Completion, responses=_streams(Completion))
    async def complete(body: CompletionBody) -> Response:
        return handler.answer(CompletionShape(), body)

    card = ModelCard(
        id=handler.model,
        created=started,
        root=runner.name,
        max_model_len=runner.window,
        parse={"threshold": runner.threshold, "risk": risk_settings.risk},
    )

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card])

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> ModelCard:
        handler.check_model(name)
        return card

    @app.post("/tokenize", response_model=TokenizeAnswer)
    async def tokenize(body: TokenizeBody) -> Response:
        return handler.tokenize(body)

    @app.post("/detokenize", response_model=DetokenizeAnswer)
    async def detokenize(body: DetokenizeBody) -> Response:
        return handler.detokenize(body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return runner.tokenizer_info()

    @app.get("/health")
    async def health() -> dict[str, str]:
        if queue.closing:
            raise ApiError(503, "the server is stopping", "stopping")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if queue.closing:
            raise ApiError(503, "the server is stopping", "stopping")
        if (reason := runner.unavailable()) is not None:
            raise ApiError(503, reason, "target_unavailable")
        return {"status": "ok"}

    if runner.relays:

        @app.post(OTHER, include_in_schema=False)
        async def other(request: Request) -> Response:
            return handler.relay(await other_request(request))

    if settings.metrics:

        @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
        async def prometheus() -> Response:
            return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, name in (("/", "page.html"), ("/page.js", "page.js"), ("/page.css", "page.css")):
        app.add_api_route(path, page_file(name), include_in_schema=False)
    if traces is not None:
        traces.watch(app)
    return app
