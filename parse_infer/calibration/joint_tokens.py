"""Tokens in joint decoding: the draft model's and the target's, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft, TokenStream
from parse_infer.drafters.model_drafter import share_tokens, with_template
from parse_infer.errors import ModelError
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import token_map
from parse_infer.text.prompts import Prompt


class DraftTokens:
    """Translates single tokens as the engine's blocks do (`TokenStream`).

    Raises:
        ValueError: tokens of the draft model are not tokens of the target.
    """

    def __init__(self, draft: LanguageModel, target: LanguageModel) -> None:
        self._draft, self._target = with_template(draft, target), target
        self._shared = share_tokens(draft, target)
        self._map = None if self._shared else token_map(draft.tokenizer, target.tokenizer)
        if not self._shared and self._map is None:
            raise ModelError("draft model and target have different tokens")
        self._proposals: dict[int, int | None] = {}
        self._translation = self._of("any prompt")

    def prompt(self, prompt: Prompt) -> list[int]:
        """The prompt in the draft model's tokens."""
        return self._of(prompt).prompt_ids

    def proposal(self, token: int) -> int | None:
        """The target's token for one of the draft model; None if there is none."""
        if token not in self._proposals:
            block = TokenStream(self._translation, [], 1, self._map)
            block.add([token])
            self._proposals[token] = next(iter(block.block().ids), None)
        return self._proposals[token]

    def of(self, token: int) -> Sequence[int]:
        """The draft model's tokens for one of the target."""
        return (token,) if self._map is None else self._map.from_target(token)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether no draft follows an answer that goes on with these tokens of the draft model."""
        ended = bool(tokens) and tokens[-1] in self._translation.end_ids
        return ended or max(tokens, default=0) >= self._draft.n_embeddings

    def _of(self, prompt: Prompt) -> CrossTokenizerDraft:
        return CrossTokenizerDraft(self._draft, self._target, self._shared, prompt)
