"""The zero-shot judge over any server with log-probabilities: one prompt per cut, which ends with the question."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from parse_infer.errors import ServerError
from parse_infer.judge.zero_shot import QUESTION, WORDS, question_probe, verbalizer_ids

TOP = 20  # vLLM's limit; other servers may have less


class ZeroShotRequests:
    """Requests and readings of the judge (`ZeroShotJudge`).

    Args:
        tokenizer, end_ids: of the target.
        top: number of log-probabilities to request.

    Raises:
        ValueError: as `ZeroShotJudge` does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], top: int = TOP) -> None:
        self._probe, self._end_ids = question_probe(tokenizer, QUESTION), end_ids
        self._answers = verbalizer_ids(tokenizer, self._probe.text, WORDS)
        self._texts = {cast("str", tokenizer.decode([id])): id for id in self._answers}
        self._top = top

    @property
    def tokens_per_cut(self) -> int:
        """Number of tokens of the question."""
        return len(self._probe.ids)

    def request(self, context: Sequence[int], draft: Sequence[int], cuts: Sequence[int]) -> dict[str, Any]:
        """Body of a `POST /v1/completions` about the prefixes of a draft."""
        shown = [self._probe.shown(draft, cut, self._end_ids) for cut in cuts]
        prompts = [[*context, *draft[:n], *self._probe.ids] for n in shown]
        tokens = {"max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True}
        return {"prompt": prompts, "logprobs": self._top, **tokens}

    def validities(self, response: Any, n: int) -> list[float]:
        """Read the validity of each of n prefixes. Raise ValueError for an incomplete response."""
        try:
            choices = sorted(response["choices"], key=lambda choice: choice["index"])
            top = [self._by_id(choice["logprobs"]["top_logprobs"][0]) for choice in choices]
            if len(top) != n:
                raise ServerError(f"{len(top)} choices")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"the server's answer lacks the log-probabilities of {n} tokens ({type(error).__name__})"
            ) from error
        return [self._validity(each) for each in top]

    def _by_id(self, top: Mapping[str, float]) -> dict[int, float]:
        """Map token texts to ids. Unknown texts get ids below 0, since their values still bound those of others."""
        ids = {text: int(text.removeprefix("token_id:")) for text in top if text.startswith("token_id:")}
        ids = ids or self._texts  # a server without `return_tokens_as_token_ids`
        return {ids.get(text, -1 - i): float(value) for i, (text, value) in enumerate(top.items())}

    def _validity(self, top: Mapping[int, float]) -> float:
        yes, no = self._answers
        if yes not in top and no not in top:
            raise ServerError(f"the server's log-probabilities hold neither answer ({yes} or {no})")
        lowest = min(top.values())  # upper bound for tokens that are not listed
        logit = top.get(yes, lowest) - top.get(no, lowest)
        return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))
