"""What the commands of `parse-infer` share: options, and the models behind them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from parse_infer.engine import ParseEngine

Target = Annotated[
    str | None,
    typer.Option(help="Hugging Face id or folder; default: the embedded zoo:target."),
]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft model; default with the embedded target: zoo:draft."),
]
Adapter = Annotated[
    str | None,
    typer.Option(help="Trained adapter; default with the embedded target: zoo:adapter."),
]
Device = Annotated[str | None, typer.Option(help="For example cpu or cuda:0; default: a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Switch of the chat templates, for example enable_thinking=false; repeatable.",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Keep a prefix whose validity is at least this; more than 1 keeps none. Default: the adapter's.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens an answer may have, end token included.")]
ZeroShot = Annotated[
    bool,
    typer.Option("--zero-shot", help="No adapter: ask the target itself whether each prefix is right."),
]

TargetDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Guess tokens of what the target writes; changes no answer. lookup, draft, eagle3, parallel, "
        "medusa, or the folder of a head; sizes behind it as in eagle3:tokens=4:top_k=3.",
    ),
]
DraftDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Guess tokens of what the draft model writes; changes no draft. lookup, parallel, or a folder.",
    ),
]

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_engine(
    target: str | None,
    draft: str | None,
    adapter: str | None,
    *,
    needs_draft: bool = True,
    needs_judge: bool = True,
    zero_shot: bool = False,
    target_drafter: str | None = None,
    draft_drafter: str | None = None,
    threshold: float | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    template_options: Sequence[str] | None = None,
) -> ParseEngine:
    """Load what the options name; the embedded parts stand in for one another only with the embedded target.

    Raises ValueError or OSError with one sentence for whatever is missing or does not fit.
    """
    target = target or "zoo:target"
    embedded = target == "zoo:target"
    if draft is None and needs_draft:
        if not embedded:
            raise ValueError(f"the target {target!r} needs a draft model of its own: give one with --draft")
        draft = "zoo:draft"
    if adapter is None and needs_judge and not zero_shot:
        if not embedded:
            raise ValueError(
                f"the target {target!r} needs an adapter of its own: give one with --adapter, or use what needs none "
                "(--zero-shot, --mode exact, or other --modes of bench)"
            )
        adapter = "zoo:adapter"
    _check_dtype(dtype)
    options = read_pairs(template_options, "--template-option")

    from transformers.utils import logging as transformers_logging

    from parse_infer.engine import ParseEngine

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return ParseEngine.from_pretrained(
        target,
        draft,
        adapter,
        zero_shot=zero_shot,
        target_drafter=target_drafter,
        draft_drafter=draft_drafter,
        threshold=threshold,
        device=_check_device(device),
        dtype=dtype,
        template_options=options,
        trust_remote_code=trust_remote_code,
    )


def read_pairs(pairs: Sequence[str] | None, option: str) -> dict[str, Any]:
    """`["a=1", "b=text"]` -> `{"a": 1, "b": "text"}`; values are JSON where they can be, else text.

    Raises ValueError for an entry without a key or "=".
    """
    values: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{option} {pair!r} is not KEY=VALUE")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value
    return values


def read_numbers(text: str, option: str) -> tuple[float, ...]:
    """`"0.5,0.9"` -> `(0.5, 0.9)`; "none" and "" are no numbers. Raises ValueError for anything else."""
    if text.strip().lower() in ("", "none"):
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers separated by commas, or none") from None


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on standard output, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def placement(device: str | None, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Where random weights go and what they are: a GPU and bfloat16 if there is one, else the CPU and float32."""
    import torch

    _check_dtype(dtype)
    place = torch.device(_check_device(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto":
        return place, torch.bfloat16 if place.type == "cuda" else torch.float32
    return place, getattr(torch, dtype)


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(_DTYPES)}")


def _check_device(device: str | None) -> str | None:
    if device is None:
        return None
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; for example cpu, cuda or cuda:1") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but PyTorch finds no GPU: use --device cpu")
    return device
