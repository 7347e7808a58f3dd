"""Validity requests to a server, and parsing of its answers.

Without a probe, one prompt covers all cuts. With a probe or a zero-shot question, K cuts need K prompts. These share
the prefix's KV cache blocks with one another and with the request that resumes from a cut.

    questions = TrainedQuestions.of(config, end_ids)            # for a server with the plugin
    asked = questions.about(context_ids, draft_ids, cuts)
    body = asked.request(model_name)                            # POST /v1/completions
    validities = asked.validities(answer)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parse_infer.errors import ServerError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.head import verbalizer_ids
from parse_infer.judge.zero_shot import QUESTION, question_probe
from parse_infer.vllm_plugin.probe_ids import ProbeIds, answer_ids

LogProbabilities = Mapping[int, float]
"""Log-probabilities of the most likely next tokens of one prompt, by token id."""

MAX_PROMPTS = 256
"""Largest number of prompts per draft: each is a sequence, and vLLM runs 256 sequences at a time."""
MAX_IDS = 2**20
"""Largest number of token ids in all prompts per draft: about 6 MB of JSON."""


@dataclass(frozen=True)
class ValidityRequest:
    """Prompts of one draft's validity request.

    Attributes:
        prompts: token ids.
        sizes: number of cuts in each prompt.
    """

    questions: Questions
    prompts: list[list[int]]
    sizes: list[int]

    @property
    def top(self) -> int:
        """Number of log-probabilities to request."""
        return self.questions.top * max(self.sizes)

    def request(self, model: str) -> dict[str, Any]:
        """Body of a `POST /v1/completions`."""
        return {
            "model": model,
            "prompt": self.prompts,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": self.top,
            "return_tokens_as_token_ids": True,
        }

    def validities(self, answer: Any) -> list[float]:
        """Read the validity at each cut from the server's JSON answer.

        Raises:
            ValueError: the answer is incomplete or holds no validities.
        """
        found = read_completion(answer, len(self.prompts), self.questions.words)
        return [validity_of(logit) for logit in self.logits(found)]

    def logits(self, found: Sequence[LogProbabilities]) -> list[float]:
        """Logit of each cut, from the log-probabilities of each prompt. Raises as `validities` does."""
        pairs = zip(found, self.sizes, strict=True)
        return [logit for one, size in pairs for logit in self.questions.logits(one, size)]


@dataclass(frozen=True)
class Questions:
    """Common base of both kinds of judge.

    Attributes:
        end_ids: the target's end tokens.
        closes_turn: the suffix itself ends the turn, so prompts omit the draft's own end token.
        answers: the tokens for valid and for not valid, for each cut that a prompt may hold.
        top: number of log-probabilities to request per cut in a prompt.
        words: ids of the answer tokens by text, for servers that list tokens by text.
    """

    end_ids: tuple[int, ...]
    closes_turn: bool
    answers: Sequence[tuple[int, int]]
    top: int
    words: Mapping[str, int] = field(default_factory=dict, kw_only=True)

    def about(
        self, context_ids: Sequence[int], draft_ids: Sequence[int], cuts: Sequence[int], window: int | None = None
    ) -> ValidityRequest:
        """Build the validity request of a draft.

        Args:
            context_ids: at least one token.
            cuts: at least one; strictly increasing offsets in 0..len(draft_ids).
            window: the server's context window, including one token for its answer. A draft that fills the window
                needs more prompts.

        Raises:
            ValueError: cuts out of order or range, or an empty context.
        """
        if not context_ids:
            raise ServerError("the context of the draft is empty")
        if any(not 0 <= c <= len(draft_ids) for c in cuts) or any(b <= a for a, b in itertools.pairwise(cuts)):
            raise ServerError(f"cuts must increase strictly within 0..{len(draft_ids)}, not {list(cuts)}")
        prompts, sizes = [], []
        for some in self._groups(len(context_ids), len(draft_ids), cuts, window):
            shown = 0
            suffix: list[int] = []
            for cut in some:
                end = draft_ids[cut - 1] if cut and self.closes_turn and draft_ids[cut - 1] in self.end_ids else None
                shown = cut if end is None else cut - 1
                suffix += self.suffix(shown, end)
            prompts.append([*context_ids, *draft_ids[:shown], *suffix])
            sizes.append(len(some))
        return ValidityRequest(self, prompts, sizes)

    def affordable(
        self, n_context: int, cuts: Sequence[int], window: int | None = None, *, singly: bool = False
    ) -> list[int]:
        """Thin out the cuts of a draft: keep every second, fourth, … cut until `MAX_PROMPTS` and `MAX_IDS` hold.

        The last cut always stays. A longer draft keeps no cut that a shorter one dropped.

        Args:
            n_context: tokens before the draft.
            cuts: all cuts, as for `about`.
            singly: the cuts are judged one by one, while the draft grows.
        """
        kept, step = list(cuts), 1
        while len(kept) > 1 and not self._fits(n_context, kept, window, singly):
            step *= 2
            kept = [*cuts[step - 1 : -1 : step], cuts[-1]]
        return kept

    def _fits(self, n_context: int, cuts: Sequence[int], window: int | None, singly: bool) -> bool:
        groups = [[cut] for cut in cuts] if singly else self._groups(n_context, cuts[-1], cuts, window)
        suffixes = len(cuts) * len(self.suffix(0, None))
        ids = sum(n_context + group[-1] for group in groups) + suffixes
        return len(groups) <= MAX_PROMPTS and ids <= MAX_IDS

    def _groups(
        self, n_context: int, n_draft: int, cuts: Sequence[int], window: int | None
    ) -> Sequence[Sequence[int]]:
        """The cuts of each prompt."""
        together = len(self.answers)
        if window is not None:
            together = max(1, min(together, window - 1 - n_context - n_draft))
        return [cuts[i : i + together] for i in range(0, len(cuts), together)]

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        """Tokens after a prefix with `draft_tokens` draft tokens and an omitted `end` token."""
        raise NotImplementedError

    @property
    def probe_tokens(self) -> int:
        """Number of the judge's probe tokens, the cost of a cut; 0 without a probe."""
        raise NotImplementedError

    def logits(self, found: LogProbabilities, n: int) -> list[float]:
        """Logits of a prompt's `n` cuts, from the log-probabilities in its answer.

        Raises:
            ValueError: the log-probabilities hold neither answer token of a cut.
        """
        lowest = min(found.values())  # upper bound for tokens that are not listed
        for yes, no in self.answers[:n]:
            if yes not in found and no not in found:
                raise ServerError(
                    f"the server's log-probabilities hold neither answer ({yes} or {no}): request more of them"
                )
        return [found.get(yes, lowest) - found.get(no, lowest) for yes, no in self.answers[:n]]


