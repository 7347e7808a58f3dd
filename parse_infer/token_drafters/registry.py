"""Token drafters by name: NAME[:KEY=VALUE…].

NAME is "lookup", "draft", or the folder or Hugging Face id of an EAGLE-3 head or of Medusa heads. The keys are sizes
of the proposer's class, for example "runs/eagle3/head:tokens=4:top_k=3".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from parse_infer.errors import ModelError
from parse_infer.files import locate
from parse_infer.models.loading import LanguageModel
from parse_infer.suggest import suggestion
from parse_infer.token_drafters import eagle_head, medusa
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.eagle_head import EagleHead
from parse_infer.token_drafters.head_files import CONFIG, WEIGHTS, read_config
from parse_infer.token_drafters.medusa import MedusaDrafter, MedusaHead
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter
from parse_infer.token_drafters.proposer import TokenProposer

_CLASSES: dict[str, type] = {"lookup": PromptLookupDrafter, "draft": DraftModelProposer}
# Kinds of heads that are often typed as names, and have recipes of that name.
_RECIPES = ("eagle3", "parallel", "medusa")


def split_name(name: str) -> tuple[str, dict[str, float]]:
    """Split "draft:tokens=4" into ("draft", {"tokens": 4}). Raise ValueError for a value that is no number."""
    parts = name.split(":")
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    sizes: dict[str, float] = {}
    for part in parts[first:]:
        key, _, value = part.partition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ModelError(f"{part!r} in the token drafter {name!r} is not KEY=NUMBER")
        sizes[key] = float(value) if "." in value else int(value)
    return ":".join(parts[:first]), sizes


def check_token_drafter(role: str, name: str, has_draft: bool) -> None:
    """Check the name of a token drafter before any model is loaded.

    Args:
        role: name of the setting, for messages.
        has_draft: whether a draft model is available ("draft").

    Raises:
        ValueError: an unknown name or size, or a missing draft model.
    """
    kind, sizes = split_name(name)
    if kind in _CLASSES:
        _fit(_CLASSES[kind], sizes, name)
    if kind == "draft" and not has_draft:
        raise ModelError(f"{role} is 'draft', which needs a draft model")
    if kind not in _CLASSES:
        check_head_name(role, kind, _CLASSES)


def check_head_name(role: str, name: str, others: Iterable[str]) -> None:
    """Raise ValueError unless `name` is a folder or may be a Hugging Face id.

    Args:
        role: name of the setting, for messages.
        others: names without a head that the setting knows.
    """
    if _is_folder_or_id(name):
        return
    if name in _RECIPES:
        raise ModelError(f"{role} is {name!r}: give the folder of a trained head, as recipes/{name}.yaml trains one")
    raise ModelError(f"{role} is {name!r}; {suggestion(name, [*others, 'or the folder of a head'])}")


def find_head(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a head, and its config.json.

    Args:
        name: folder or Hugging Face id.

    Raises:
        FileNotFoundError, ValueError: a missing or damaged head, or neither an EAGLE-3 head nor Medusa heads.
    """
    folder = locate(name, (CONFIG, WEIGHTS), "head")
    config = read_config(folder)
    architecture, known = _architecture(config), eagle_head.ARCHITECTURES + medusa.ARCHITECTURES
    if architecture not in known:
        raise ModelError(
            f"{folder} is no EAGLE-3 or Medusa head: its architecture is {architecture}, not one of {', '.join(known)}"
        )
    return folder, config


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a head's config.json describes Medusa heads."""
    return _architecture(config) in medusa.ARCHITECTURES


def load_token_drafter(name: str, model: LanguageModel, draft: LanguageModel | None = None) -> TokenProposer:
    """Load the token drafter called `name` for `model`; "draft" uses the model `draft`.

    Raises:
        FileNotFoundError, ValueError: a missing or damaged head, a head of another model, or an invalid size.
    """
    kind, sizes = split_name(name)
    if kind == "lookup":
        return PromptLookupDrafter(**_fit(PromptLookupDrafter, sizes, name))
    if kind == "draft":
        assert draft is not None
        return DraftModelProposer(draft, model, **_fit(DraftModelProposer, sizes, name))
    folder, config = find_head(kind)
    if is_medusa(config):
        options = _fit(MedusaDrafter, sizes, name)
        return MedusaDrafter(MedusaHead.from_pretrained(folder, model), model, **options)
    options = _fit(EagleDrafter, sizes, name)
    return EagleDrafter(EagleHead.from_pretrained(folder, model), model, **options)


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or ["nothing"])[0])


def _fit(kind: Callable[..., object], sizes: Mapping[str, float], name: str) -> Mapping[str, Any]:
    """Return the sizes. Raise ValueError for a size that this kind of proposer does not have."""
    known = {k: p for k, p in inspect.signature(kind).parameters.items() if k not in ("head", "model", "draft")}
    for key, value in sizes.items():
        if key not in known:
            raise ModelError(f"{key!r} is no size of the token drafter {name!r}; it has: {', '.join(known)}")
        if isinstance(value, float) and "float" not in known[key].annotation:
            raise ModelError(f"{key} of the token drafter {name!r} must be a whole number, not {value}")
    return sizes


def _is_folder_or_id(name: str) -> bool:
    if not name:
        return False  # Path("") is the current folder
    return Path(name).expanduser().is_dir() or (name.count("/") == 1 and not name.startswith((".", "/", "~")))
