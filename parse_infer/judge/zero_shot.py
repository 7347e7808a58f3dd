"""Zero-shot judge: ask the target itself whether the solution so far is correct.

The chat template renders one suffix for all prefixes: end of the answer, a user turn with the question, start of an
answer. The validity is the target's preference between the two answer words (HoVer, ICLR 2026 submission 9587; the
zero-shot verifier of PARSE, arXiv 2605.04263). The packed layout is the adapter's, without a LoRA.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import ModelError, PromptError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import judge_fingerprint
from parse_infer.judge.probe.head import Probe, ValidityHead, verbalizer_ids
from parse_infer.judge.probe.scorer import ProbeScorer
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
class ZeroShot:
    """The judge by name: `judge="zero_shot"`. It has no options."""

    def load(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> ZeroShotJudge:
        assert model is not None, "over servers `ZeroShotRequests` asks the question"
        return ZeroShotJudge(model, tokenizer)


class ZeroShotJudge:
    """A `Judge` with a question as its probe, and no LoRA.

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
        yes_id, no_id = verbalizer_ids(tokenizer, self.probe.text, words)
        self.head = ValidityHead.from_verbalizer(model, yes_id, no_id).requires_grad_(False).eval()
        self.config = ValidityConfig(
            probe_ids=self.probe.ids,
            probe_text=self.probe.text,
            closes_turn=self.probe.closes_turn,
            verbalizer=words,
            cut_policy=(cut_policy or CutPolicy()).to_dict(),
            target=describe_target(model),
            label={"kind": "zero-shot"},
            threshold=0.5,
        )

    def scorer(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: PreTrainedModel | None = None
    ) -> ProbeScorer:
        assert model is not None, "over servers `ZeroShotRequests` asks the question"
        return ProbeScorer(self.head, self.probe, None, end_ids, model, self.config.validity)

    @property
    def tokens_per_cut(self) -> int:
        return len(self.probe.ids)

    @property
    def fingerprint(self) -> str:
        return judge_fingerprint((self.config.to_dict(),), (self.head.state_dict(),))


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
