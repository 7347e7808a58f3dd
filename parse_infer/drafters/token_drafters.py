"""Token drafters by name."""

from __future__ import annotations

import difflib

from parse_infer.drafters.draft_tokens import ModelTokenDrafter
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
        if name is not None and name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            raise ValueError(
                f"{role} is {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(NAMES)}")
            )
    if draft_drafter == "draft":
        raise ValueError("draft_drafter is 'draft': the draft model cannot guess its own tokens; use lookup")
    if not has_draft and target_drafter == "draft":
        raise ValueError("target_drafter is 'draft', which needs a draft model, and none was given")
    if not has_draft and draft_drafter is not None:
        raise ValueError(f"draft_drafter is {draft_drafter!r}, but there is no draft model that it could speed up")


def load_token_drafter(
    name: str | None, model: LanguageModel | None, draft: LanguageModel | None
) -> TokenDrafter | None:
    """The token drafter called `name` for what `model` writes; "draft" lets `draft` guess. None without a name."""
    if name is None or model is None:
        return None
    if name == "lookup":
        return LookupDrafter()
    assert draft is not None
    return ModelTokenDrafter(draft, model)
