"""`parse-infer cost`: what a pair of models can gain on this machine, before anything is trained."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from parse_infer.cli import options


def cost(
    target: Annotated[str, typer.Option(help="qwen3-8b, qwen3-0.6b, a Hugging Face id or a folder.")] = "qwen3-8b",
    draft: Annotated[str, typer.Option(help="The same for the draft model.")] = "qwen3-0.6b",
    context: Annotated[int, typer.Option(min=8, help="Tokens of the prompt.")] = 512,
    draft_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a whole draft.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each forward is timed.")] = 20,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """What every kind of forward costs at a pair's real size, with random weights: no download.

    Shows what a pair can gain on a machine before anything is trained: the price of the packed pass, of a look at
    several guessed tokens, and of each drafter, in target forwards. dtype auto is bfloat16 on a GPU, else float32.

    \b
    Examples:
      parse-infer cost
      parse-infer cost --target zoo:target --draft zoo:draft --context 200 --draft-tokens 100
    """
    place, numbers = options.placement(device, dtype)
    from parse_infer.evaluation.forward_cost import forward_costs

    table, summary = forward_costs(target, draft, context, draft_tokens, rounds, place, numbers)
    Console().print(f"{target} and {draft}, random weights, {numbers}, {place}, {context} tokens of context")
    Console().print(table, summary)
