"""Options that several commands have, and how their texts are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

Device = Annotated[str | None, typer.Option(help="For example cpu or cuda:0; default: a GPU if there is one.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or auto: as saved, but float32 on CPUs slow in 16 bits.")
]
TaskName = Annotated[str, typer.Option(help="gsm_symbolic, gsm8k, reasoning_gym, mixture or jsonl.")]
TaskOptions = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task, such as path=…; repeatable.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens an answer may have, end token included.")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="finish|hand_back",
        help="After a rejected draft the target writes the rest, or one segment at a time; default: the engine's.",
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(help="The target answers alone while that is measured to be faster; default: with --backend vllm."),
]

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None: for the others the library's own defaults apply."""
    return {key: value for key, value in values.items() if value is not None}


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

    check_dtype(dtype)
    place = torch.device(check_device(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto":
        return place, torch.bfloat16 if place.type == "cuda" else torch.float32
    return place, getattr(torch, dtype)


def check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(_DTYPES)}")


def check_device(device: str | None) -> str | None:
    if device is None:
        return None
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; for example cpu, cuda or cuda:1") from None
    if kind == "meta":
        raise ValueError("device 'meta' has no weights to compute with; for example cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but PyTorch finds no GPU: use --device cpu")
    return device
