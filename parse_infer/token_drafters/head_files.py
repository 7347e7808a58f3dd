"""Shared functions of EAGLE and Medusa heads: files, and checks that a head matches its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parse_infer.errors import ModelError
from parse_infer.files import atomic_write, lies_below, read_json, read_tensors, write_json
from parse_infer.models.architecture import embedding_weight
from parse_infer.models.loading import LanguageModel

if TYPE_CHECKING:
    from parse_infer.token_drafters.eagle_head import EagleHead
    from parse_infer.token_drafters.medusa import MedusaHead

CONFIG, WEIGHTS = "config.json", "model.safetensors"
WAY_OUT = "export or download the head again"
# Keys of config.json without effect on a head's computation.
IGNORED_KEYS = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "version"),
    *("base_model_name_or_path", "use_cache", "initializer_range", "pretraining_tp", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_paths", "topk"),
}


def save_head(folder: str | Path, head: nn.Module, config: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors, each atomically."""
    folder = Path(folder)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    with atomic_write(folder / WEIGHTS) as beside:
        save_file(state, beside, metadata={"format": "pt"})
    write_json(folder / CONFIG, dict(config))
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a head.

    Raises:
        FileNotFoundError: a file of the head is missing.
        ValueError: config.json is damaged.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            if below := lies_below(folder, WEIGHTS):
                raise FileNotFoundError(f"{folder} is not the folder of the head{below}")
            raise FileNotFoundError(f"{folder} is no complete head: {name} is missing")
    return read_json(folder / CONFIG, WAY_OUT)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a head. Raise ValueError for a damaged file."""
    return read_tensors(folder / WEIGHTS, WAY_OUT)


def known_fields(values: Mapping[str, Any], kind: type, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Select the fields of the dataclass `kind` from a config.json.

    Args:
        fixed: other supported keys, each with its only supported value.

    Raises:
        ValueError: an unsupported key that may affect the head's computation. Keys with null, false, 0 or an empty
            value have no effect.
    """
    names = {f.name for f in fields(kind)}
    for key, value in values.items():
        if key in names or key in IGNORED_KEYS or not value or (key in fixed and fixed[key] == value):
            continue
        supported = f"; only {fixed[key]!r} is" if key in fixed else ""
        raise ModelError(f"config.json of the head sets {key} to {value!r}, which is not supported{supported}")
    return {key: value for key, value in values.items() if key in names}


def check_shape(name: str, config: object, model: LanguageModel) -> None:
    """Raise ValueError for a head of another model.

    Args:
        config: has hidden_size, vocab_size and target_num_hidden_layers, which is None in heads of other projects.
    """
    own = model.model.config.get_text_config(decoder=True)
    keys = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "target_num_hidden_layers": "num_hidden_layers"}
    for key, own_key in keys.items():
        if getattr(config, key) not in (None, getattr(own, own_key)):
            raise ModelError(
                f"the head {name} was trained for a model with {own_key} {getattr(config, key)}; "
                f"{model.name!r} has {getattr(own, own_key)}: use a head trained for it"
            )


def load_state(head: EagleHead | MedusaHead, state: Mapping[str, Tensor], name: str, model: LanguageModel) -> None:
    """Load the weights and move the head to the model's device. Raise ValueError if they do not match config.json."""
    try:
        head.load_state_dict(dict(state))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(f"the weights of the head {name} do not fit its config.json: {reason}") from error
    lowest, highest = head.token_ids.aminmax()
    if lowest < 0 or highest >= head.config.vocab_size:
        raise ModelError(
            f"the head {name} maps to token {int(lowest if lowest < 0 else highest)}, but there are "
            f"{head.config.vocab_size}: its token map is damaged"
        )
    weight = embedding_weight(model.model)
    head.to(weight.device, weight.dtype).eval().requires_grad_(False)


def check_sizes(model: LanguageModel, tokens: int, top_k: int, tree_tokens: int) -> None:
    """Raise ValueError for a size below 1, and for more proposed tokens than the context window holds."""
    for key, value in (("tokens", tokens), ("top_k", top_k), ("tree_tokens", tree_tokens)):
        if value < 1:
            raise ModelError(f"{key} of a token drafter must be at least 1, not {value}")
    size = max(tokens, tree_tokens if top_k > 1 else 0)
    if size >= model.window:
        raise ModelError(
            f"{size} proposed tokens do not fit the context window of {model.name!r} ({model.window}): "
            "choose fewer tokens or tree_tokens"
        )


def embed(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Return the model's input embeddings of the tokens, [n, H]."""
    weight = embedding_weight(model.model)
    return weight[torch.tensor(list(ids), device=weight.device)]
