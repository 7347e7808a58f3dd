"""Drafts from a draft model: any causal language model, with the target's tokenizer or another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from parse_infer.decoding.plan import SourceKind
from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft, DraftStream, TokenStream
from parse_infer.drafters.source import Block, Draft
from parse_infer.errors import PromptError
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.token_map import TokenMap, token_map
from parse_infer.models.token_sampling import distribution, draw, random_generator
from parse_infer.settings.sampling import Sampling
from parse_infer.text.cuts import CutPolicy, Segmenter
from parse_infer.text.detokenizer import without_special_tokens
from parse_infer.text.prompts import Prompt
from parse_infer.text.tokenizer_spec import TokenizerSpec

_Spec = TypeVar("_Spec", bound=TokenizerSpec)


class ModelDrafter:
    """Drafts the rest of the answer with `draft` (`CrossTokenizerDraft`).

    The draft model keeps its KV cache across rounds and prompts (`Decoder.seek`).

    Args:
        one_segment: draft only the next segment by this policy, instead of the rest of the answer.
    """

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        one_segment: CutPolicy | None = None,
    ) -> None:
        self.draft = draft
        self.target = target
        self.shares_tokens = share_tokens(draft, target)
        self.kind = SourceKind(is_model=True, one_segment=one_segment is not None, blocks=True, confidences=True)
        self._segmenter = None if one_segment is None else Segmenter(draft.tokenizer, one_segment)
        self._translation: CrossTokenizerDraft | None = None
        self._sampling = Sampling()
        self._round = 0
        self._written: list[int] = []  # context and tokens of the last block

    @property
    def forwards(self) -> int:
        return self.draft.decoder.forwards

    def check(self, prompt: Prompt) -> None:
        CrossTokenizerDraft(self.draft, self.target, self.shares_tokens, prompt)

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        self._translation = CrossTokenizerDraft(self.draft, self.target, self.shares_tokens, prompt, stop)
        self._sampling, self._round, self._written = sampling, 0, []

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        if self._translation is None:
            raise PromptError("the drafter has no prompt: call reset() first")
        self._round += 1
        writing = self._translation.begin(answer_ids, max_new_tokens)
        if writing is None:
            return Draft([])
        decoder = self.draft.decoder
        decoder.seek(writing.context)
        generator = random_generator(self._sampling, decoder.device, "draft", self._round)
        for token in decoder.decode(writing.remaining_tokens, self._sampling, generator):
            writing.add([token])
            if writing.is_finished or self._completes_segment(writing):
                break
        return writing.draft()

    @torch.inference_mode()
    def propose_block(
        self,
        answer_ids: Sequence[int],
        max_new_tokens: int,
        longest: int,
        ends: Callable[[float], bool] | None = None,
        min_target_tokens: int = 0,
    ) -> Block:
        """Draft the next tokens of the answer, up to the first token at which `ends` returns True.

        The tokens after a corrected one are kept as proposals: one forward finds how many of them still fit.

        Args:
            max_new_tokens: number of tokens that the answer may still have.
            longest: longest block, in the draft model's tokens.
            ends: receives the draft model's probability of each token; None: only `longest` ends the block.
            min_target_tokens: the block goes on until it has as many of the target's tokens, if it can.
        """
        if self._translation is None:
            raise PromptError("the drafter has no prompt: call reset() first")
        writing = self._translation.begin_block(answer_ids, max_new_tokens, self._token_map)
        if writing is None:
            return Block([])
        decoder, sampling, start = self.draft.decoder, self._sampling, len(writing.context)
        decoder.reserve(start, writing.remaining_tokens)
        decoder.seek(writing.context)
        unread, begin = start - decoder.cached, time.perf_counter()
        confidences: list[float] = []
        times: list[float] = []

        def add(token: int, confidence: float) -> bool:
            """Add a token; return whether the block ends."""
            writing.add([token])
            confidences.append(confidence)
            if writing.is_finished:
                return True
            n = len(confidences)
            if not ((ends is not None and ends(confidence)) or n >= longest):
                return False
            # A token that the target lacks ends the block in its tokens.
            return n >= 4 * min_target_tokens or len(writing.block().ids) >= min_target_tokens

        ended = self._read_proposals(writing, longest, add)
        logits = None if ended else decoder.next_logits()
        while logits is not None:
            probabilities = _probabilities(logits, sampling)
            if sampling.greedy:
                token = probabilities.argmax()
            else:  # random numbers of each place, so that an answer does not depend on where its blocks end
                generator = random_generator(sampling, decoder.device, "draft", start + writing.n)
                token = draw(probabilities, generator)
            found = torch.stack([token.to(probabilities.dtype), probabilities.gather(-1, token[None])[0]])
            chosen, confidence = found.tolist()  # the only device synchronisation
            times.append(time.perf_counter())
            if add(int(chosen), confidence):
                decoder.append(int(chosen))
                break
            logits = decoder.advance(int(chosen), token)
        self._written = decoder.ids.copy()
        draft = writing.block()
        step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        if len(times) == 1 and unread <= 1:
            step = times[0] - begin
        n = len(confidences)
        return Block(draft.ids, draft.finished, n, _resampled(confidences, len(draft.ids)), step)

    def _read_proposals(
        self, writing: DraftStream | TokenStream, longest: int, add: Callable[[int, float], bool]
    ) -> bool:
        """Add the tokens of the last block that the draft model writes again. Return whether the block ends there."""
        decoder, context = self.draft.decoder, writing.context
        proposals = self._written[len(context) :][: min(longest, writing.remaining_tokens)]
        if not proposals or not self._sampling.greedy or self._written[: len(context) - 1] != context[:-1]:
            return False
        logits = decoder.logits(decoder.look_ahead(proposals))
        highest, choices = (values.tolist() for values in _probabilities(logits, self._sampling).max(-1))
        kept, ended = 0, False
        while kept < len(proposals) and proposals[kept] == choices[kept] and not ended:
            ended = add(proposals[kept], highest[kept])
            kept += 1
        decoder.keep(range(kept))
        decoder.set_next_logits(logits[kept])
        return ended

    @property
    def passes_tokens(self) -> bool:
        """Whether blocks pass as tokens, not as text."""
        return self.shares_tokens or self._token_map is not None

    @cached_property
    def _token_map(self) -> TokenMap | None:
        return None if self.shares_tokens else token_map(self.draft.tokenizer, self.target.tokenizer)

    def _completes_segment(self, writing: DraftStream) -> bool:
        return self._segmenter is not None and self._segmenter.first_segment_end(writing.own_ids) is not None


def _probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits.float().softmax(-1) if sampling.greedy else distribution(logits, sampling)


def _resampled(values: Sequence[float], n: int) -> list[float]:
    """Stretch or shorten to n values: other tokens for the same text."""
    return list(values) if len(values) == n else [values[i * len(values) // n] for i in range(n)]


def with_template(draft: _Spec, target: TokenizerSpec) -> _Spec:
    """The draft model, or a copy with the target's chat template if they share token ids and it has none."""
    template = target.tokenizer.chat_template
    if draft.tokenizer.chat_template is not None or template is None:
        return draft
    if not same_tokenizer(draft.tokenizer, target.tokenizer):
        return draft
    own = copy(draft)  # the caller's model may serve other engines
    own.tokenizer = copy(draft.tokenizer)
    own.tokenizer.chat_template = template
    return own


def share_tokens(draft: TokenizerSpec, target: TokenizerSpec) -> bool:
    """Whether both models share token ids."""
    shared = same_tokenizer(draft.tokenizer, target.tokenizer)
    for language in () if shared else (draft, target):  # now, not during the first answer
        without_special_tokens(language.tokenizer)
    return shared