@dataclass(frozen=True)
class TrainedQuestions(Questions):
    """Validity requests to a server with the plugin, with an adapter's probe.

    Attributes:
        ids: ids of the probe.
        scale, shift: calibration of the logit (`ValidityConfig.probability`).
    """

    ids: ProbeIds = field(kw_only=True)
    scale: float = 1.0
    shift: float = 0.0

    @classmethod
    def of(cls, config: ValidityConfig, end_ids: Sequence[int]) -> TrainedQuestions:
        """The requests of an adapter.

        Args:
            config: configuration of the server's adapter.
            end_ids: the target's end tokens, as in the server's options (`end_tokens_of`).
        """
        ends = tuple(end_ids)
        ids = ProbeIds.of(config, ends)
        answers = answer_ids(ends, ids.together)
        scaled = config.probability or {"scale": 1.0, "shift": 0.0}
        return cls(ends, config.closes_turn, answers, 2, ids=ids, scale=scaled["scale"], shift=scaled["shift"])

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        return self.ids.suffix(draft_tokens, end)

    @property
    def probe_tokens(self) -> int:
        return len(self.ids.probe)

    def logits(self, found: LogProbabilities, n: int) -> list[float]:
        sums = [sum(math.exp(found.get(token, -math.inf)) for token in pair) for pair in self.answers[:n]]
        if not all(abs(n * one - 1) <= 1e-3 for one in sums):
            raise ServerError(
                "the server's answer holds no validity: it lacks the PARSE plugin or runs another target"
            )
        return [logit * self.scale + self.shift for logit in super().logits(found, n)]


@dataclass(frozen=True)
class ZeroShotQuestions(Questions):
    """Validity requests to any server with log-probabilities, as a question to the target (`ZeroShotJudge`).

    Attributes:
        asked: tokens of the question.
    """

    asked: tuple[int, ...] = field(kw_only=True)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        end_ids: Sequence[int],
        question: str = QUESTION,
        words: tuple[str, str] = ("Correct", "Incorrect"),
        top: int = 5,
    ) -> ZeroShotQuestions:
        """The requests for a target's tokenizer.

        Args:
            top: number of log-probabilities; OpenAI allows 5, vLLM 20.

        Raises:
            ValueError: as `ZeroShotJudge` does.
        """
        probe = question_probe(tokenizer, question)
        yes, no = verbalizer_ids(tokenizer, probe.text, words)
        texts = {tokenizer.decode([i]): i for i in (yes, no)}
        return cls(tuple(end_ids), probe.closes_turn, [(yes, no)], top, asked=probe.ids, words=texts)

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        return self.asked

    @property
    def probe_tokens(self) -> int:
        return len(self.asked)


def validity_of(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))


def read_completion(answer: Any, n: int, words: Mapping[str, int] | None = None) -> list[LogProbabilities]:
    """Read the log-probabilities in the answer to `n` prompts, in their order.

    Args:
        answer: the JSON object.
        words: ids by text, for a server without `return_tokens_as_token_ids`.

    Raises:
        ValueError: the answer is incomplete.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise ServerError(f"{len(choices)} choices")
        found = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        return [_by_id(one, words or {}) for one in found]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"the server's answer lacks the log-probabilities of {n} tokens ({type(error).__name__})"
        ) from error


def _by_id(found: Mapping[str, float], words: Mapping[str, int]) -> LogProbabilities:
    """Map token texts to ids. Unknown texts get ids below 0, since their values still bound those of other tokens."""
    ids = {text: int(text.removeprefix("token_id:")) for text in found if text.startswith("token_id:")} or words
    return {ids.get(text, -1 - i): value for i, (text, value) in enumerate(found.items())}
