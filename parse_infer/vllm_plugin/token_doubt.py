"""Token doubt in a paged cache: what each draft token says against its prefix, whichever request read the token.

The prefix of a request may have been read by another one, long before, so the states that token doubt needs are kept
in the cache's own order: one row for each of its slots. Like keys and values a row depends on nothing but the tokens
up to its own, so whatever shares a block, or finds it in the cache, may use its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parse_infer.judge.head import ReducedLMHead, TokenDoubt, surprise


class SlotStates:
    """For each slot of the cache: the token in it, the final-norm state behind it, and the doubt about it once known.

    Args:
        tokens: the head's `TokenDoubt`.
        slots: how many the cache has.
        hidden: any state, for width, number type and device.
        logits: the output layer, [T, H] -> [T, V].
        embed: the embedding, [T] -> [T, H].
        part: see `surprise`.
        vocab_size: of the target.
    """

    def __init__(
        self,
        tokens: TokenDoubt,
        slots: int,
        hidden: Tensor,
        logits: Callable[[Tensor], Tensor],
        embed: Callable[[Tensor], Tensor],
        part: ReducedLMHead | None,
        vocab_size: int,
    ) -> None:
        self._tokens, self._logits, self._embed, self._part = tokens, logits, embed, part
        self._vocab_size = vocab_size
        # The last row takes what has no slot: padding.
        self._states = hidden.new_zeros(slots + 1, hidden.shape[-1])
        self._ids = torch.zeros(slots + 1, dtype=torch.int64, device=hidden.device)
        self._doubt = torch.zeros(slots + 1, dtype=torch.float32, device=hidden.device)

    def write(self, slots: Tensor, ids: Tensor, hidden: Tensor) -> None:
        """Note what a step has read.

        Args:
            slots: int64 [T], where its tokens' keys and values went; below 0: nowhere.
            ids: int64 [T].
            hidden: [T, H].
        """
        slots = torch.where(slots < 0, len(self._ids) - 1, slots)
        self._states[slots] = hidden
        self._ids[slots] = ids
        self._doubt[slots] = torch.nan  # not known

    def ids(self, slots: Tensor) -> Tensor:
        """int64, as `slots`: the tokens there."""
        return self._ids[slots]

    def pool_over_prefixes(self, before: Tensor, drafted: Tensor, counts: Tensor) -> Tensor:
        """Doubt [K] about K prefixes that hold N draft tokens in all; 0 for one without any.

        Args:
            before: int64 [N], the slots of the tokens before the draft tokens.
            drafted: int64 [N], the draft tokens' slots; one below 0 has no slot, but is the id of a token: -1 - id.
            counts: int64 [K], how many of the N belong to each prefix.
        """
        known = torch.where(drafted < 0, torch.nan, self._doubt[drafted.clamp_min(0)])
        # Prefixes of one draft share most of their tokens, and a draft may be asked about again: once each.
        wanted = known.isnan()
        pairs, back = torch.stack([before[wanted], drafted[wanted]]).unique(dim=1, return_inverse=True)
        states, slots = self._states[pairs[0]], pairs[1]
        # Only a made-up request counts tokens of a probe as the draft's: any token of the target's will do for them.
        ids = torch.where(slots < 0, -1 - slots, self._ids[slots.clamp_min(0)]).clamp_max(self._vocab_size - 1)
        surprised = surprise(states, ids, self._logits, self._part)
        doubt = self._tokens(states, self._embed(ids), surprised.features)
        self._doubt[slots[slots >= 0]] = doubt[slots >= 0]
        known[wanted] = doubt[back]
        each = torch.full((len(counts), int(counts.max())), -torch.inf, device=known.device)
        each[torch.arange(each.shape[1], device=known.device) < counts[:, None]] = known
        return torch.where(counts > 0, each.logsumexp(-1), 0.0)
