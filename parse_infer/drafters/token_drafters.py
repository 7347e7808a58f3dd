"""Token drafters by name: "lookup", "draft", or the folder or Hugging Face id of an EAGLE-3 head."""

from __future__ import annotations

import difflib
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from parse_infer.drafters.draft_tokens import ModelTokenDrafter
from parse_infer.drafters.eagle import EagleDrafter, EagleHead
from parse_infer.drafters.lookup import LookupDrafter
from parse_infer.loading import LanguageModel
from parse_infer.speculation import TokenDrafter

NAMES = ("lookup", "draft")


def check_token_drafters(target_drafter: str | None, draft_drafter: str | None, has_draft: bool) -> None:
    """Find a wrong choice before anything is loaded.

    Raises:
        ValueError: an unknown name, or one that needs a draft model where there is none.
    """
    for role, name in (("target_drafter", target_drafter), ("draft_drafter", draft_drafter)):
        if name is not None and name not in NAMES and not _is_folder_or_id(name):
            close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(NAMES)}, or the folder of a head"
            raise ValueError(f"{role} is {name!r}; {hint}")
    if draft_drafter == "draft":
        raise ValueError("draft_drafter is 'draft': the draft model cannot guess its own tokens; use lookup")
    if not has_draft and target_drafter == "draft":
        raise ValueError("target_drafter is 'draft', which needs a draft model, and none was given")
    if not has_draft and draft_drafter is not None:
        raise ValueError(f"draft_drafter is {draft_drafter!r}, but there is no draft model that it could speed up")


def load_token_drafter(
    name: str | None, model: LanguageModel | None, draft: LanguageModel | None
) -> TokenDrafter | None:
    """The token drafter called `name` for what `model` writes; "draft" lets `draft` guess. None without a name.

    Raises:
        FileNotFoundError, ValueError: a head that is missing, damaged or of another model.
    """
    if name is None or model is None:
        return None
    if name == "lookup":
        return LookupDrafter()
    if name == "draft":
        assert draft is not None
        return ModelTokenDrafter(draft, model)
    return EagleDrafter(EagleHead.from_pretrained(_locate(name), model), model)


def _is_folder_or_id(name: str) -> bool:
    return Path(name).expanduser().is_dir() or (name.count("/") == 1 and not name.startswith((".", "/", "~")))


def _locate(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model.safetensors"]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{name} is neither a local folder nor available on the Hugging Face Hub ({reason})"
        ) from error
