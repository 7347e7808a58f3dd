"""`parse-infer generate`: answer one prompt or a file of prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from parse_infer.cli.model_options import ModelOptions, with_models
from parse_infer.cli.setting_options import with_settings
from parse_infer.errors import ParseError
from parse_infer.files import read_stdin
from parse_infer.settings.generation import GenerationSettings

if TYPE_CHECKING:
    from parse_infer.cli.prompt_rows import PromptRow


@with_models()
@with_settings(without=["threshold"])  # one of the models' options
def generate(
    models: ModelOptions,
    settings: GenerationSettings,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; default: --file or standard input.")] = None,
    file: Annotated[
        str | None, typer.Option(help='jsonl with "prompt" (text or messages), "id", "draft"; - is standard input.')
    ] = None,
    draft_text: Annotated[str | None, typer.Option(help="Verify this draft instead of the draft model's.")] = None,
    out: Annotated[
        str | None, typer.Option(help="With --file: folder for records.jsonl; an interrupted run continues there.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text while it is generated; with --json: events.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Answer a prompt, or every prompt of a jsonl file.

    \b
    Examples:
      parse-infer generate "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?" --stream
      parse-infer generate "…" --adapter runs/judge/adapter --risk 0.05
      parse-infer generate --file prompts.jsonl --json > answers.jsonl
      parse-infer generate --file prompts.jsonl --backend vllm --out runs/answers
      parse-infer generate "…" --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/qwen3-8b-0.6b/adapter \\
          --template-option enable_thinking=false
    """
    from parse_infer.cli.answer_output import answer_file, print_answers, stream_answers
    from parse_infer.cli.prompt_rows import check_prompts

    rows = _prompt_rows(prompt, file, draft_text)
    if out is not None and (file is None or stream):
        raise ParseError("--out is for the answers to a --file, without --stream")
    if out is not None and as_json:
        raise ParseError("--out and --json were both given: records.jsonl in --out has the answers as JSON already")
    if settings.risk is not None and models.threshold is not None:
        raise ParseError("--risk and --threshold were both given: the calibration gives the threshold of a risk")
    needs_draft = any(row.draft is None for row in rows)
    judged = settings.mode == "validity" and (models.threshold is None or not models.threshold > 1)
    needs_judge = models.served or judged  # over servers it reads the choices
    with models.load(needs_draft=needs_draft, needs_judge=needs_judge, expected=settings) as engine:
        check_prompts(engine.target, rows)
        if out is not None:
            answer_file(engine, rows, settings, out)
        elif stream:
            stream_answers(engine, rows, settings, as_json)
        else:
            print_answers(engine, rows, settings, as_json)


def _prompt_rows(prompt: str | None, file: str | None, draft_text: str | None) -> list[PromptRow]:
    from parse_infer.cli.prompt_rows import PromptRow, read_prompt_rows

    if file is not None:
        if prompt is not None or draft_text is not None:
            raise ParseError("give a prompt or --file, not both; a file has its drafts under the key 'draft'")
        return read_prompt_rows(file)
    if prompt is None:
        if sys.stdin.isatty():
            raise ParseError("give a prompt, --file FILE, or text on standard input")
        prompt = read_stdin().removesuffix("\n")
    if not prompt.strip():
        raise ParseError("the prompt is empty: give some text")
    return [PromptRow("", prompt, draft=draft_text)]
