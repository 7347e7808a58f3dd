"""Drafts from plain text of any origin: a cache, an API, a person."""

from __future__ import annotations

from collections.abc import Sequence

from parse_infer.decoding.plan import SourceKind
from parse_infer.drafters.source import Draft
from parse_infer.errors import PromptError
from parse_infer.settings.sampling import Sampling
from parse_infer.text.detokenizer import encode_continuation
from parse_infer.text.prompts import Prompt, open_turn
from parse_infer.text.tokenizer_spec import TokenizerSpec


class TextDrafter:
    """Proposes the given text once per answer, as the beginning of the answer.

    Args:
        text: the draft.
        target: the model whose tokenizer encodes the draft.
        prompt: the prompt; if it ends inside the assistant's turn, the draft continues the turn.
        finished: the text is a whole answer, so the draft ends with the target's end token.
    """

    forwards = 0
    kind = SourceKind()

    def __init__(self, text: str, target: TokenizerSpec, prompt: Prompt, finished: bool = True) -> None:
        if not isinstance(text, str) or not text.strip():
            raise PromptError(f"The draft text is {text!r}; give a non-empty text, or omit it to use the draft model.")
        ids = encode_continuation(target.tokenizer, open_turn(prompt, target.tokenizer), text)
        end = target.end_token if finished else None
        self._draft = Draft(ids) if end is None else Draft([*ids, end], finished=True)

    def check(self, prompt: Prompt) -> None:
        pass

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        pass

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        # An answer with tokens has diverged from the text, so the text cannot continue it.
        return Draft([]) if answer_ids else self._draft
