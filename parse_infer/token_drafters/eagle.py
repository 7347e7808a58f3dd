"""Token drafter with an EAGLE head (arXiv 2503.01840, 2602.01469).

EAGLE-3 proposes a chain or a tree of the most likely continuations, token by token. The head's own output replaces
features that the model has not computed yet. The parallel form (P-EAGLE) proposes a whole block in one forward, as a
chain or as the tree of the likeliest combinations. A learnt vector and a mask token stand for the future positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parse_infer.models.attention import CHUNK_ROWS, enable_split_attention
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.eagle_head import EagleHead
from parse_infer.token_drafters.head_files import check_sizes, embed
from parse_infer.token_drafters.proposer import ROOT, TokenTree
from parse_infer.token_drafters.tree import chain, likeliest_tree


class EagleDrafter:
    """Proposes a chain or a tree with an EAGLE head; with a parallel head, a block in one forward.

    Args:
        head: trained for `model`.
        model: the verifying model; its decoder captures the features from now on.
        tokens: length of a chain or block, depth of a tree.
        top_k: children of a node, and expanded nodes on each level; 1: a chain.
        tree_tokens: number of the most likely nodes that a tree keeps.

    Raises:
        ValueError: a size below 1 or beyond the model's context window.
    """

    def __init__(
        self, head: EagleHead, model: LanguageModel, tokens: int = 5, top_k: int = 4, tree_tokens: int = 16
    ) -> None:
        check_sizes(model, tokens, top_k, tree_tokens)
        if top_k > 1:
            enable_split_attention(model.model)  # trees need it
        self.head, self.model = head, model
        self.tokens, self.top_k, self.tree_tokens = tokens, top_k, tree_tokens
        self.forwards = 0
        self._token_ids = head.token_ids
        self._past: tuple[Tensor, Tensor] | None = None
        self._features = model.decoder.capture_hidden(head.config.eagle_aux_hidden_state_layer_ids)

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        size = min(self.tokens, limit)
        if self.model.decoder.cached != len(ids) - 1:
            return TokenTree.chain(())  # the model must run a forward over its context first
        start, features = self._features.pop_hidden()
        self._crop(start)
        if features is None:
            return TokenTree.chain(())
        following = embed(self.model, ids[start + 1 :])
        if self.head.config.parallel_drafting:
            return self._block(features, following, size, sampling, generator)
        output = self._run(self.head.fc(features), following, causal=True)
        if size < 1:
            return TokenTree.chain(())
        try:
            last = output[-1:]
            return self._tree(last, size) if self.top_k > 1 else self._chain(last, size, sampling, generator)
        finally:
            self._crop(len(ids) - 1)

    def _block(
        self, features: Tensor, following: Tensor, size: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        ahead = max(0, size - 1)
        mask_token = embed(self.model, [self.head.config.ptd_token_id or 0]).expand(ahead, -1)
        hidden = self.head.fc(torch.cat([features, self.head.mask_hidden.expand(ahead, -1)]))
        output = self._run(hidden, torch.cat([following, mask_token]), causal=True)
        self._crop(self._past_length - ahead)
        if size < 1:
            return TokenTree.chain(())
        logits = self.head.logits(output[-size:])
        if self.top_k > 1:
            return likeliest_tree(logits, self._token_ids, self.top_k, self.tree_tokens)
        return chain(logits, self._token_ids, self.head.config.vocab_size, sampling, generator)

    def _chain(self, last: Tensor, size: int, sampling: Sampling, generator: torch.Generator | None) -> TokenTree:
        tokens: list[int] = []
        drawn: list[Tensor] = []
        while True:
            logits = self.head.logits(last)
            one = chain(logits, self._token_ids, self.head.config.vocab_size, sampling, generator)
            tokens += one.tokens
            drawn += [] if one.drawn_from is None else [one.drawn_from]
            if len(tokens) == size or tokens[-1] in self.model.eos_ids:
                return TokenTree.chain(tokens, torch.cat(drawn) if drawn else None)
            last = self._run(last, embed(self.model, tokens[-1:]), causal=True)

    def _tree(self, last: Tensor, size: int) -> TokenTree:
        """Build EAGLE-2's dynamic tree: expand the best nodes of each level, then keep the best nodes overall.

        The tree is deterministic, so `accept_tree` is exact for sampling too.
        """
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        frontier, outputs, seen = [ROOT], last, None
        level_scores = [0.0]
        for depth in range(size):
            log_p = self.head.logits(outputs).float().log_softmax(-1)
            likely = log_p.topk(min(self.top_k, log_p.shape[-1]), dim=-1)
            ids = self._token_ids[likely.indices].tolist()
            first = len(tokens)
            for node, above, row, gains in zip(frontier, level_scores, ids, likely.values.tolist(), strict=True):
                tokens += row
                parents += [node] * len(row)
                scores += [above + gain for gain in gains]
            if depth == size - 1:
                break
            best = sorted(range(first, len(tokens)), key=lambda i: -scores[i])[: self.top_k]
            rows = torch.tensor([frontier.index(parents[i]) for i in best], device=outputs.device)
            # A node sees the context, its expanded ancestors and itself.
            own = torch.eye(len(best), dtype=torch.bool, device=outputs.device)
            above_seen = seen[rows] if seen is not None else own.new_zeros(len(best), 0)
            seen = torch.cat([above_seen, own], dim=1)
            outputs = self._run(outputs[rows], embed(self.model, [tokens[i] for i in best]), seen=seen)
            frontier, level_scores = best, [scores[i] for i in best]
        kept = sorted(sorted(range(len(tokens)), key=lambda i: -scores[i])[: self.tree_tokens])
        # A parent is at least as likely as its children and precedes them, so the tree keeps it with them.
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return TokenTree([tokens[i] for i in kept], [place[parents[i]] for i in kept])

    def _run(self, hidden: Tensor, following: Tensor, *, causal: bool = False, seen: Tensor | None = None) -> Tensor:
        """Run the layer over the next n tokens, [n, H] -> [n, H], causally or on one level of a tree. For a tree,
        `seen` [n, m] masks the last m tokens, these n included."""
        n, past = len(hidden), self._past_length
        if causal and n > CHUNK_ROWS:  # chunks bound the size of the mask
            parts = zip(hidden.split(CHUNK_ROWS), following.split(CHUNK_ROWS), strict=True)
            return torch.cat([self._run(*part, causal=True) for part in parts])
        if causal:
            positions = torch.arange(past, past + n, device=hidden.device)
            mask = None if n == 1 else torch.arange(past + n, device=hidden.device) <= positions[:, None]
        else:
            assert seen is not None
            before = past + n - seen.shape[1]
            depth = seen.sum(-1) - 1
            positions = before + depth
            mask = torch.cat([seen.new_ones(n, before), seen], dim=1)
        mask = None if mask is None else mask[None, None]
        output, self._past = self.head(hidden[None], following[None], positions[None], mask, self._past)
        self.forwards += 1
        return output[0]

    @property
    def _past_length(self) -> int:
        """Tokens the head has read."""
        return 0 if self._past is None else self._past[0].shape[2]

    def _crop(self, length: int) -> None:
        if self._past is not None and length < self._past_length:
            keys, values = self._past
            self._past = (keys[:, :, :length], values[:, :, :length])
