"""Judge drafts on any server that returns prompt log-probabilities, such as a stock vLLM or SGLang server.

One request holds prompt, answer and draft. The response has the log-probability of each token and the target's first
choices. So one read judges the whole draft, and supplies the target's own token where a draft token is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parse_infer.backends.servers.dialects.dialect import Dialect
from parse_infer.errors import ServerError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading, Scorer, Verdict
from parse_infer.judge.token_logprobs import TokenLogprobs

MAX_READ_TOKENS = 2048
"""Limit of a read. vLLM's V1 model runner holds 6 bytes x vocabulary for each of its tokens, outside its memory
profile: 1.9 GB for 2,048 tokens of a vocabulary of 152,000."""
_NOISE = 0.5  # nats, mean: quantisation stays below, another model of the same family does not
_CLIP = -8.0  # rare tokens differ most, and carry the least information


@dataclass(frozen=True, kw_only=True)
class ServerVerdict(Verdict):
    """The verdict of one read.

    Attributes:
        choices: the target's first choice at each draft token.
    """

    choices: list[int]


class LogprobReads:
    """A judge on log-probabilities of prompts, and what its requests read.

    Args:
        config: of the judge.
        judge: reads log-probabilities; None: only the target's choices are read, for lossless speculation.
        max_tokens: longest read; a longer answer continues without drafts.

    Attributes:
        k: number of first choices that the judge reads.
    """

    def __init__(
        self,
        config: ValidityConfig,
        judge: Scorer | None,
        max_tokens: int = MAX_READ_TOKENS,
    ) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.k, self.judge = 1 if judge is None else judge.k, judge
        self._first: torch.Tensor | None = None

    @property
    def first_tokens(self) -> int:
        """See `Scorer.first_tokens`."""
        return 0 if self.judge is None else self.judge.first_tokens

    def verdict(
        self,
        read: TokenLogprobs,
        cuts: Sequence[int] | None,
        carried: Carried,
        written: Sequence[int],
    ) -> ServerVerdict:
        """Judge a draft.

        Args:
            read: of the draft's tokens.
            cuts: None: judge every token of a block; []: judge nothing.
            carried, written: as in `Verifier.verify`.
        """
        verdict = Verdict(cuts=[], validity=[])
        if cuts != [] and self.judge is not None:
            verdict = self.judge.score(Reading(read.ids.tolist(), cuts, written, read), carried)
        return ServerVerdict(**verdict.facts(), choices=read.top_ids[:, 0].tolist())

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

    def check(self, response: object, dialect: Dialect, url: str) -> None:
        """Raise ValueError if the response to a read of `reference` comes from another model than the adapter's
        target, or lacks log-probabilities that the judge reads. A judge that knows no log-probabilities of the target,
        such as a rule, compares with the first server that was checked."""
        known = self._known["logprobs"]
        try:
            read = dialect.parse(response, self.reference[-len(known) :] if known else self.reference[1:], self.k)
        except ServerError as error:
            raise ServerError(f"the target server {url} cannot judge drafts by log-probabilities: {error}") from error
        if known:
            expected, owner = torch.tensor(known), f"the adapter's target {self.config.target['name']!r}"
        else:
            self._first = read.own if self._first is None else self._first
            expected, owner = self._first, "the first target server did at the start"
        difference = (read.own.clamp_min(_CLIP) - expected.clamp_min(_CLIP)).abs().mean().item()
        if not difference <= _NOISE:
            raise ServerError(
                f"the target server {url} runs another model than {owner}: log-probabilities of a known text differ "
                f"by {difference:.2f} nats on average (limit {_NOISE:g})"
            )
