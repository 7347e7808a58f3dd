"""`parse-infer serve`: serve the engine through OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parse_infer.cli import options
from parse_infer.cli.model_options import ModelOptions, with_models
from parse_infer.cli.setting_options import option_of
from parse_infer.errors import ParseError


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
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request body, in MB.")] = 4.0,
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
    from data_tools.tasks.checkers import same_answer
    from parse_infer.serve.admission import Limits
    from parse_infer.serve.api_keys import ApiKeys
    from parse_infer.serve.app import create_app
    from parse_infer.serve.audit import RiskSettings
    from parse_infer.serve.runner import Runner
    from parse_infer.serve.server import ApiServer, listen
    from parse_infer.serve.settings import ApiSettings
    from parse_infer.serve.thread_runner import ThreadRunner

    keys, risk_settings = ApiKeys(api_key, api_keys_file), RiskSettings(risk, audit, same_answer)
    traces = None
    if trace:
        from parse_infer.serve.traces import Traces

        traces = Traces()
    limits = Limits(max_waiting, request_timeout, grace, int(max_body_mb * 1e6))
    listening = listen(host, port)  # fail on a port in use before the models are loaded
    runner: Runner
    if models.served:
        from parse_infer.serve.loop_runner import LoopRunner

        runner = LoopRunner(models.load(expected=risk_settings.expected))
    else:
        runner = ThreadRunner(models.load)
    try:
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
        )
        app = create_app(runner, settings, traces)
        shown, port = listening.getsockname()[:2]
        shown = f"[{shown}]" if ":" in shown else shown
        print(f"{served_model_name or runner.name} answers at http://{shown}:{port}/v1 (a page: /)", flush=True)
        ApiServer(app, limits).run(sockets=[listening])
    finally:
        runner.close()
        if traces is not None:
            traces.close()
