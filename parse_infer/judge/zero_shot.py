"""Zero-shot judge: ask the target itself whether the solution so far is correct.

The chat template renders one suffix for all prefixes: end of the answer, a user turn with the question, start of an
answer. The validity is the target's preference between the two answer words (HoVer, ICLR 2026 submission 9587; the
zero-shot verifier of PARSE, arXiv 2605.04263). One packed pass asks behind all cuts (`parse_infer.judge.packing`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import ModelError, PromptError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import judge_fingerprint
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading, Verdict
from parse_infer.judge.packing import probes, readout_index
from parse_infer.models.architecture import logit_scale
from parse_infer.models.decoder import Trailing
from parse_infer.models.fingerprint import describe_target
from parse_infer.text.chat_template import render_chat
from parse_infer.text.cuts import CutPolicy

QUESTION = (
    "Is the solution so far correct? It may be incomplete. Check every step, then answer with one word: Correct or "
    "Incorrect."
)
WORDS = ("Correct", "Incorrect")  # the answers for valid and not valid
_MARKER = "@@PREFIX-ENDS-HERE@@"


@dataclass(frozen=True)
class Probe:
    """The question after a prefix, up to the answer word.

    Attributes:
        ids: its P tokens; the answer word follows the last one.
        text: its text.
        closes_turn: it ends the assistant's turn itself, so it does not see the draft's own end token.
    """

    ids: tuple[int, ...]
    text: str
    closes_turn: bool = False

    def shown(self, draft: Sequence[int], cut: int, end_ids: Collection[int]) -> int:
        """Return the number of draft tokens before the question about `draft[:cut]`."""
        return cut - 1 if self.closes_turn and cut and draft[cut - 1] in end_ids else cut


@dataclass(frozen=True)
class ZeroShot:
    """The judge by name: `judge="zero_shot"`. It has no options."""

    summary: ClassVar[str] = "the prompt asks the target whether each prefix is right"

    def load(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> ZeroShotJudge:
        assert model is not None, "over servers `ZeroShotRequests` asks the question"
        return ZeroShotJudge(model, tokenizer)


class ZeroShotJudge:
    """A `Judge` that reads the target's answer to a question about each prefix.

    Args:
        model: the target.
        tokenizer: the target's tokenizer; without a chat template the question is plain text.
        cut_policy: where to cut drafts; default: after every step.
        question: the question after each prefix.
        words: the answers for valid and not valid; they must begin with different tokens.

    Raises:
        ValueError: the chat template cannot render a question after an answer, or both words begin with one token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cut_policy: CutPolicy | None = None,
        question: str = QUESTION,
        words: tuple[str, str] = WORDS,
    ) -> None:
        self.probe = question_probe(tokenizer, question)
        self.weight, self.bias = preference(model, *verbalizer_ids(tokenizer, self.probe.text, words))
        self.config = ValidityConfig(
            cut_policy=(cut_policy or CutPolicy()).to_dict(),
            target=describe_target(model),
            label={"kind": "zero-shot"},
            threshold=0.5,
        )

    def scorer(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: PreTrainedModel | None = None
    ) -> ZeroShotScorer:
        return ZeroShotScorer(self.probe, self.weight, self.bias, end_ids)

    @property
    def tokens_per_cut(self) -> int:
        return len(self.probe.ids)

    @property
    def fingerprint(self) -> str:
        read_out = {"weight": self.weight, "bias": self.bias}
        return judge_fingerprint((self.config.to_dict(), asdict(self.probe)), (read_out,))


class ZeroShotScorer:
    """A `Scorer` that appends the question behind each cut.

    Args:
        probe: the question.
        weight, bias: `preference`.
        end_ids: the target's end tokens.
    """

    k, by_token, first_tokens = 0, False, 0

    def __init__(self, probe: Probe, weight: Tensor, bias: Tensor, end_ids: Collection[int]) -> None:
        self._probe, self._weight, self._bias, self._end_ids = probe, weight, bias, end_ids

    def trailing(self, reading: Reading, carried: Carried, device: torch.device) -> Trailing:
        draft, start = reading.draft, len(reading.context)
        visible = [start + self._probe.shown(draft, cut, self._end_ids) for cut in reading.cuts or ()]
        return probes(self._probe.ids, visible, start + len(draft), device)

    def score(self, reading: Reading, carried: Carried) -> Verdict:
        cuts = list(reading.cuts or ())
        assert reading.trailing is not None
        states = reading.trailing[readout_index(len(cuts), len(self._probe.ids))]
        logits = states.float() @ self._weight + self._bias
        return Verdict(cuts=cuts, validity=logits.sigmoid().tolist())


@torch.no_grad()
def preference(model: PreTrainedModel, yes_id: int, no_id: int) -> tuple[Tensor, Tensor]:
    """Return w [H] and b [], float32: after the final-norm state h, w · h + b is the logit of `yes_id` minus that of
    `no_id`. A final soft-cap is ignored, because it bends both logits alike."""
    output, scale = model.get_output_embeddings(), logit_scale(model)
    weight = (output.weight[yes_id].float() - output.weight[no_id].float()) * scale
    bias = getattr(output, "bias", None)
    if bias is None:
        return weight, weight.new_zeros(())
    return weight, (bias[yes_id].float() - bias[no_id].float()) * scale


def verbalizer_ids(tokenizer: PreTrainedTokenizerBase, question: str, words: Sequence[str]) -> tuple[int, ...]:
    """Return the first token of each word after `question`.

    Raises:
        ValueError: two words begin with the same token.
    """
    probe = tokenizer.encode(question, add_special_tokens=False)
    ids = []
    for word in words:
        joined = tokenizer.encode(question + word, add_special_tokens=False)
        continues = joined[: len(probe)] == probe and len(joined) > len(probe)
        ids.append(joined[len(probe)] if continues else tokenizer.encode(word, add_special_tokens=False)[0])
    if len(set(ids)) < len(ids):
        raise ModelError(f"the verbalizer words {' and '.join(words)} begin with the same token: choose other words")
    return tuple(ids)


def question_probe(tokenizer: PreTrainedTokenizerBase, question: str) -> Probe:
    """Return the question as a probe; it closes the turn if the tokenizer has a chat template."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    text = chat_suffix(tokenizer, question) if chat else f"\n\n{question}\nAnswer: "
    return Probe(tuple(tokenizer.encode(text, add_special_tokens=False)), text, closes_turn=chat)


def chat_suffix(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Render the chat template's text between an assistant's unfinished text and the answer to `question`."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _MARKER},
        {"role": "user", "content": question},
    ]
    options = {"enable_thinking": False}  # the answer word must come first; templates without this option ignore it
    try:
        text = render_chat(tokenizer, messages, options)
    except PromptError as error:
        raise ModelError(f"the chat template cannot render a question after an answer ({error})") from error
    _, marker, suffix = text.rpartition(_MARKER)
    if not marker or question not in suffix:
        raise ModelError("the chat template drops earlier turns, so the zero-shot judge cannot ask about a draft")
    return suffix
