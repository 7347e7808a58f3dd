"""Judge drafts on any server that returns prompt log-probabilities, such as a stock vLLM or SGLang server.

One request holds prompt, answer and draft. The response has the log-probability of each token and the target's first
choices. So one read judges the whole draft, and supplies the target's own token where a draft token is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parse_infer.errors import ServerError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import TokenScores
from parse_infer.judge.min_p import TokenScorer
from parse_infer.judge.token_logprobs import TokenLogprobs

MAX_READ_TOKENS = 2048
"""Limit of a read. vLLM's V1 model runner holds 6 bytes x vocabulary for each of its tokens, outside its memory
profile: 1.9 GB for 2,048 tokens of a vocabulary of 152,000."""
GENERATE = "/inference/v1/generate"
"""Path of reads that use the prefix cache: `vllm serve --enable-scale-out --enable-prompt-tokens-details`."""
SGLANG_GENERATE = "/generate"
"""Path of reads on SGLang, which use its prefix cache."""
_NOISE = 0.5  # nats, mean: quantisation stays below, another model of the same family does not
_CLIP = -8.0  # rare tokens differ most, and carry the least information


@dataclass(frozen=True)
class LogprobScores:
    """The verdict of one read.

    Attributes:
        cuts: one after each token in a block, else the segmenter's.
        choices: the target's first choice at each draft token.
        scores: of each draft token in a block; None for a whole draft.
        unusual: see `Verification`.
    """

    cuts: list[int]
    validity: list[float]
    choices: list[int]
    scores: TokenScores | None
    unusual: bool

    @property
    def by_token(self) -> bool:
        return self.scores is not None


class LogprobReads:
    """Requests and readings of one judge.

    Args:
        config: of the judge.
        judge: scores the tokens.
        max_tokens: longest read; a longer answer continues without drafts.

    Attributes:
        k: number of first choices that the judge reads.
    """

    def __init__(
        self,
        config: ValidityConfig,
        judge: TokenScorer,
        max_tokens: int = MAX_READ_TOKENS,
    ) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.k, self._judge = judge.k, judge

    @property
    def first_tokens(self) -> int:
        """See `LogprobJudge.first_tokens`."""
        return self._judge.first_tokens

    def request(self, ids: Sequence[int]) -> dict[str, Any]:
        """Body of a `POST /v1/completions` that reads `ids`."""
        return {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.k}

    def cached_request(self, ids: Sequence[int]) -> dict[str, Any]:
        """Body of a `POST` to `GENERATE` that reads what the server's prefix cache lacks of `ids`."""
        # The entries of cached tokens are uninitialised memory, which vLLM's tokenizer could not decode.
        settings = {"skip_reading_prefix_cache": False, "detokenize": False}
        body = self.request(ids)
        return {"token_ids": body.pop("prompt"), "sampling_params": body | settings}

    def sglang_request(self, ids: Sequence[int], start: int) -> dict[str, Any]:
        """Body of a `POST` to `SGLANG_GENERATE` that reads the tokens after `ids[start]`."""
        settings = {"max_new_tokens": 1, "temperature": 0}
        reads = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": self.k}
        return {"input_ids": list(ids), "sampling_params": settings, **reads}

    def scores(
        self,
        response: Any,
        draft: Sequence[int],
        cuts: Sequence[int] | None,
        carried: Carried,
        written: Sequence[int],
    ) -> LogprobScores:
        """Judge a draft. Raise ValueError for an unreadable response.

        Args:
            response: to a request that ends with `draft`.
            cuts: None: judge every token of a block.
            carried, written: as in `LogprobJudge.score`.
        """
        found = read_response(response, draft, self.k)
        scores = self._judge.score(found, carried, written)
        validity = self.config.validity(scores.logits).tolist()
        choices, unusual = found.top_ids[:, 0].tolist(), scores.usual is False and cuts != []
        if cuts is None:
            return LogprobScores([*range(1, len(draft) + 1)], validity, choices, scores, unusual)
        each = [validity[cut - 1] if cut else 1.0 for cut in cuts]
        return LogprobScores(list(cuts), each, choices, None, unusual)

    @property
    def reference(self) -> list[int]:
        """Tokens of a known text, by which a server is recognised."""
        ids: list[int] = self._known["ids"]
        return ids

    @property
    def _known(self) -> dict[str, Any]:
        assert self.config.logprobs is not None
        known: dict[str, Any] = self.config.logprobs["reference"]
        return known

    def check(self, response: Any, url: str) -> None:
        """Raise ValueError if the response to `reference` comes from another model than the adapter's target, or from
        a server that does not return what the judge reads."""
        try:
            known = self._known["logprobs"]
            found = read_response(response, self.reference[-max(len(known), 1) :], self.k)
        except ServerError as error:
            raise ServerError(f"the target server {url} cannot judge drafts by log-probabilities: {error}") from error
        if not known:  # the judge of another target
            return
        expected = torch.tensor(known)
        difference = (found.own.clamp_min(_CLIP) - expected.clamp_min(_CLIP)).abs().mean().item()
        if not difference <= _NOISE:
            raise ServerError(
                f"the target server {url} runs another model than the adapter's target "
                f"{self.config.target['name']!r}: log-probabilities of a known text differ by {difference:.2f} "
                f"nats on average (limit {_NOISE:g})"
            )


