"""`parse-infer generate`: answers to one prompt or to a file of them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from parse_infer.cli import options
from parse_infer.cli.model_options import ModelOptions, with_models
from parse_infer.cli.options import given, print_json

if TYPE_CHECKING:
    from parse_infer.cli.prompt_rows import PromptRow
    from parse_infer.engine import ParseEngine
    from parse_infer.generation import Generation, GenerationSettings


@with_models()
def generate(
    models: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without one, --file or standard input.")] = None,
    file: Annotated[
        str | None, typer.Option(help='jsonl with "prompt" (text or messages), "id", "draft"; - is standard input.')
    ] = None,
    draft_text: Annotated[str | None, typer.Option(help="Check this draft instead of the draft model's.")] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Instead of a threshold: at most this share of requests lost, as calibrate has shown."),
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="validity|exact", help="exact: only the target's own greedy tokens (in float32).")
    ] = "validity",
    acceptance: Annotated[
        str, typer.Option(metavar="first_failure|longest", help="Up to the first failing cut, or to the last valid.")
    ] = "first_failure",
    resume: options.Resume = None,
    exact_tail: Annotated[bool, typer.Option(help="Use draft tokens that equal the target's choice.")] = True,
    max_new_tokens: options.MaxNewTokens = 512,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer after this text; repeatable.")] = None,
    temperature: Annotated[float, typer.Option(help="The target's sampling temperature; 0 is greedy.")] = 0.0,
    draft_temperature: Annotated[float, typer.Option(help="The draft model's; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, for both.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Write text (with --json: events) as it comes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Answer a prompt, or every prompt of a jsonl file.

    \b
    Examples:
      parse-infer generate "A box holds 12 pens. How many pens are in 7 boxes?" --stream
      parse-infer generate "…" --adapter runs/validity/adapter --risk 0.01
      parse-infer generate --file prompts.jsonl --json > answers.jsonl
      parse-infer generate "…" --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/qwen3/adapter
    """
    from parse_infer.cli.prompt_rows import check_prompts
    from parse_infer.generation import GenerationSettings
    from parse_infer.models.sampling import Sampling

    rows = _prompt_rows(prompt, file, draft_text)
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        mode=mode,  # type: ignore[arg-type]
        acceptance=acceptance,  # type: ignore[arg-type]
        exact_tail=exact_tail,
        draft_sampling=Sampling(draft_temperature, top_p, seed=seed),
        resume_sampling=Sampling(temperature, top_p, seed=seed),
        stop=tuple(stop or ()),
        risk=risk,
        **given(resume=resume),
    )
    engine = models.load(needs_draft=any(row.draft is None for row in rows), needs_judge=mode == "validity")
    check_prompts(engine, rows)
    out = Console(highlight=False, soft_wrap=True)
    for number, row in enumerate(rows):
        if number and not as_json:
            out.print()
        answer = _answer(engine, row, settings, out, stream, as_json)
        if not as_json:
            Console(stderr=True, highlight=False).print(_cost(answer), style="dim")


def _prompt_rows(prompt: str | None, file: str | None, draft_text: str | None) -> list[PromptRow]:
    from parse_infer.cli.prompt_rows import PromptRow, read_prompt_rows

    if file is not None:
        if prompt is not None or draft_text is not None:
            raise ValueError("give a prompt or --file, not both; drafts stand in the file, under the key 'draft'")
        return read_prompt_rows(file)
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("give a prompt, --file FILE, or text on standard input")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ValueError("the prompt is empty: give some text")
    return [PromptRow("", prompt, draft=draft_text)]


def _answer(
    engine: ParseEngine, row: PromptRow, settings: GenerationSettings, out: Console, stream: bool, as_json: bool
) -> Generation:
    """Answer one row and write the answer out."""
    from parse_infer.cli.live import STYLES, coloured_spans
    from parse_infer.generation import Accepted, Done, Resumed

    generation: Generation | None = None
    with row.located():
        events = engine.stream(row.prompt, settings, row.draft)
    for event in events:
        if isinstance(event, Done):
            generation = event.generation
        if stream and as_json:
            body = _as_json(event.generation) if isinstance(event, Done) else asdict(event)
            print_json({**row.labels, "event": type(event).__name__.lower(), **body})
        elif stream and isinstance(event, (Accepted, Resumed)):
            out.print(Text(event.text, STYLES["accepted" if isinstance(event, Accepted) else "target"]), end="")
    assert generation is not None
    if stream and not as_json:
        out.print()
    elif as_json and not stream:
        print_json({**row.labels, **_as_json(generation)})
    elif not stream:
        out.print(coloured_spans(generation.spans))
    return generation


def _as_json(generation: Generation) -> dict[str, Any]:
    body = asdict(generation)
    body["stats"]["acceptance_rate"] = generation.stats.acceptance_rate
    return body


def _cost(generation: Generation) -> str:
    stats, timings = generation.stats, generation.timings
    return (
        f"kept {stats.acceptance_rate:.0%} of {stats.draft_tokens} draft tokens, {stats.target_forwards} target "
        f"forwards, {len(generation.token_ids)} tokens in {timings.total_s:.2f} s (draft {timings.draft_s:.2f}, "
        f"verify {timings.verify_s:.2f}, resume {timings.resume_s:.2f}); ended by {generation.finish_reason}"
    )
