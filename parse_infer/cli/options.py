"""Options that several commands share, and their parsers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parse_infer.cli.setting_options import option_of
from parse_infer.errors import ParseError, SettingsError
from parse_infer.settings.sampling import Sampling

if TYPE_CHECKING:
    import torch

RESULTS_HELP = "Folder for results; an interrupted run continues there."
Device = Annotated[str | None, typer.Option(help="For example cpu or cuda:0; default: a GPU if available.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, or auto: as saved, but float32 on CPUs slow in 16 bits.")
]
TorchCompile = Annotated[
    bool,
    typer.Option("--torch-compile", help="On a GPU: compile the decode steps; slow at first, then faster."),
]
TaskName = Annotated[
    str, typer.Option(help="gsm_symbolic, gsm8k, reasoning_gym, dataset, docstrings, lm_eval, mixture or jsonl.")
]
TaskOptions = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the task, such as path=…; repeatable.")
]
MaxNewTokens = Annotated[int, option_of("max_new_tokens")]
Risk = Annotated[float | None, option_of("risk")]
MeasuredRisk = Annotated[
    float | None, typer.Option("--risk", help="Measure PARSE with threshold and block tokens of this promise.")
]
Adaptive = Annotated[bool | None, option_of("adaptive")]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # of Python, in JSON


def given(**values: object) -> dict[str, Any]:
    """Drop the values that are None, so that the library's defaults apply."""
    return {key: value for key, value in values.items() if value is not None}


def read_pairs(pairs: Sequence[str] | None, option: str) -> dict[str, Any]:
    """Parse `["a=1", "b=text"]` into `{"a": 1, "b": "text"}`; values that are neither JSON nor Python's True, False or
    None stay text.

    Raises ValueError for an entry without a key or "=".
    """
    values: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ParseError(f"{option} {pair!r} is not KEY=VALUE")
        try:
            values[key.strip()] = json.loads(_CONSTANTS.get(value, value))
        except ValueError:
            values[key.strip()] = value
    return values


def read_numbers(text: str, option: str) -> tuple[float, ...]:
    """Parse `"0.5,0.9"` into `(0.5, 0.9)`, and "none" or "" into `()`. Raises ValueError for anything else."""
    if text.strip().lower() in ("", "none"):
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ParseError(f"{option} is {text!r}; give numbers separated by commas, or none") from None


def read_sampling(temperature: float, top_p: float, top_k: int) -> Sampling:
    """Raises ValueError for a value out of range, or a truncation of what is not drawn."""
    sampling = Sampling(temperature, top_p, top_k)
    if sampling.greedy and (top_p != 1 or top_k):
        raise SettingsError(
            f"{'--top-p' if top_p != 1 else '--top-k'} changes nothing at temperature 0: give --temperature too"
        )
    return sampling


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON and flush standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def placement(device: str | None, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of random weights. Defaults: a GPU with bfloat16 if available, else the CPU with float32."""
    import torch

    check_dtype(dtype)
    place = torch.device(check_device(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto":
        return place, torch.bfloat16 if place.type == "cuda" else torch.float32
    return place, getattr(torch, dtype)


def check_dtype(dtype: str, *more: str) -> None:
    if dtype not in (*_DTYPES, *more):
        raise ParseError(f"unknown dtype {dtype!r}; choose one of {', '.join((*_DTYPES, *more))}")


def check_device(device: str | None) -> str | None:
    if device is None:
        return None
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ParseError(f"unknown device {device!r}; for example cpu, cuda or cuda:1") from None
    if kind == "meta":
        raise ParseError("device 'meta' holds no weights; choose cpu, cuda or cuda:1, for example")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ParseError(f"device {device!r} is not available: PyTorch finds no GPU; use --device cpu")
    return device