def cached_tokens(response: Any) -> int | None:
    """Number of prompt tokens from the server's prefix cache, whose entries hold nothing; None: it does not say."""
    try:
        holder = response["meta_info"] if "meta_info" in response else response["usage"]["prompt_tokens_details"]
        return int(holder["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return None


def read_response(response: Any, ids: Sequence[int], k: int) -> TokenLogprobs:
    """Read the log-probabilities of the last tokens of a prompt, `ids`, from a server's JSON response.

    Raises:
        ValueError: they are missing, belong to other tokens, have fewer than k choices, or are raw logits.
    """
    try:
        if "meta_info" in response:
            entries = _sglang_entries(response["meta_info"], ids)
        else:
            holder = response if "prompt_logprobs" in response else response["choices"][0]
            entries = holder["prompt_logprobs"]
    except (KeyError, IndexError, TypeError, ValueError):
        entries = None
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
            found = sorted((-float(e["logprob"]), int(token)) for token, e in entry.items())  # of equals the lowest id
            own.append(float(entry[str(id)]["logprob"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"its prompt_logprobs do not belong to the tokens that were sent ({id})") from error
        if len(found) < k:
            raise ServerError(f"it returns {len(found)} of {k} log-probabilities per token: raise --max-logprobs")
        top_ids.append([token for _, token in found[:k]])
        top.append([-value for value, _ in found[:k]])
    read = TokenLogprobs(
        torch.tensor(list(ids), dtype=torch.long),
        torch.tensor(own),
        torch.tensor(top_ids, dtype=torch.long).reshape(-1, k),
        torch.tensor(top).reshape(-1, k),
    )
    if len(ids) and not read.top.exp().sum(-1).max() <= 1.01:
        raise ServerError("its prompt_logprobs are no log-probabilities: start it with --logprobs-mode raw_logprobs")
    return read


def _sglang_entries(info: Any, ids: Sequence[int]) -> list[Any]:
    """`prompt_logprobs`, as vLLM has them, from SGLang's `meta_info`; too few if that lacks some of `ids`."""
    own: list[Any] = info["input_token_logprobs"]
    top: list[Any] = info["input_top_logprobs"]
    if min(len(own), len(top)) <= len(ids):
        return own if len(own) < len(top) else top
    entries: list[Any] = [None]
    for id, (value, found, *_), first in zip(ids, own[-len(ids) :], top[-len(ids) :], strict=False):
        listed = {str(token): {"logprob": logprob} for logprob, token, *_ in first}
        # The vocabulary's last token is reported as 0.
        entries.append(listed | {str(id): {"logprob": value}} if found in (id, 0) else {})
    return entries
