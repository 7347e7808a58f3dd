"""Token drafters by name: NAME[:KEY=VALUE…].

NAME is "lookup", "draft", an embedded head ("eagle3", "parallel", "medusa"), or the folder or Hugging Face id of an
EAGLE-3 head or of Medusa heads. The keys are the sizes of the drafter's class, for example "eagle3:tokens=4:top_k=3".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parse_infer.files import locate
from parse_infer.models.loading import LanguageModel
from parse_infer.models.names import collection_folder
from parse_infer.speculation import eagle_head, medusa
from parse_infer.speculation.draft_model import DraftModelProposer
from parse_infer.speculation.eagle import EagleDrafter
from parse_infer.speculation.head_files import CONFIG, WEIGHTS, read_config
from parse_infer.speculation.medusa import MedusaDrafter, MedusaHead
from parse_infer.speculation.prompt_lookup import PromptLookupDrafter
from parse_infer.speculation.proposer import TokenProposer
from parse_infer.suggest import suggestion

_CLASSES: dict[str, type] = {
    "lookup": PromptLookupDrafter,
    "draft": DraftModelProposer,
    "eagle3": EagleDrafter,
    "parallel": EagleDrafter,
    "medusa": MedusaDrafter,
}
NAMES = tuple(_CLASSES)
# The embedded heads, for the model that each was trained for.
_EMBEDDED = {
    "zoo:target": {"eagle3": "eagle3", "parallel": "parallel", "medusa": "medusa"},
}


def split_name(name: str) -> tuple[str, dict[str, float]]:
    """ "eagle3:tokens=4" -> ("eagle3", {"tokens": 4}). Raises ValueError for a value that is no number."""
    parts = name.split(":")
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    sizes: dict[str, float] = {}
    for part in parts[first:]:
        key, _, value = part.partition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ValueError(f"{part!r} in the token drafter {name!r} is not KEY=NUMBER")
        sizes[key] = float(value) if "." in value else int(value)
    return ":".join(parts[:first]), sizes


def check_token_drafter(role: str, name: str, model: str, has_draft: bool) -> None:
    """Find a wrong choice before anything is loaded.

    Args:
        role: what the message calls it.
        model: name of the guided model.
        has_draft: whether there is another model that can guess ("draft").

    Raises:
        ValueError: an unknown name or size, or a name that needs what is not there.
    """
    kind, sizes = split_name(name)
    if kind in NAMES:
        _fit(_CLASSES[kind], sizes, name)
    if kind == "draft" and not has_draft:
        raise ValueError(f"{role} is 'draft', which needs a draft model beside the model that it guides")
    if kind in ("lookup", "draft") or kind in _EMBEDDED.get(model, ()):
        return
    if kind in NAMES:
        raise ValueError(f"{role} is {kind!r}, and no such head is embedded for {model!r}: give the folder of one")
    if not _is_folder_or_id(kind):
        raise ValueError(f"{role} is {kind!r}; {suggestion(kind, [*NAMES, 'or the folder of a head'])}")


def load_token_drafter(name: str, model: LanguageModel, draft: LanguageModel | None = None) -> TokenProposer:
    """The token drafter called `name` for what `model` writes; "draft" lets `draft` guess.

    Raises:
        FileNotFoundError, ValueError: a head that is missing, damaged or of another model, or an unfit size.
    """
    kind, sizes = split_name(name)
    if kind == "lookup":
        return PromptLookupDrafter(**_fit(PromptLookupDrafter, sizes, name))
    if kind == "draft":
        assert draft is not None
        return DraftModelProposer(draft, model, **_fit(DraftModelProposer, sizes, name))
    embedded = _EMBEDDED.get(model.name, {}).get(kind)
    folder = collection_folder() / embedded if embedded else locate(kind, (CONFIG, WEIGHTS), "head")
    architecture = (read_config(folder).get("architectures") or ["nothing"])[0]
    if architecture in medusa.ARCHITECTURES:
        options = _fit(MedusaDrafter, sizes, name)
        return MedusaDrafter(MedusaHead.from_pretrained(folder, model), model, **options)
    if architecture in eagle_head.ARCHITECTURES:
        options = _fit(EagleDrafter, sizes, name)
        return EagleDrafter(eagle_head.EagleHead.from_pretrained(folder, model), model, **options)
    known = ", ".join(eagle_head.ARCHITECTURES + medusa.ARCHITECTURES)
    raise ValueError(f"{folder} is no head for token drafting: its architecture is {architecture}, not one of {known}")


def _fit(kind: Callable[..., object], sizes: Mapping[str, float], name: str) -> Mapping[str, Any]:
    """Raises ValueError for a size that this kind of drafter does not have."""
    known = {k: p for k, p in inspect.signature(kind).parameters.items() if k not in ("head", "model", "draft")}
    for key, value in sizes.items():
        if key not in known:
            raise ValueError(f"{key!r} is no size of the token drafter {name!r}; it has: {', '.join(known)}")
        if isinstance(value, float) and known[key].annotation != "float":
            raise ValueError(f"{key} of the token drafter {name!r} must be a whole number, not {value}")
    return sizes


def _is_folder_or_id(name: str) -> bool:
    if not name:
        return False  # Path("") is the current folder
    return Path(name).expanduser().is_dir() or (name.count("/") == 1 and not name.startswith((".", "/", "~")))
