"""Drafters: whatever proposes a draft. The engine never asks which one it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parse_infer.models.prompts import Prompt
from parse_infer.models.sampling import Sampling


@dataclass(frozen=True)
class Draft:
    """A proposed continuation of the answer.

    `ids` are target tokens whatever the drafter works with; `finished` says that the draft ends the answer, and then
    the last id is the target's end token. An empty draft means that the drafter has nothing (more) to propose.
    """

    ids: list[int]
    finished: bool = False


class DraftSource(Protocol):
    """Proposes drafts for one answer at a time."""

    @property
    def forwards(self) -> int:
        """Model forwards so far, over all answers (0 for a drafter without a model)."""
        ...

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        """Begin a new answer to `prompt`. Cheap, and no model runs: ValueError for a prompt that it cannot read.

        The engine calls this twice for a request, with a `RenderedPrompt`.

        A draft may end at the first of the `stop` strings; the engine cuts it there in any case.
        """
        ...

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        """Continue the answer so far (`answer_ids`, target tokens, without the prompt) by about `max_new_tokens`
        tokens at most; the engine cuts what is too much."""
        ...
