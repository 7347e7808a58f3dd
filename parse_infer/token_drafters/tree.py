"""Token trees: build them from a head's logits and mask them for one forward."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from parse_infer.models.decoder import Trailing
from parse_infer.models.token_sampling import distribution, draw
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.proposer import ROOT, TokenTree


def branches(tokens: Sequence[int], parents: Sequence[int], n_keys: int, device: torch.device) -> Trailing:
    """Build the trailing tokens of a tree after `n_keys` tokens of context, for `Decoder.look_ahead`."""
    n = len(tokens)
    depth, sees = [0] * n, torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent != ROOT:
            depth[i] = depth[parent] + 1
            sees[i] |= sees[parent]
    steps, sees = torch.tensor(depth, device=device), sees.to(device)
    return Trailing(tokens, n_keys + steps, lambda window: tree_mask(sees, steps, n_keys, window))


def tree_mask(sees: Tensor, depth: Tensor, n_keys: int, window: int | None = None) -> Tensor:
    """Return the attention mask of a tree of n tokens: all keys before the tree, ancestors and the token itself.

    Args:
        sees: bool [n, n], sees[i, j]: token j is token i or an ancestor of it.
        depth: int64 [n], 0 for a child of the root; token i is at position n_keys + depth[i].
        n_keys: keys before the tree.
        window: sliding window of the layer, or None.

    Returns:
        bool [1, 1, n, n_keys + n].
    """
    before = torch.ones(len(depth), n_keys, dtype=torch.bool, device=sees.device)
    if window is not None:
        before = n_keys + depth[:, None] - torch.arange(n_keys, device=sees.device) < window
        sees = sees & (depth[:, None] - depth < window)
    return torch.cat([before, sees], dim=-1)[None, None]


def chain(
    logits: Tensor, token_ids: Tensor, vocab_size: int, sampling: Sampling, generator: torch.Generator | None
) -> TokenTree:
    """Build a chain with one token per row of logits [n, V']: the most likely token, or one drawn with `sampling`.

    Args:
        token_ids: int64 [V'], the model's token id for each token of the head.
        vocab_size: V of the model.
    """
    if sampling.greedy:
        return TokenTree.chain(token_ids[logits.argmax(-1)].tolist())
    q = distribution(logits, sampling)
    tokens = token_ids[draw(q, generator)]
    return TokenTree.chain(tokens.tolist(), q.new_zeros(len(q), vocab_size).index_copy_(1, token_ids, q))


def likeliest_tree(logits: Tensor, token_ids: Tensor, top_k: int, tree_tokens: int) -> TokenTree:
    """Build the tree of the `tree_tokens` most likely paths, where row d of logits [n, V'] predicts depth d alone.

    Best-first search visits a node before its children and its less likely siblings. The tree is deterministic, so
    `accept_tree` stays exact for sampling too.
    """
    likely = logits.float().log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    costs, ids = (-likely.values).tolist(), token_ids[likely.indices].tolist()
    tokens: list[int] = []
    parents: list[int] = []
    waiting = [(costs[0][0], 0, 0, ROOT, 0.0)]  # cost of the path, depth, rank among siblings, parent, cost above
    while waiting and len(tokens) < tree_tokens:
        cost, depth, rank, parent, above = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        if depth + 1 < len(costs):
            heapq.heappush(waiting, (cost + costs[depth + 1][0], depth + 1, 0, node, cost))
        if rank + 1 < len(costs[depth]):
            heapq.heappush(waiting, (above + costs[depth][rank + 1], depth, rank + 1, parent, above))
    return TokenTree(tokens, parents)
