"""`parse-infer transfer`: a judge for a pair without training."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def transfer(
    adapter: Annotated[str, typer.Argument(help="Adapter on log-probabilities, trained for any other target.")],
    target: Annotated[
        str, typer.Option(help="Hugging Face id or folder, without its weights; a GGUF file is converted first.")
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder of the new adapter.")],
) -> None:
    """Write the judge of another pair as an adapter for your target, without labels and training.

    A judge that learnt from your pair is stronger. The threshold of a transferred judge accepts nothing until
    a calibration finds what your pair allows: lossless speculation, or over servers the target alone. --loss
    disagreement needs no references.

    \b
    Examples:
      parse-infer transfer zoo:smollm2-adapter --target Qwen/Qwen3-8B --out runs/transferred
      parse-infer calibrate --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/transferred \\
          --template-option enable_thinking=false --task gsm8k --max-new-tokens 512
      parse-infer generate "…" --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/transferred \\
          --template-option enable_thinking=false --risk 0.05
    """
    from parse_infer.judge.transfer import transfer_adapter

    folder = transfer_adapter(adapter, target, out)
    console = Console(highlight=False)
    console.print(f"Written: {folder}", soft_wrap=True)
    console.print(
        f"It accepts no draft yet. Next: parse-infer calibrate --target {target} --draft … --adapter {folder}",
        soft_wrap=True,
    )
