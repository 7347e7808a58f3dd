"""Drafts from a draft model: any causal language model, with the target's tokenizer or another."""

from __future__ import annotations

from collections.abc import Sequence

from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft, DraftStream
from parse_infer.drafters.source import Draft
from parse_infer.errors import PromptError
from parse_infer.judge.cuts import CutPolicy, Segmenter
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.prompts import Prompt
from parse_infer.models.sampling import random_generator
from parse_infer.models.tokenizer_spec import TokenizerSpec
from parse_infer.sampling import Sampling
from parse_infer.speculation.decode import speculative_decode
from parse_infer.speculation.proposer import TokenProposer


class ModelDrafter:
    """Drafts the rest of the answer with `draft` (`CrossTokenizerDraft`).

    The draft model keeps its KV cache across rounds and prompts (`Decoder.seek`).

    Args:
        token_drafter: token proposer for the draft model.
        one_segment: draft only the next segment by this policy, instead of the rest of the answer.
    """

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        token_drafter: TokenProposer | None = None,
        one_segment: CutPolicy | None = None,
    ) -> None:
        self.draft = draft
        self.target = target
        self.token_drafter = token_drafter
        self.shares_tokens = share_tokens(draft, target)
        self._segmenter = None if one_segment is None else Segmenter(draft.tokenizer, one_segment)
        self._translation: CrossTokenizerDraft | None = None
        self._sampling = Sampling()
        self._round = 0

    @property
    def forwards(self) -> int:
        return self.draft.decoder.forwards

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        self._translation = CrossTokenizerDraft(self.draft, self.target, self.shares_tokens, prompt, stop)
        self._sampling, self._round = sampling, 0

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
        for token in speculative_decode(
            decoder, self.token_drafter, writing.remaining_tokens, self._sampling, generator
        ):
            writing.add([token])
            if writing.is_finished or self._completes_segment(writing):
                break
        return writing.draft()

    def _completes_segment(self, writing: DraftStream) -> bool:
        return self._segmenter is not None and self._segmenter.first_segment_end(writing.own_ids) is not None


def share_tokens(draft: TokenizerSpec, target: TokenizerSpec) -> bool:
    """Whether both models share token ids. If so, a draft model without chat template gets the target's template."""
    shared = same_tokenizer(draft.tokenizer, target.tokenizer)
    if shared and draft.tokenizer.chat_template is None:
        draft.tokenizer.chat_template = target.tokenizer.chat_template
    return shared
