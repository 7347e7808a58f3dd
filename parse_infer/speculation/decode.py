"""Token-level speculation: several tokens per forward of one model, which are those that it would write alone.

A token drafter guesses a tree of next tokens, one forward of the model looks at all of them, and a walk from the root
keeps what the model itself would have chosen. Greedy: the same tokens, up to rounding. Sampling: the same distribution
(chains: block verification, arXiv 2403.10444, which keeps at least as much as the token-wise rule of Leviathan et al.,
arXiv 2211.17192; siblings drawn at random: recursive rejection, SpecInfer, arXiv 2305.09781). `speculative_decode`
replaces `Decoder.decode` wherever a model writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from parse_infer.models.decoder import Decoder
from parse_infer.models.sampling import Sampling, distribution, draw, without
from parse_infer.speculation.proposer import ROOT, TokenProposer, TokenTree
from parse_infer.speculation.tree import branches


def speculative_decode(
    decoder: Decoder,
    drafter: TokenProposer | None,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    banned_ids: Collection[int] = (),
) -> Iterator[int]:
    """New tokens one after the other, with a token drafter or without; none of `banned_ids`."""
    if drafter is None:
        return decoder.decode(max_new_tokens, sampling, generator, banned_ids)
    return speculate(decoder, drafter, max_new_tokens, sampling, generator, banned_ids)


def speculate(
    decoder: Decoder,
    drafter: TokenProposer,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    banned_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield new tokens as `decoder.decode` does, after fewer forwards.

    The context may run ahead of what has been yielded: `seek` before using the decoder for anything else.

    Raises:
        ValueError: the context is empty.
        RuntimeError: the context was changed while this iterator was still in use.
    """
    sampling = sampling or Sampling()
    if generator is None:
        generator = sampling.generator(decoder.device)
    room, banned = max_new_tokens, decoder.token_index(banned_ids)
    decoder.reserve(len(decoder.ids), room)
    # The first choice needs no guess where its logits are known already, as after a verification pass.
    logits = decoder.next_logits()[None] if room > 0 and decoder.knows_next else None
    while room > 0:
        guess = TokenTree((), ())
        if logits is None:
            guess = drafter.guess(decoder.ids, room - 1, sampling, generator)
            logits = decoder.logits(read_guess(decoder, guess))
        path, last = accept_tree(without(logits, banned), guess, sampling, generator)
        logits = None
        if guess.tokens:
            decoder.keep(path)
        new = [*(guess.tokens[node] for node in path), last]
        decoder.append(last)
        edits = decoder.edits
        for token in new[:room]:
            yield token
            if decoder.edits != edits:
                raise RuntimeError("the context was changed during speculate(): start anew after seek()")
            if token in decoder.eos_ids:
                return
        room -= len(new)


def read_guess(decoder: Decoder, guess: TokenTree) -> Tensor:
    """One forward over what is guessed: [1 + n, H], the state after the context and after every guessed token."""
    if guess.is_chain:
        return decoder.look_ahead(guess.tokens)
    return decoder.look_ahead(branches(guess.tokens, guess.parents, len(decoder.ids), decoder.device))


@torch.inference_mode()
def accept_tree(
    logits: Tensor, guess: TokenTree, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """The guessed tokens that hold, as a path from the root, and the token that the model itself puts behind them.

    Args:
        logits: [1 + n, V]: of the model after the context, and after every guessed token.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(guess.parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    at = ROOT
    if sampling.greedy:
        choice = logits.argmax(-1).tolist()  # the one synchronisation of a block
        while True:
            token = choice[at + 1]
            at = next((node for node in children.get(at, ()) if guess.tokens[node] == token), ROOT)
            if at == ROOT:
                return path, token
            path.append(at)
    if guess.drawn_from is not None and guess.is_chain:
        return _walk_block(distribution(logits, sampling), guess.tokens, guess.drawn_from, generator)
    while True:
        kept, token = _choose_child(distribution(logits[at + 1], sampling), children.get(at, ()), guess, generator)
        if kept is None:
            return path, token
        path.append(kept)
        at = kept


def _walk_block(
    p: Tensor, tokens: Sequence[int], q: Tensor, generator: torch.Generator | None
) -> tuple[list[int], int]:
    """Block verification: how much of a chain drawn from q [n, V] holds under p [1 + n, V], judged as a whole.

    A token that was too likely under q does not end the walk; it lowers the weight of all that follow it.
    """
    n = len(tokens)
    steps, chosen = torch.arange(n, device=p.device), torch.tensor(list(tokens), device=p.device)
    weights = [1.0]
    for ratio in (p[steps, chosen] / q[steps, chosen]).tolist():
        weights.append(min(weights[-1] * ratio, 1.0))
    weight = torch.tensor(weights, device=p.device)[:, None]
    surplus = (weight[:-1] * p[:-1] - q).clamp_min(0).sum(-1).tolist()  # what p still holds beyond q behind i tokens
    kept = 0
    for i, chance in enumerate(torch.rand(n, device=p.device, generator=generator).tolist(), 1):
        left = surplus[i] if i < n else 0.0
        # Where nothing is left and nothing is lost, p equals q, and a later token decides.
        accept = weights[i] if i == n else left / (left + 1 - weights[i]) if left + 1 > weights[i] else 1.0
        if chance < accept:
            kept = i
    rest = p[n] if kept == n else (weights[kept] * p[kept] - q[kept]).clamp_min(0)
    return list(range(kept)), int(draw(rest if rest.sum() > 0 else p[kept], generator))


def _choose_child(
    p: Tensor, children: Sequence[int], guess: TokenTree, generator: torch.Generator | None
) -> tuple[int | None, int]:
    """A token distributed as `p` [V], and the child that holds it (None: no child was accepted)."""
    if guess.drawn_from is None:  # chosen without chance: draw from p and look whether it is there
        token = int(draw(p, generator))
        return next((node for node in children if guess.tokens[node] == token), None), token
    for node in children:
        token, q = guess.tokens[node], guess.drawn_from[node]
        if torch.rand((), device=p.device, generator=generator) * q[token] < p[token]:
            return node, token
        rest = (p - q).clamp_min(0)
        # Rounding may leave nothing where p and q are equal; then the token was as good as accepted.
        p = rest / rest.sum() if rest.sum() > 0 else p
    return None, int(draw(p, generator))
