"""`parse-infer serve`: the engine behind OpenAI's API."""

from __future__ import annotations

from typing import Annotated

import typer

from parse_infer.cli import options
from parse_infer.cli.model_options import ModelOptions, with_models


@with_models()
def serve(
    models: ModelOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="PARSE_API_KEY", help="What clients must send; default: nothing.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: the target's name.")
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Promise of requests that name none: at most this share is lost (`parse-infer calibrate`)."),
    ] = None,
    audit: Annotated[
        float, typer.Option(help="Share of the promised answers that are compared with the target's own; 0: none.")
    ] = 0.0,
    adaptive: options.Adaptive = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse fields of a request that are not known, instead of warning.")
    ] = False,
    generation_config: Annotated[
        bool,
        typer.Option(
            help="Requests that do not say are sampled as the target's generation_config.json asks for; else greedily."
        ),
    ] = True,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; beyond it, 429 and Retry-After.")
    ] = 64,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that accepted requests have after the signal to stop.")
    ] = 30.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Send OpenTelemetry spans; OTEL_EXPORTER_OTLP_ENDPOINT says where to.")
    ] = False,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest body of a request, in MB.")] = 4.0,
) -> None:
    """Serve OpenAI's API, Prometheus metrics and a page to try it.

    \b
    Examples:
      parse-infer serve --port 8000
      parse-infer serve --calibration runs/calibration/calibration.json --risk 0.05 --audit 0.01
      parse-infer serve --backend vllm --target-url http://gpu-1:8000 --draft-url http://gpu-2:8000
      parse-infer serve --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/qwen3-8b-0.6b/adapter \\
          --template-option enable_thinking=false --api-key secret
    """
    api_key = None if api_key is None else api_key.strip()  # a secret in a file ends with a line break
    if api_key is not None and not (api_key and api_key.isascii()):
        raise ValueError("--api-key must be a text of ASCII characters, or be left out")
    from data_tools.tasks.checkers import same_answer
    from parse_infer.serve.admission import Limits
    from parse_infer.serve.app import create_app
    from parse_infer.serve.risk_monitor import RiskMonitor
    from parse_infer.serve.runner import Runner
    from parse_infer.serve.server import Server, listen
    from parse_infer.serve.thread_runner import ThreadRunner

    promises = RiskMonitor(risk, audit, same_answer)
    traces = None
    if trace:
        from parse_infer.serve.traces import Traces

        traces = Traces()
    limits = Limits(max_waiting, request_timeout, grace, int(max_body_mb * 1e6))
    listening = listen(host, port)  # before the models are loaded: a port in use is found at once
    backend: Runner
    if models.served:
        from parse_infer.serve.loop_runner import LoopRunner

        backend = LoopRunner(models.load(expected=promises.expected))
    else:
        backend = ThreadRunner(models.load)
    try:
        adaptive = models.served if adaptive is None else adaptive
        app = create_app(
            backend,
            limits,
            api_key,
            served_model_name,
            promises,
            traces,
            adaptive=adaptive,
            strict=strict,
            generation_config=generation_config,
        )
        shown, port = listening.getsockname()[:2]
        shown = f"[{shown}]" if ":" in shown else shown
        print(f"{served_model_name or backend.name} answers at http://{shown}:{port}/v1 (a page: /)", flush=True)
        Server(app, limits).run(sockets=[listening])
    finally:
        backend.close()
        if traces is not None:
            traces.close()
