"""Token-level speculation: lossless decoding of several tokens per forward of one model.

A token drafter proposes a tree of next tokens. One forward of the model reads the whole tree, and `accept_tree` keeps
the path that the model itself would have chosen. Greedy decoding yields the same tokens, up to rounding. Sampling
yields the same distribution. Chains use block verification (arXiv 2403.10444), which accepts at least as many tokens
as the token-wise rule of Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from parse_infer.models.decoder import Decoder
from parse_infer.models.token_sampling import distribution, draw, random_generator, without
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.proposer import ROOT, TokenProposer, TokenTree
from parse_infer.token_drafters.tree import branches


def speculative_decode(
    decoder: Decoder,
    drafter: TokenProposer | None,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    banned_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield new tokens as `decoder.decode` does, none of `banned_ids`, with a token drafter after fewer forwards.

    The decoder's context may be ahead of the yielded tokens: call `seek` before any other use of the decoder.

    Raises:
        ValueError: the context is empty.
        RuntimeError: the context was changed while this iterator was still in use.
    """
    sampling = sampling or Sampling()
    if drafter is None:
        return decoder.decode(max_new_tokens, sampling, generator, banned_ids)
    return _decode_trees(decoder, drafter, max_new_tokens, sampling, generator, banned_ids)


def _decode_trees(
    decoder: Decoder,
    drafter: TokenProposer,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    banned_ids: Collection[int],
) -> Iterator[int]:
    if generator is None:
        generator = random_generator(sampling, decoder.device)
    remaining, banned = max_new_tokens, decoder.token_index(banned_ids)
    decoder.reserve(len(decoder.ids), remaining)
    # The first token needs no speculation if its logits are known, as after a verification pass.
    logits = decoder.next_logits()[None] if remaining > 0 and decoder.knows_next else None
    while remaining > 0:
        tree = TokenTree((), ())
        if logits is None:
            tree = drafter.propose(decoder.ids, remaining - 1, sampling, generator)
            begin, n_read = time.perf_counter(), len(decoder.ids) - decoder.cached + len(tree.tokens)
            logits = decoder.logits(read_tree(decoder, tree))
        path, last = accept_tree(without(logits, banned), tree, sampling, generator)
        if tree.on_read is not None:
            tree.on_read(len(path), time.perf_counter() - begin, n_read)
        logits = None
        if tree.tokens:
            decoder.keep(path)
        new = [*(tree.tokens[node] for node in path), last]
        decoder.append(last)
        edits = decoder.edits
        for token in new[:remaining]:
            yield token
            if decoder.edits != edits:
                raise RuntimeError("the context was changed during speculative_decode(): call it again after seek()")
            if token in decoder.eos_ids:
                return
        remaining -= len(new)


def read_tree(decoder: Decoder, tree: TokenTree) -> Tensor:
    """Run one forward over the tree: [1 + n, H], the state after the context and after every proposed token."""
    if tree.is_chain:
        return decoder.look_ahead(tree.tokens)
    return decoder.look_ahead(branches(tree.tokens, tree.parents, len(decoder.ids), decoder.device))


@torch.inference_mode()
def accept_tree(
    logits: Tensor, tree: TokenTree, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """Return the accepted tokens as a path from the root, and the model's own token after this path.

    Args:
        logits: [1 + n, V]: the model's logits after the context, and after every proposed token.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    at = ROOT
    if sampling.greedy:
        choice = logits.argmax(-1).tolist()  # the only device synchronisation per tree
        while True:
            token = choice[at + 1]
            at = next((node for node in children.get(at, ()) if tree.tokens[node] == token), ROOT)
            if at == ROOT:
                return path, token
            path.append(at)
    if tree.drawn_from is not None:
        return _accept_block(distribution(logits, sampling), tree.tokens, tree.drawn_from, generator)
    while True:  # deterministic proposals: draw from the model, then look for the token
        token = int(draw(distribution(logits[at + 1], sampling), generator))
        at = next((node for node in children.get(at, ()) if tree.tokens[node] == token), ROOT)
        if at == ROOT:
            return path, token
        path.append(at)


def _accept_block(
    p: Tensor, tokens: Sequence[int], q: Tensor, generator: torch.Generator | None
) -> tuple[list[int], int]:
    """Block verification of a chain drawn from q [n, V] under p [1 + n, V], which decides on the chain as a whole.

    A token that was too likely under q does not end the chain. It lowers the weight of all later tokens.
    """
    n = len(tokens)
    steps, chosen = torch.arange(n, device=p.device), torch.tensor(list(tokens), device=p.device)
    weights = [1.0]
    for ratio in (p[steps, chosen] / q[steps, chosen]).tolist():
        weights.append(min(weights[-1] * ratio, 1.0))
    weight = torch.tensor(weights, device=p.device)[:, None]
    surplus = (weight[:-1] * p[:-1] - q).clamp_min(0).sum(-1).tolist()  # mass of p beyond q after i tokens
    kept = 0
    for i, chance in enumerate(torch.rand(n, device=p.device, generator=generator).tolist(), 1):
        left = surplus[i] if i < n else 0.0
        # Without surplus and with weight 1, p equals q, and a later token decides.
        accept = weights[i] if i == n else left / (left + 1 - weights[i]) if left + 1 > weights[i] else 1.0
        if chance < accept:
            kept = i
    rest = p[n] if kept == n else (weights[kept] * p[kept] - q[kept]).clamp_min(0)
    return list(range(kept)), int(draw(rest if rest.sum() > 0 else p[kept], generator))
