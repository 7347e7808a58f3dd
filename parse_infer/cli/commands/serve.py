"""`parse-infer serve`: serve the engine through OpenAI's API."""

from __future__ import annotations

import logging.config
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parse_infer.cli import options
from parse_infer.cli.model_options import ModelOptions, with_models
from parse_infer.cli.setting_options import option_of
from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from parse_infer.serve.metrics import Metrics
    from parse_infer.serve.runner import Runner
    from parse_infer.serve.settings import ApiSettings


@with_models()
def serve(
    models: ModelOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 admits other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="PARSE_API_KEY", help="API key that clients must send; default: none.")
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys that share the server, with lines KEY [WEIGHT] [NAME]; read again when it changes."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in the API; default: the target's name.")
    ] = None,
    risk: options.Risk = None,
    audit: Annotated[
        float, typer.Option(help="Share of answers under a risk that are compared with the target's; 0: none.")
    ] = 0.0,
    adaptive: options.Adaptive = None,
    strict_tokens: Annotated[int | None, option_of("strict_tokens")] = None,
    strict_answer: Annotated[bool, option_of("strict_answer")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Reject requests with unknown fields; default: warn.")
    ] = False,
    generation_config: Annotated[
        bool, typer.Option(help="Take sampling defaults from the target's generation_config.json; off: greedy.")
    ] = True,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Largest number of waiting answers of a client; more get 429 and Retry-After.")
    ] = 64,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request times out.")] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that accepted requests have after a stop signal.")
    ] = 30.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Send OpenTelemetry spans to OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = False,
    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest request body, in MB; raise it for images.")
    ] = 4.0,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that answer on the port; more than 1 needs --target-url and --draft-url. --parallel, "
            "--max-waiting, --audit and what adaptive and block lengths learn are each worker's own.",
        ),
    ] = 1,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of /metrics, without a key; default: --port, with the key."),
    ] = None,
) -> None:
    """Serve OpenAI's API, Prometheus metrics and a demo page.

    \b
    Examples:
      parse-infer serve --port 8000
      parse-infer serve --calibration runs/calibration/calibration.json --risk 0.05 --audit 0.01
      parse-infer serve --backend vllm --target-url http://gpu-1:8000 --draft-url http://gpu-2:8000
      parse-infer serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/qwen3-8b-0.6b/adapter \\
          --template-option enable_thinking=false --api-key secret
    """
    api_key = None if api_key is None else api_key.strip()  # secret files end with a line break
    if api_key is not None and not (api_key and api_key.isascii()):
        raise ParseError("--api-key must be non-empty ASCII text, or be left out")
    if workers > 1 and not (models.served and models.target_url and models.draft_url and not models.local_draft):
        raise ParseError(
            f"--workers {workers} needs --backend vllm, --target-url and --draft-url: each process would load its own "
            "models"
        )
    from data_tools.tasks.checkers import same_answer
    from parse_infer.serve.admission import Limits
    from parse_infer.serve.api_keys import ApiKeys
    from parse_infer.serve.logs import log_settings
    from parse_infer.serve.server import listen
    from parse_infer.serve.settings import ApiSettings, RiskSettings
    from parse_infer.serve.worker_metrics import forget_worker, open_metrics_port, shared_metrics
    from parse_infer.serve.workers import Workers

    keys, risk_settings = ApiKeys(api_key, api_keys_file), RiskSettings(risk, audit, same_answer)
    limits = Limits(max_waiting, request_timeout, grace, int(max_body_mb * 1e6))
    adaptive = models.served if adaptive is None else adaptive
    settings = ApiSettings(
        limits,
        keys,
        served_model_name,
        risk_settings,
        adaptive,
        strict_tokens,
        strict_answer,
        strict,
        generation_config,
        metrics_port is None,
    )
    with ExitStack() as stack:
        # Before the models are loaded, so that a port in use is known at once.
        listening = stack.enter_context(closing(listen(host, port)))
        metrics = None
        if workers == 1:
            from parse_infer.serve.metrics import Metrics

            metrics = Metrics()
        registry = stack.enter_context(shared_metrics()) if metrics is None else metrics.registry
        if metrics_port is not None:
            metrics_port = stack.enter_context(open_metrics_port(registry, host, metrics_port))
        serve_models, announce = partial(_serve, models, settings, trace), partial(_announce, listening, metrics_port)
        if metrics is not None:
            serve_models(listening, announce, metrics)
        else:
            logging.config.dictConfig(log_settings())
            Workers(workers, serve_models, listening, grace, on_end=forget_worker).run(announce)


def _announce(listening: socket.socket, metrics_port: int | None, name: str) -> None:
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"{name} answers at http://{host}:{port}/v1 (a page: /)", flush=True)
    if metrics_port is not None:
        print(f"metrics: http://{host}:{metrics_port}/metrics", flush=True)


def _serve(
    models: ModelOptions,
    settings: ApiSettings,
    trace: bool,
    listening: socket.socket,
    on_start: Callable[[str], None],
    metrics: Metrics | None = None,
) -> None:
    """Load the models and answer until a signal. `on_start` takes the target's name."""
    from parse_infer.serve.app import create_app
    from parse_infer.serve.server import ApiServer

    traces = None
    if trace:
        from parse_infer.serve.traces import Traces

        traces = Traces()
    runner: Runner
    if models.served:
        import torch

        from parse_infer.serve.loop_runner import LoopRunner

        runner = LoopRunner(models.load(expected=settings.risk_settings.expected, start_servers=False))
        if "draft" in runner.pools and "OMP_NUM_THREADS" not in os.environ:  # else a draft model here uses the cores
            torch.set_num_threads(1)  # many threads judge, and each would have an OpenMP team of its own
    else:
        from parse_infer.serve.thread_runner import ThreadRunner

        runner = ThreadRunner(models.load)
    try:
        app = create_app(runner, settings, traces, metrics)
        name = settings.model or runner.name

        def start() -> None:
            on_start(name)
            if warning := unpromised_default(runner, settings):
                logging.getLogger("parse_infer.serve").warning(warning)

        ApiServer(app, settings.limits, start).run(sockets=[listening])
    finally:
        runner.close()
        if traces is not None:
            traces.close()


def unpromised_default(runner: Runner, settings: ApiSettings) -> str | None:
    """A warning where the promise of `--risk` does not cover requests that name no sampling; None: it does."""
    from parse_infer.calibration.promises import promised

    risk, own = settings.risk_settings.risk, runner.default_sampling
    if risk is None or not settings.generation_config:
        return None
    asked = settings.risk_settings.expected.override(risk=None, resume_sampling=own, **settings.strict_defaults)
    reason = promised(asked, risk, runner.calibrations)[1]
    return reason and (
        f"requests that name no sampling are answered at the target's default ({own}), without a promise: {reason}; "
        "calibrate there, or serve with --no-generation-config"
    )
