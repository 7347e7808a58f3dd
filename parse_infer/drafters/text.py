"""A draft that is plain text from anywhere: a cache, an API, a person."""

from __future__ import annotations

from collections.abc import Sequence

from parse_infer.drafters.source import Draft
from parse_infer.models.detokenizer import encode_continuation
from parse_infer.models.prompts import Prompt, open_turn
from parse_infer.models.sampling import Sampling
from parse_infer.models.tokenizer_spec import TokenizerSpec


class TextDrafter:
    """Proposes the given text once per answer, as the beginning of the answer; nothing after that.

    Args:
        text: the draft.
        target: whose tokens the draft becomes.
        prompt: what it answers; if that ends inside the assistant's turn, the draft continues it.
        finished: the text is a whole answer, so that it ends with the target's end token.
    """

    forwards = 0

    def __init__(self, text: str, target: TokenizerSpec, prompt: Prompt, finished: bool = True) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"The draft text is {text!r}; give some text, or none to let the draft model write.")
        ids = encode_continuation(target.tokenizer, open_turn(prompt), text)
        end = target.end_token if finished else None
        self._draft = Draft(ids) if end is None else Draft([*ids, end], finished=True)

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        pass

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        # Behind an answer that has begun the target has taken another way, which this text knows nothing of.
        return Draft([]) if answer_ids else self._draft
