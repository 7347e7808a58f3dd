"""Reading and writing the five files of an exported adapter, complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
HEAD = "validity_head.safetensors"
CONFIG = "validity_config.json"
CARD = "README.md"


@dataclass(frozen=True)
class AdapterFiles:
    """What an adapter folder holds, as read."""

    peft_config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: dict[str, Tensor]
    validity_config: dict[str, Any]


def read_adapter(name_or_path: str | Path) -> AdapterFiles:
    """Read a local folder, or a Hugging Face id through the Hub's cache.

    Raises:
        FileNotFoundError: no such folder or id, or one of its files is missing.
        ValueError: a file is damaged.
    """
    folder = _locate(name_or_path)
    for name in (CONFIG, PEFT_CONFIG, PEFT_WEIGHTS, HEAD):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{name_or_path} is no complete validity adapter: {name} is missing (an interrupted export?)"
            )
    return AdapterFiles(
        peft_config=_read_json(folder / PEFT_CONFIG),
        tensors=_read_tensors(folder / PEFT_WEIGHTS),
        head=_read_tensors(folder / HEAD),
        validity_config=_read_json(folder / CONFIG),
    )


def write_adapter(
    folder: Path,
    peft_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    validity_config: Mapping[str, Any],
) -> Path:
    """Write an adapter folder; an adapter that is there already is replaced in one step.

    Raises:
        ValueError: `folder` exists and holds something else than an adapter.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and not ((folder / CONFIG).is_file() or (folder.is_dir() and not any(folder.iterdir()))):
        raise ValueError(f"{folder} exists and is no adapter folder: choose another folder, or empty it first")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(_plain(tensors), partial / PEFT_WEIGHTS, metadata={"format": "pt"})
        save_file(_plain(head), partial / HEAD, metadata={"format": "pt"})
        _write_json(partial / PEFT_CONFIG, peft_config)
        _write_json(partial / CONFIG, validity_config)
        (partial / CARD).write_text(model_card(validity_config), encoding="utf-8")
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def model_card(config: Mapping[str, Any]) -> str:
    """README.md of an adapter, from its validity_config.json."""
    target, threshold = config["target"], config.get("threshold")
    front = ["---", "library_name: peft", "tags: [parse-engine, lora, activated-lora]"]
    if "/" in target["name"]:  # a Hub id
        front.append(f"base_model: {target['name']}")
    rows = [f"| {key} | {_shown(value)} |" for key, value in config.get("metrics", {}).items()]
    metrics = ["", "## Held-out figures", "", "| metric | value |", "|---|---|", *rows] if rows else []
    facts = {
        "target": f"{target['name']} ({target['model_type']}, {target['num_hidden_layers']} layers)",
        "probe": f"`{json.dumps(config['probe_text'], ensure_ascii=False)}`",
        "cuts": json.dumps(config.get("cut_policy", {})),
        "label": json.dumps(config.get("label", {}), ensure_ascii=False),
        "threshold": "not calibrated" if threshold is None else f"{threshold:.4g}",
        "risk": json.dumps(config.get("risk")),
        "provenance": json.dumps(config.get("provenance", {}), ensure_ascii=False),
    }
    return "\n".join(
        [
            *front,
            "---",
            f"# Validity adapter for {target['name']}",
            "",
            "Estimates, for every prefix of a draft answer, the probability that the target still reaches a correct",
            "answer from there. Use it with `parse_infer.ParseEngine.from_pretrained(target, draft, adapter)`.",
            "",
            *(f"- {key}: {value}" for key, value in facts.items()),
            *metrics,
            "",
        ]
    )


def _locate(name_or_path: str | Path) -> Path:
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{name} is a file: give the adapter's folder")
    if isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"there is no adapter folder {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=[PEFT_CONFIG, PEFT_WEIGHTS, HEAD, CONFIG, CARD]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{name} is neither a local adapter folder nor available on the Hugging Face Hub ({reason})"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path} is damaged, it is no valid JSON ({error}): export or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged, it holds no JSON object: export or download the adapter again")
    return content


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): export or download the adapter again") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content), indent=2, ensure_ascii=False, default=_as_json) + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    """peft keeps sets and enumerations in its configuration."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "value"):
        return value.value
    raise TypeError(f"{value!r} cannot be written as JSON")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
