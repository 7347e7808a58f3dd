"""Plain peft LoRAs as language models: merge the update into the weights of the base that the LoRA names.

A merged LoRA costs nothing at run time, and the packed pass runs ordinary linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parse_infer.errors import ModelError
from parse_infer.files import read_json, read_tensors, write_json
from parse_infer.models.fingerprint import describe_target, fingerprint, same_weights
from parse_infer.models.low_rank import check_options, low_rank_updates

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_VALIDITY_CONFIG = "validity_config.json"  # a validity adapter holds a LoRA too, for its probe tokens alone
_BASE = "base_model.json"
_TEMPLATE = "chat_template.jinja"
_WAY_OUT = "export or download the LoRA again"


@dataclass(frozen=True)
class Lora:
    """A LoRA folder: peft's two files, and optionally `base_model.json`, a tokenizer and `chat_template.jinja`."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.config["base_model_name_or_path"]

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    @property
    def chat_template(self) -> str | None:
        """Chat template that replaces the base's, for a LoRA without a tokenizer."""
        path = self.folder / _TEMPLATE
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def merge_into(self, model: PreTrainedModel) -> None:
        """Add the update to the weights of `model` in float32, and round to their dtype once.

        Raises:
            ValueError: the LoRA was trained on another model, or the weights are quantised or shared.
        """
        self.check_base(fingerprint(model), self.base)
        try:
            updates = low_rank_updates(self.config, self.tensors(), model)
        except ValueError as error:
            raise ModelError(f"The LoRA {self.folder} does not fit its base {self.base!r}: {error}.") from error
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        tied = output is not None and output.weight is embedding.weight
        for update in updates:
            weight = update.layer.weight
            if not weight.is_floating_point() or weight.element_size() < 2:
                raise ModelError(
                    f"The weights of {self.base!r} are quantised: the LoRA {self.folder} cannot be merged."
                )
            if update.layer is output and tied:
                raise ModelError(
                    f"The LoRA {self.folder} changes {update.path}, which {self.base!r} shares with its embedding: "
                    f"merging would change both."
                )
        with torch.no_grad():
            for update in updates:
                weight = update.layer.weight
                change = update.b.to(weight.device) @ update.a.to(weight.device, torch.float32)
                weight.copy_(weight.float() + (change.T if isinstance(update.layer, Conv1D) else change))

    def check_base(self, weights: str, name: str) -> None:
        """Raise ValueError if the LoRA was trained on weights with another fingerprint than `weights`."""
        base = self._base_description()
        if base and not same_weights(base["fingerprint"], weights):
            raise ModelError(
                f"The LoRA {self.folder} was trained on {base.get('name')!r}, and {name!r} has other weights."
            )

    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / _WEIGHTS, _WAY_OUT)

    def _base_description(self) -> dict[str, Any]:
        path = self.folder / _BASE
        content = read_json(path, _WAY_OUT) if path.is_file() else {}
        if content and not isinstance(content.get("fingerprint"), str):
            raise ModelError(f"{path} is damaged, it holds no fingerprint: {_WAY_OUT}")
        return content


def is_lora(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


def read_lora(folder: Path) -> Lora:
    """Check a LoRA's files and options. `merge_into` reads the tensors later.

    Raises:
        FileNotFoundError: the weights are missing.
        ValueError: a damaged file, a validity adapter, or a LoRA that cannot be merged.
    """
    if (folder / _VALIDITY_CONFIG).is_file():
        raise ModelError(f"{folder} is a validity adapter, not a language model: pass it as the adapter.")
    config = read_json(folder / _CONFIG, _WAY_OUT)
    try:
        check_options(config, also=("alora_invocation_tokens",))
    except ValueError as error:
        raise ModelError(f"The LoRA {folder} cannot be merged into its base: {error}.") from error
    if not isinstance(config.get("base_model_name_or_path"), str) or not config["base_model_name_or_path"]:
        raise ModelError(f"{folder / _CONFIG} does not name the LoRA's base model (base_model_name_or_path)")
    if not (folder / _WEIGHTS).is_file():
        raise FileNotFoundError(f"The LoRA {folder} is not complete: {_WEIGHTS} is missing (an interrupted export?).")
    return Lora(folder, config)


def describe_base(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Describe a LoRA's base model for `write_base`, before peft wraps the model."""
    return describe_target(model) | {"name": name}


def write_base(folder: Path, base: Mapping[str, Any]) -> None:
    """Record the base model in a LoRA folder, so that loading rejects other weights."""
    write_json(folder / _BASE, dict(base))
