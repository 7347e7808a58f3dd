"""A draft model: any causal language model, with the target's tokenizer or one of its own."""

from __future__ import annotations

from collections.abc import Sequence

from parse_infer.answer import Answer
from parse_infer.drafters.drafter import Draft
from parse_infer.guesses.token_drafter import TokenDrafter
from parse_infer.guesses.walk import guided_decode
from parse_infer.models.detokenizer import complete_text, encode_continuation
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.prompts import Prompt, Verbatim, open_turn
from parse_infer.models.sampling import Sampling
from parse_infer.verify.segments import CutPolicy, Segmenter


class ModelDrafter:
    """Lets `draft` write the rest of the answer.

    The prompt is rendered by the draft model's own chat template. With the target's tokenizer (`shares_tokens`) token
    ids pass straight through; with another one the answer so far reaches the draft model as text, and its draft
    reaches the target as text. Its cache is kept from round to round and from prompt to prompt (`Decoder.seek`).

    Args:
        token_drafter: lets the draft model write several tokens per forward of its own.
        one_segment: propose no more than the next segment by this policy, instead of the rest of the answer.
    """

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        token_drafter: TokenDrafter | None = None,
        one_segment: CutPolicy | None = None,
    ) -> None:
        self.draft = draft
        self.target = target
        self.token_drafter = token_drafter
        self.shares_tokens = same_tokenizer(draft.tokenizer, target.tokenizer)
        self._end_ids = draft.eos_ids | target.eos_ids if self.shares_tokens else draft.eos_ids
        if self.shares_tokens and draft.tokenizer.chat_template is None:  # a base model next to a chat model
            draft.tokenizer.chat_template = target.tokenizer.chat_template
        self._segmenter = None if one_segment is None else Segmenter(draft.tokenizer, one_segment)
        self._prompt_ids: list[int] = []
        self._before = ""
        self._sampling = Sampling()
        self._round = 0
        self._stop: Sequence[str] = ()

    @property
    def forwards(self) -> int:
        return self.draft.decoder.forwards

    def reset(self, prompt: Prompt, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        if isinstance(prompt, Verbatim) and not self.shares_tokens:
            prompt = Verbatim(prompt.text)
        self._prompt_ids = self.draft.render(prompt)
        self._before = open_turn(prompt)
        self._sampling, self._stop, self._round = sampling, stop, 0

    def propose(self, answer_ids: Sequence[int], max_new_tokens: int) -> Draft:
        self._round += 1
        written = list(answer_ids)
        if not self.shares_tokens:
            text = complete_text(self.target.tokenizer, answer_ids)
            written = encode_continuation(self.draft.tokenizer, self._before, text)
        elif max(written, default=0) >= self.draft.n_embeddings:  # padding ids, which only untrained models write
            return Draft([])
        context = self._prompt_ids + written
        room = min(max_new_tokens, self.draft.window - len(context))
        if room <= 0:
            return Draft([])

        answer = Answer(self.draft.tokenizer, self._end_ids, self._stop, len(written) + room)
        answer.add(written, "target")
        before = answer.text
        self.draft.decoder.seek(context)
        generator = self._sampling.generator(self.draft.decoder.device, "draft", self._round)
        for token in guided_decode(self.draft.decoder, self.token_drafter, room, self._sampling, generator):
            answer.add([token], "draft")
            if not answer.open or self._completes_segment(answer.ids[len(written) :]):
                break
        return self._in_target_tokens(answer, len(written), before)

    def _completes_segment(self, ids: Sequence[int]) -> bool:
        return self._segmenter is not None and self._segmenter.first_segment_end(ids) is not None

    def _in_target_tokens(self, answer: Answer, n_before: int, before: str) -> Draft:
        ids = answer.ids[n_before:]
        if not self.shares_tokens:
            text = answer.text[len(before) :].rstrip("\ufffd")  # a budget may end inside a character
            ids = encode_continuation(self.target.tokenizer, self._before + before, text)
        else:
            if answer.finish_reason == "eos":
                ids = ids[:-1]
            unknown = next((i for i, token in enumerate(ids) if token >= self.target.n_embeddings), None)
            if unknown is not None:
                return Draft(ids[:unknown])
        end = self.target.end_token
        if answer.finish_reason == "eos" and end is not None:
            return Draft([*ids, end], finished=True)
        return Draft(ids)
