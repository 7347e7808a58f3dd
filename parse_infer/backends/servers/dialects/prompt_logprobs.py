"""Log-probabilities of the tokens of a prompt, as vLLM lists them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.errors import ServerError
from parse_infer.judge.token_logprobs import TokenLogprobs


def read_prompt_logprobs(entries: object, ids: Sequence[int], k: int) -> TokenLogprobs:
    """Return the log-probabilities of the last tokens of a prompt, `ids`.

    Args:
        entries: one for each token of the prompt or of its end: `{token id: {"logprob": …}}` of the token and its
            position's first choices. The first token of the list has none.

    Raises:
        ServerError: entries are missing, belong to other tokens, have fewer than k choices, or are raw logits.
    """
    if not isinstance(entries, list):
        raise ServerError(
            "its response has no prompt_logprobs: use a server that returns them, such as vLLM without "
            "--max-logprobs 0"
        )
    if len(entries) < len(ids) + 1:
        raise ServerError(f"its response has {len(entries)} prompt_logprobs, and the prompt more tokens")
    own: list[float] = []
    top_ids: list[list[int]] = []
    top: list[list[float]] = []
    for id, entry in zip(ids, entries[-len(ids) :] if ids else [], strict=True):
        try:
            # Of equal choices the lowest id comes first.
            ranked = sorted((-float(each["logprob"]), int(token)) for token, each in entry.items())
            own.append(float(entry[str(id)]["logprob"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"its prompt_logprobs do not belong to the tokens that were sent ({id})") from error
        if len(ranked) < k:
            raise ServerError(f"it returns {len(ranked)} of {k} log-probabilities per token: raise --max-logprobs")
        top_ids.append([token for _, token in ranked[:k]])
        top.append([-value for value, _ in ranked[:k]])
    read = TokenLogprobs(
        torch.tensor(list(ids), dtype=torch.long),
        torch.tensor(own),
        torch.tensor(top_ids, dtype=torch.long).reshape(-1, k),
        torch.tensor(top).reshape(-1, k),
    )
    if len(ids) and not read.top.exp().sum(-1).max() <= 1.01:
        raise ServerError("its prompt_logprobs are no log-probabilities: start it with --logprobs-mode raw_logprobs")
    return read
