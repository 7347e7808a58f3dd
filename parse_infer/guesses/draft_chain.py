"""A draft model as a token-level drafter: classical speculative decoding (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parse_infer.guesses.token_drafter import Guess
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.sampling import Sampling, distribution, draw


class DraftChain:
    """Lets `draft` write a chain of the next few tokens; its cache follows the context by itself.

    Args:
        draft: the small model.
        model: the model whose tokens are guessed.
        tokens: the most tokens in a chain.
        confidence: a chain ends with the first token to which `draft` gives a lower probability. Whether a chain goes
            on depends on nothing but its tokens, so block verification stays exact.

    The defaults are the best of nine settings on validation problems of the embedded pair (docs/benchmarks.md).

    Raises:
        ValueError: the two have different tokenizers, `tokens` is below 1, or `confidence` is not in 0..1.
    """

    def __init__(self, draft: LanguageModel, model: LanguageModel, tokens: int = 32, confidence: float = 0.4) -> None:
        if not same_tokenizer(draft.tokenizer, model.tokenizer):
            raise ValueError(
                f"{draft.name!r} cannot guess tokens of {model.name!r}: their tokenizers differ; token-level "
                "speculation needs a draft model with the same tokenizer"
            )
        if tokens < 1:
            raise ValueError(f"a chain needs at least 1 token, not {tokens}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence is a probability, not {confidence}")
        self.draft, self.tokens, self.confidence = draft, tokens, confidence
        self.forwards = 0
        self._vocabulary = min(draft.n_embeddings, model.n_embeddings)
        self._columns = model.model.config.get_text_config(decoder=True).vocab_size

    @torch.inference_mode()
    def guess(self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        size = min(self.tokens, limit, self.draft.window - len(ids))
        if size < 1 or max(ids) >= self.draft.n_embeddings:  # padding ids, which only untrained models write
            return Guess.chain(())
        decoder, tokens, drawn_from = self.draft.decoder, [], []
        decoder.seek(ids)
        before = decoder.forwards
        for _ in range(size):
            logits = decoder.next_logits()[: self._vocabulary]
            q = logits.float().softmax(-1) if sampling.greedy else distribution(logits, sampling)
            token = int(q.argmax() if sampling.greedy else draw(q, generator))
            tokens.append(token)
            if not sampling.greedy:
                drawn_from.append(torch.nn.functional.pad(q, (0, self._columns - len(q))))
            if token in decoder.eos_ids or q[token] < self.confidence:
                break
            decoder.seek([*decoder.ids, token])
        self.forwards += decoder.forwards - before
        return Guess.chain(tokens, torch.stack(drawn_from) if drawn_from else None)
