"""Token ids beyond a target's vocabulary that stand for the tokens of a probe.

A server must tell a probe's tokens from the same tokens in a text, because the adapter applies to the former alone. So
they have ids of their own. With a vocabulary of V tokens, a probe of P and E end tokens:

    V … V+P-2                  the probe's tokens but the last
    V+P-1 + n * (1+E) + e      the last one (with P = 0: a token that is there to be read out only)

The last id carries what the server cannot see in a prompt and token doubt needs: that the n tokens before the probe
are the draft's, and (e > 0) that end token e-1 follows them, which is not in the prompt because the probe closes the
turn itself.

Without a probe nothing but that id is read, so a prompt may ask about several prefixes of a draft: it holds the
longest, and ends with an id for each, the shortest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parse_infer.judge.adapter import ValidityConfig

TOGETHER = 128  # prefixes in one prompt, at most


@dataclass(frozen=True)
class ProbeIds:
    """The ids of one adapter's probe.

    Attributes:
        vocab_size: V.
        probe: the P tokens that the ids stand for.
        end_ids: the E end tokens that a prefix may have beyond its prompt.
        counts: whether the last id says how many tokens are the draft's; else n is 0.
    """

    vocab_size: int
    probe: tuple[int, ...]
    end_ids: tuple[int, ...] = ()
    counts: bool = False

    @classmethod
    def of(cls, config: ValidityConfig, end_ids: Sequence[int]) -> ProbeIds:
        """
        Args:
            end_ids: the target's end tokens; server and client must agree on their order.
        """
        counts = config.token_rank > 0
        hidden_ends = tuple(end_ids) if counts and config.closes_turn else ()
        return cls(config.target["vocab_size"], config.probe_ids, hidden_ends, counts)

    @property
    def together(self) -> int:
        """How many prefixes one prompt may ask about."""
        return 1 if self.probe else min(TOGETHER, (self.vocab_size - len(self.end_ids)) // 2)

    @property
    def log_probabilities(self) -> int:
        """How many an answer may have to hold: two for each of those prefixes."""
        return 2 * self.together

    @property
    def closing(self) -> int:
        """The first of the ids that a prompt ends with."""
        return self.vocab_size + max(len(self.probe) - 1, 0)

    def size(self, max_draft: int) -> int:
        """How many ids there are with drafts of up to `max_draft` tokens."""
        return self.closing - self.vocab_size + (max_draft * self.counts + 1) * (1 + len(self.end_ids))

    def suffix(self, draft_tokens: int, end: int | None = None) -> list[int]:
        """What a prompt ends with to ask for a validity.

        Args:
            draft_tokens: how many of the tokens before it are the draft's.
            end: the end token that follows them and is not in the prompt.
        """
        n = draft_tokens if self.counts else 0
        e = self.end_ids.index(end) + 1 if end is not None and self.end_ids else 0
        return [*range(self.vocab_size, self.closing), self.closing + n * (1 + len(self.end_ids)) + e]


def answer_ids(end_ids: Sequence[int], prefixes: int = 1) -> list[tuple[int, int]]:
    """For each prefix in a prompt the two ids whose log-probabilities carry its logit: the lowest ones that do not end
    an answer."""
    ids = [i for i in range(2 * prefixes + len(end_ids)) if i not in end_ids]
    return list(zip(ids[: 2 * prefixes : 2], ids[1 : 2 * prefixes : 2], strict=True))
