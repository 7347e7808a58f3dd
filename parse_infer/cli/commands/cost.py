"""`parse-infer cost`: the speed-up that a pair of models can reach on this machine, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.errors import ParseError


def cost(
    target: Annotated[str, typer.Option(help="Hugging Face id or folder.")] = "Qwen/Qwen3-8B",
    draft: Annotated[str, typer.Option(help="Draft model, named like the target.")] = "Qwen/Qwen3-0.6B",
    context: Annotated[int, typer.Option(min=8, help="Tokens of the prompt.")] = 512,
    draft_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a whole draft.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each forward.")] = 20,
    output: Annotated[Path | None, typer.Option(help="File for the costs that `parse-infer plan` reads.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    torch_compile: options.TorchCompile = False,
) -> None:
    """Time every kind of forward at a pair's real size, with random weights and without a download.

    Reports the cost of the packed pass, of verifying several speculative tokens and of each token drafter, in target
    forwards. dtype auto is bfloat16 on a GPU, else float32.

    \b
    Examples:
      parse-infer cost
      parse-infer cost --target zoo:target --draft zoo:draft --context 200 --draft-tokens 100
    """
    place, numbers = options.placement(device, dtype)
    if torch_compile and place.type != "cuda":
        raise ParseError(f"--torch-compile is for decoding on a GPU, not on {place}: leave it out")
    from parse_infer.evaluation.forward_cost import cost_report, forward_costs, serving_costs
    from parse_infer.files import write_json

    seconds = forward_costs((target, draft), context, draft_tokens, rounds, place, numbers, torch_compile)
    table, summary = cost_report(seconds, draft_tokens)
    if output is not None:
        write_json(output, {"target": target, "draft": draft, **serving_costs(seconds, context, draft_tokens)})
    how = f"{numbers}, {place}{', torch.compile' * torch_compile}"
    Console().print(f"{target} and {draft}, random weights, {how}, {context} tokens of context")
    Console().print(table, summary)
