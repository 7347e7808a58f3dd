"""`parse-infer score`: validity of any response, segment by segment."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from parse_infer.cli.model_options import LOCAL_ONLY, NO_DRAFTER, ModelOptions, with_models
from parse_infer.cli.options import print_json
from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from parse_infer.cli.prompt_rows import PromptRow


@with_models(draft=None, target_drafter=NO_DRAFTER, calibration=None, **LOCAL_ONLY)
def score(
    models: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    response: Annotated[str | None, typer.Argument(help="The response to judge.")] = None,
    file: Annotated[
        str | None, typer.Option(help='jsonl with "prompt", "response" and optionally "id"; - is standard input.')
    ] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="The response is not complete yet.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per response.")] = False,
) -> None:
    """Score the validity of any response, segment by segment, in one forward of the target.

    \b
    Examples:
      parse-infer score "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?" \\
          "His brother has 6 - 3 = 4 stickers."
      parse-infer score --file answers.jsonl --json
    """
    from parse_infer.cli.prompt_rows import check_prompts
    from parse_infer.cli.rich_view import score_table

    rows = _response_rows(prompt, response, file)
    engine = models.load(needs_draft=False)
    check_prompts(engine.target, rows)
    out = Console(highlight=False)
    for row in rows:
        with row.located():
            result = engine.score(row.prompt, row.response or "", finished=not unfinished)
        if as_json:
            figures = {"validity": result.validity, "first_error": result.first_error}
            print_json({**row.labels, **figures, **asdict(result)})
        else:
            out.print(score_table(result))
        if result.unusual:
            where = f"{row.place}: " if row.place else ""
            sentence = f"note: {where}the response is unlike the judge's training drafts, so it has no validity"
            print(sentence, file=sys.stderr, flush=True)


def _response_rows(prompt: str | None, response: str | None, file: str | None) -> list[PromptRow]:
    from parse_infer.cli.prompt_rows import PromptRow, read_prompt_rows

    if file is not None:
        if prompt is not None:
            raise ParseError("give a prompt and a response, or --file, not both")
        return read_prompt_rows(file, ("prompt", "response"))
    if prompt is None or response is None:
        raise ParseError("score needs a prompt and a response, or --file FILE")
    return [PromptRow("", prompt, response=response)]
