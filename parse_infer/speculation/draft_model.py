"""A draft model as token proposer: classical speculative decoding (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.errors import ModelError
from parse_infer.models.loading import LanguageModel
from parse_infer.models.sampling import distribution, draw
from parse_infer.models.token_map import TokenMap, TranslatedContext, token_map
from parse_infer.sampling import Sampling
from parse_infer.speculation.proposer import TokenTree


class DraftModelProposer:
    """Proposes a chain of the next few tokens, written by `draft`, whose cache follows the context automatically.

    Args:
        draft: the small model, with the tokenizer of `model` or a reduced vocabulary of it (`token_map`).
        model: the model that verifies the proposed tokens.
        tokens: maximum length of a chain.
        confidence: a chain ends with the first token whose probability under `draft` is lower. The length of a chain
            depends only on its tokens, so block verification stays exact.

    The defaults are the best of nine settings on validation problems of the embedded pair (docs/benchmarks.md).

    Raises:
        ValueError: `model` lacks tokens of the draft model, both share a decoder, `tokens` is below 1, or `confidence`
            is not in 0..1.
    """

    def __init__(self, draft: LanguageModel, model: LanguageModel, tokens: int = 32, confidence: float = 0.4) -> None:
        shared = token_map(draft.tokenizer, model.tokenizer)
        if shared is None:
            raise ModelError(
                f"{draft.name!r} cannot propose tokens for {model.name!r}: their tokenizers differ; token-level "
                "speculation needs a draft model with the same tokenizer or a reduced vocabulary of it"
            )
        if draft.decoder is model.decoder:
            raise ModelError("draft model and target must not share a decoder: pass dataclasses.replace(draft)")
        if tokens < 1:
            raise ModelError(f"a chain needs at least 1 token, not {tokens}")
        if not 0 <= confidence <= 1:
            raise ModelError(f"confidence is a probability, not {confidence}")
        self.draft, self.tokens, self.confidence = draft, tokens, confidence
        self.forwards = 0
        self._vocabularies = _Vocabularies(shared, draft, model)

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        both = self._vocabularies
        context = both.context(ids)
        size = min(self.tokens, limit, self.draft.window - len(context))
        if size < 1 or not context:
            return TokenTree.chain(())
        decoder, tokens, drawn_from = self.draft.decoder, [], []
        decoder.reserve(len(context), limit)
        decoder.seek(context)
        if max(decoder.ids[decoder.cached :], default=0) >= self.draft.n_embeddings:
            return TokenTree.chain(())  # padding ids, which only untrained models write
        before = decoder.forwards
        logits = decoder.next_logits()
        while True:
            scores = logits[both.of_draft]
            q = scores.float().softmax(-1) if sampling.greedy else distribution(scores, sampling)
            drawn = q.argmax() if sampling.greedy else draw(q, generator)
            doubtful = q.gather(-1, drawn[None])[0] < self.confidence
            choice, ends = torch.stack([drawn, doubtful.to(drawn.dtype)]).tolist()  # the only synchronisation
            token = both.draft_ids[choice]
            tokens.append(both.target_ids[choice])
            if not sampling.greedy:
                drawn_from.append(both.in_target(q))
            if ends or token in decoder.eos_ids or len(tokens) == size:
                break
            logits = decoder.advance(token, both.draft_token(drawn))
        self.forwards += decoder.forwards - before
        return TokenTree.chain(tokens, torch.stack(drawn_from) if drawn_from else None)


class _Vocabularies:
    """The tokens that both models share: one slice of both vocabularies if the tokenizers are the same.

    Attributes:
        draft_ids, target_ids: the k shared tokens in each vocabulary.
        of_draft: index of the shared tokens in the draft model's logits, [V] -> [k].
    """

    def __init__(self, tokens: TokenMap, draft: LanguageModel, model: LanguageModel) -> None:
        self._n_target = model.model.config.get_text_config(decoder=True).vocab_size
        self.draft_ids, self.target_ids = tokens.draft_ids, tokens.target_ids
        self.of_draft: slice | torch.Tensor
        self._of_target: slice | torch.Tensor
        if tokens.is_identity:  # padding included, since both models may write it
            shared = min(draft.n_embeddings, model.n_embeddings, self._n_target)
            self.draft_ids = self.target_ids = range(shared)
            self.of_draft = self._of_target = slice(shared)
            self._translated = None
        else:
            self.of_draft, self._of_target = (
                torch.tensor(ids, device=draft.decoder.device) for ids in (self.draft_ids, self.target_ids)
            )
            self._translated = TranslatedContext(tokens)

    def context(self, ids: Sequence[int]) -> Sequence[int]:
        """Translate the target's context to the draft model's tokens."""
        return ids if self._translated is None else self._translated.follow(ids)

    def draft_token(self, choice: torch.Tensor) -> torch.Tensor:
        """Map an index of the k shared tokens to the draft model's id, both int64 [] on its device."""
        return choice if isinstance(self.of_draft, slice) else self.of_draft.gather(0, choice[None])[0]

    def in_target(self, q: torch.Tensor) -> torch.Tensor:
        """Expand a distribution over the shared tokens, [k], to the target's vocabulary, [V]."""
        wide = q.new_zeros(self._n_target)
        wide[self._of_target] = q
        return wide
