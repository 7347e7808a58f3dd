"""A draft model as token drafter: classical speculative decoding (arXiv 2211.17192)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from parse_infer.decoding.block_length import FIRST, BlockLength
from parse_infer.errors import ModelError
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import TokenMap, TranslatedContext, token_map
from parse_infer.models.token_sampling import distribution, draw
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.proposer import TokenTree

TOKENS, CONFIDENCE = 32, 0.4


class DraftModelProposer:
    """Proposes a chain of the next few tokens, written by `draft`, whose cache follows the context automatically.

    Args:
        draft: the small model, with the tokenizer of `model` or a reduced vocabulary of it (`token_map`).
        model: the model that verifies the proposed tokens.
        tokens: maximum length of a chain.
        confidence: a chain ends with the first token whose probability under `draft` is lower. The length of a chain
            depends only on its tokens, so block verification stays exact.
        greedy: 1: propose the draft model's first choices where the model samples too. They are drawn from nothing, so
            each is kept with the model's own probability of it (`accept_tree`): the distribution stays the model's.

    With neither `tokens` nor `confidence`, a chain ends where one more token is not faster (`BlockLength`), and the
    model writes alone while no chain is faster. Samples with a seed have `TOKENS` and `CONFIDENCE` instead, since the
    random numbers of such an answer must not depend on measured times.

    Raises:
        ValueError: `model` lacks tokens of the draft model, both share a decoder, `tokens` is below 1, `confidence`
            is not in 0..1, or `greedy` is not 0 or 1.
    """

    def __init__(
        self,
        draft: LanguageModel,
        model: LanguageModel,
        tokens: int | None = None,
        confidence: float | None = None,
        greedy: int = 0,
    ) -> None:
        shared = token_map(draft.tokenizer, model.tokenizer)
        if shared is None:
            raise ModelError(
                f"{draft.name!r} cannot propose tokens for {model.name!r}: their tokenizers differ; token-level "
                "speculation needs a draft model with the same tokenizer or a reduced vocabulary of it"
            )
        if draft.decoder is model.decoder:
            raise ModelError("draft model and target must not share a decoder: pass dataclasses.replace(draft)")
        self._measures = tokens is None and confidence is None
        self._lengths = {True: BlockLength(), False: BlockLength()}  # of greedy chains, of sampled ones
        self._max_tokens = TOKENS if tokens is None else tokens
        self._min_confidence = CONFIDENCE if confidence is None else confidence
        if self._max_tokens < 1:
            raise ModelError(f"a chain needs at least 1 token, not {tokens}")
        if not 0 <= self._min_confidence <= 1:
            raise ModelError(f"confidence is a probability, not {confidence}")
        if greedy not in (0, 1):
            raise ModelError(f"greedy is {greedy}; it must be 0 or 1")
        self.draft, self.tokens, self.confidence, self.greedy = draft, tokens, confidence, greedy
        self.forwards = 0
        self._alone = 0, 0.0  # tokens and seconds of the model alone since the last chain
        self._vocabularies = _Vocabularies(shared, draft, model)

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None
    ) -> TokenTree:
        both = self._vocabularies
        measures = self._measures and (sampling.greedy or sampling.seed is None)
        length = self._lengths[sampling.greedy] if measures else None
        if length is not None and length.pause:
            return TokenTree.chain((), on_read=partial(self._note_alone, length))
        context = both.context(ids)
        max_tokens = self._max_tokens
        if length is not None:
            max_tokens = FIRST if length.costs is None else length.longest
        size = min(max_tokens, limit, self.draft.window - len(context))
        if size < 1 or not context:
            return TokenTree.chain(())
        decoder, tokens, drawn_from = self.draft.decoder, [], []
        draws = not (sampling.greedy or self.greedy)
        decoder.reserve(len(context), limit)
        decoder.seek(context)
        if max(decoder.ids[decoder.cached :], default=0) >= self.draft.n_embeddings:
            return TokenTree.chain(())  # padding ids, which only untrained models write
        before, unread, times = decoder.forwards, len(context) - decoder.cached, [time.perf_counter()]
        confidences: list[float] = []
        ends = (lambda chance: chance < self._min_confidence) if length is None else length.ending()
        logits = decoder.next_logits()
        while True:
            scores = logits[both.of_draft]
            q = scores.float().softmax(-1) if sampling.greedy else distribution(scores, sampling)
            drawn = draw(q, generator) if draws else q.argmax()
            choice_and_confidence = torch.stack([drawn.to(q.dtype), q.gather(-1, drawn[None])[0]])
            number, confidence = choice_and_confidence.tolist()  # the only synchronisation
            choice = int(number)
            times.append(time.perf_counter())
            token = both.draft_ids[choice]
            tokens.append(both.target_ids[choice])
            confidences.append(confidence)
            if draws:
                drawn_from.append(both.in_target(q))
            if ends(confidence) or token in decoder.eos_ids or len(tokens) == size:
                break
            logits = decoder.advance(token, both.draft_token(drawn))
        self.forwards += decoder.forwards - before
        if unread > 2:  # more than the last proposed token and the model's own: not what a token costs
            del times[0]
        on_read = None if length is None else partial(self._note, length, confidences, times)
        return TokenTree.chain(tokens, torch.stack(drawn_from) if drawn_from else None, on_read)

    def _note(
        self,
        length: BlockLength,
        confidences: list[float],
        times: list[float],
        accepted: int,
        read_s: float,
        read: int,
    ) -> None:
        n, costs = len(confidences), length.costs
        if len(times) > 1:
            draft_s = n * (times[-1] - times[0]) / (len(times) - 1)
        elif costs is not None:  # one token, after more than the draft model had read
            draft_s = costs.draft_s
        else:
            return
        length.note(confidences, accepted, accepted < n, draft_s, read_s, read, added=1)

    def _note_alone(self, length: BlockLength, accepted: int, read_s: float, read: int) -> None:
        if read > 2:  # a prompt
            return
        tokens, seconds = self._alone[0] + 1, self._alone[1] + read_s
        self._alone = tokens, seconds
        if tokens >= length.pause:
            length.note_alone(seconds, tokens)
            self._alone = 0, 0.0


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
