"""Token ids beyond a target's vocabulary that mark the tokens of a probe.

A server must distinguish a probe's tokens from the same tokens in a text, because the adapter applies only to probes.
So probes have their own ids. With a vocabulary of V tokens, a probe of P tokens and E end tokens:

    V … V+P-2                  the probe's tokens except the last
    V+P-1 + n * (1+E) + e      the last token (with P = 0: a token only for the read-out)

The last id carries data for token doubt that the prompt does not show: the n tokens before the probe are draft tokens.
If e > 0, end token e-1 follows them; the prompt omits it because the probe itself closes the turn.

Without a probe (P = 0), one prompt may judge several prefixes of a draft. It holds the longest prefix and ends with
one id per prefix, the shortest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parse_infer.judge.adapter import ValidityConfig

TOGETHER = 128  # largest number of prefixes in one prompt


@dataclass(frozen=True)
class ProbeIds:
    """The ids of one adapter's probe.

    Attributes:
        vocab_size: V.
        probe: the P probe tokens.
        end_ids: the E end tokens that a prompt may omit.
        counts: whether the last id carries the number of draft tokens; else n is 0.
    """

    vocab_size: int
    probe: tuple[int, ...]
    end_ids: tuple[int, ...] = ()
    counts: bool = False

    @classmethod
    def of(cls, config: ValidityConfig, end_ids: Sequence[int]) -> ProbeIds:
        """The ids of an adapter's probe.

        Args:
            end_ids: the target's end tokens; server and client must use the same order.
        """
        counts = config.token_rank > 0
        hidden_ends = tuple(end_ids) if counts and config.closes_turn else ()
        return cls(config.target["vocab_size"], config.probe_ids, hidden_ends, counts)

    @property
    def together(self) -> int:
        """Largest number of prefixes in one prompt."""
        return 1 if self.probe else min(TOGETHER, (self.vocab_size - len(self.end_ids)) // 2)

    @property
    def log_probabilities(self) -> int:
        """Largest number of log-probabilities in an answer: two per prefix."""
        return 2 * self.together

    @property
    def closing(self) -> int:
        """The lowest id that can end a prompt."""
        return self.vocab_size + max(len(self.probe) - 1, 0)

    def size(self, max_draft: int) -> int:
        """Number of ids for drafts of up to `max_draft` tokens."""
        return self.closing - self.vocab_size + (max_draft * self.counts + 1) * (1 + len(self.end_ids))

    def suffix(self, draft_tokens: int, end: int | None = None) -> list[int]:
        """Ids at the end of a prompt that requests a validity.

        Args:
            draft_tokens: number of draft tokens before the suffix.
            end: the omitted end token of the draft.
        """
        n = draft_tokens if self.counts else 0
        e = self.end_ids.index(end) + 1 if end is not None and self.end_ids else 0
        return [*range(self.vocab_size, self.closing), self.closing + n * (1 + len(self.end_ids)) + e]


def answer_ids(end_ids: Sequence[int], prefixes: int = 1) -> list[tuple[int, int]]:
    """The two ids per prefix whose log-probabilities carry its logit: the lowest ids that are not end tokens."""
    ids = [i for i in range(2 * prefixes + len(end_ids)) if i not in end_ids]
    return list(zip(ids[: 2 * prefixes : 2], ids[1 : 2 * prefixes : 2], strict=True))
