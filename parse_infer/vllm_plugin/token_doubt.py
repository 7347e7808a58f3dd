"""Token doubt in a paged KV cache: each draft token's evidence against its prefix.

An earlier request may have prefilled the prefix, so the states for token doubt are stored by KV cache slot. Like keys
and values, a row depends only on the tokens up to its own. So all requests that share a block may use its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parse_infer.judge.head import ReducedLMHead, TokenDoubt, surprise


class SlotStates:
    """Token, final-norm hidden state and (once computed) token doubt of each KV cache slot.

    Args:
        tokens: the head's `TokenDoubt`.
        slots: number of KV cache slots.
        hidden: any hidden state, for width, dtype and device.
        logits: the output layer, [T, H] -> [T, V].
        embed: the embedding, [T] -> [T, H].
        part: see `surprise`.
        vocab_size: the target's vocabulary size.
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
        # The last row takes padding, which has no slot.
        self._states = hidden.new_zeros(slots + 1, hidden.shape[-1])
        self._ids = torch.zeros(slots + 1, dtype=torch.int64, device=hidden.device)
        self._doubt = torch.zeros(slots + 1, dtype=torch.float32, device=hidden.device)

    def write(self, slots: Tensor, ids: Tensor, hidden: Tensor) -> None:
        """Store the tokens and states of a step.

        Args:
            slots: int64 [T], KV cache slots of the tokens; below 0: padding.
            ids: int64 [T].
            hidden: [T, H].
        """
        slots = torch.where(slots < 0, len(self._ids) - 1, slots)
        self._states[slots] = hidden
        self._ids[slots] = ids
        self._doubt[slots] = torch.nan  # not known

    def ids(self, slots: Tensor) -> Tensor:
        """Tokens in the slots, int64 in the shape of `slots`."""
        return self._ids[slots]

    def pool_over_prefixes(self, before: Tensor, drafted: Tensor, counts: Tensor) -> Tensor:
        """Doubt [K] of K prefixes with N draft tokens in total; 0 for a prefix without draft tokens.

        Args:
            before: int64 [N], slots of the tokens before the draft tokens.
            drafted: int64 [N], slots of the draft tokens; a value below 0 encodes a token id without slot: -1 - id.
            counts: int64 [K], number of draft tokens per prefix.
        """
        known = torch.where(drafted < 0, torch.nan, self._doubt[drafted.clamp_min(0)])
        # Prefixes share most tokens, and a draft may be judged twice: compute each token once.
        wanted = known.isnan()
        pairs, back = torch.stack([before[wanted], drafted[wanted]]).unique(dim=1, return_inverse=True)
        states, slots = self._states[pairs[0]], pairs[1]
        # Only an invalid request counts probe tokens as draft tokens: clamp them to any token of the target.
        ids = torch.where(slots < 0, -1 - slots, self._ids[slots.clamp_min(0)]).clamp_max(self._vocab_size - 1)
        surprised = surprise(states, ids, self._logits, self._part)
        doubt = self._tokens(states, self._embed(ids), surprised.features)
        self._doubt[slots[slots >= 0]] = doubt[slots >= 0]
        known[wanted] = doubt[back]
        each = torch.full((len(counts), int(counts.max())), -torch.inf, device=known.device)
        each[torch.arange(each.shape[1], device=known.device) < counts[:, None]] = known
        return torch.where(counts > 0, each.logsumexp(-1), 0.0)
