"""What to ask a server about a draft, and how to read its answer: K requests of one token each for K cuts.

They share the prefix's blocks in the server's cache with one another and with the request that goes on from a cut.

    questions = TrainedQuestions.of(config, end_ids)            # for a server with the plugin
    body = completion_request(name, questions.prompts(context_ids, draft_ids, cuts), questions.top)
    validities = [questions.validity(one) for one in read_completion(answer, len(cuts))]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parse_infer.verify.head import verbalizer_ids
from parse_infer.verify.trained_judge import ValidityConfig
from parse_infer.verify.zero_shot_judge import QUESTION, chat_suffix
from parse_infer.vllm.probe_ids import ProbeIds, answer_ids

LogProbabilities = Mapping[int, float]
"""Of the likeliest next tokens of one prompt, by id."""


@dataclass(frozen=True)
class Questions:
    """What both kinds of judge have in common.

    Attributes:
        end_ids: the target's end tokens.
        closes_turn: the suffix itself ends the turn, so a draft's own end token is not shown before it.
        answers: the token that says valid, and the one that says not valid.
        top: how many log-probabilities to ask for.
    """

    end_ids: tuple[int, ...]
    closes_turn: bool
    answers: tuple[int, int]
    top: int

    def prompts(self, context_ids: Sequence[int], draft_ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
        """One prompt for each cut.

        Args:
            context_ids: at least one token.
            cuts: strictly increasing offsets in 0..len(draft_ids).

        Raises:
            ValueError: cuts out of order or range, or an empty context.
        """
        if not context_ids:
            raise ValueError("a draft is judged in its context, which is empty")
        if any(not 0 <= c <= len(draft_ids) for c in cuts) or any(
            b <= a for a, b in zip(cuts, cuts[1:], strict=False)
        ):
            raise ValueError(f"cuts must increase strictly within 0..{len(draft_ids)}, not {list(cuts)}")
        prompts = []
        for cut in cuts:
            end = draft_ids[cut - 1] if cut and self.closes_turn and draft_ids[cut - 1] in self.end_ids else None
            shown = cut if end is None else cut - 1
            prompts.append([*context_ids, *draft_ids[:shown], *self.suffix(shown, end)])
        return prompts

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        """What follows a prefix whose last `draft_tokens` tokens are the draft's, and a hidden `end` token."""
        raise NotImplementedError

    def validity(self, found: LogProbabilities) -> float:
        """Validity of one prefix.

        Raises:
            ValueError: the server gave no answer to the question.
        """
        return 1 / (1 + math.exp(-min(max(self.logit(found), -500.0), 500.0)))

    def logit(self, found: LogProbabilities) -> float:
        yes, no = self.answers
        if yes not in found and no not in found:
            raise ValueError(f"the server's log-probabilities hold neither answer ({yes} or {no}): ask for more")
        lowest = min(found.values())  # one that is not listed is no likelier
        return found.get(yes, lowest) - found.get(no, lowest)


@dataclass(frozen=True)
class TrainedQuestions(Questions):
    """For a server with the plugin: the probe of an adapter.

    Attributes:
        ids: the probe's.
        scale, shift: of the logit (`ValidityConfig.probability`).
    """

    ids: ProbeIds = field(kw_only=True)
    scale: float = 1.0
    shift: float = 0.0

    @classmethod
    def of(cls, config: ValidityConfig, end_ids: Sequence[int]) -> TrainedQuestions:
        """
        Args:
            config: of the adapter that the server has.
            end_ids: the target's end tokens, as in the server's options (`end_tokens_of`).
        """
        ends = tuple(end_ids)
        return cls(
            ends,
            config.closes_turn,
            answer_ids(ends),
            top=2,
            ids=ProbeIds.of(config, ends),
            **(config.probability or {}),
        )

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        return self.ids.suffix(draft_tokens, end)

    def logit(self, found: LogProbabilities) -> float:
        if not set(self.answers) <= found.keys() or abs(sum(math.exp(found[i]) for i in self.answers) - 1) > 1e-3:
            raise ValueError("the server's answer is no validity: it runs without the PARSE plugin or another target")
        return super().logit(found) * self.scale + self.shift


@dataclass(frozen=True)
class ZeroShotQuestions(Questions):
    """For any server that gives log-probabilities: the target itself is asked in words (`ZeroShotJudge`).

    Attributes:
        asked: the suffix.
        words: texts of the answer tokens, for servers that list tokens by text.
    """

    asked: tuple[int, ...] = field(kw_only=True)
    words: Mapping[str, int] = field(kw_only=True)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        end_ids: Sequence[int],
        question: str = QUESTION,
        words: tuple[str, str] = ("Correct", "Incorrect"),
        top: int = 5,
    ) -> ZeroShotQuestions:
        """
        Args:
            top: more than OpenAI's 5 where the server gives more (vLLM: 20).

        Raises:
            ValueError: as `ZeroShotJudge` does.
        """
        chat = bool(getattr(tokenizer, "chat_template", None))
        text = chat_suffix(tokenizer, question) if chat else f"\n\n{question}\nAnswer: "
        yes, no = verbalizer_ids(tokenizer, text, words)
        asked = tuple(tokenizer.encode(text, add_special_tokens=False))
        texts = {tokenizer.decode([i]): i for i in (yes, no)}
        return cls(tuple(end_ids), chat, (yes, no), top, asked=asked, words=texts)

    def suffix(self, draft_tokens: int, end: int | None) -> Sequence[int]:
        return self.asked


def completion_request(model: str, prompts: Sequence[Sequence[int]], top: int) -> dict[str, Any]:
    """Body of a `POST /v1/completions` that asks for the next token of each prompt and `top` log-probabilities."""
    return {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": top,
        "return_tokens_as_token_ids": True,
    }


def read_completion(answer: Any, n: int, words: Mapping[str, int] | None = None) -> list[LogProbabilities]:
    """Log-probabilities in the answer to a `completion_request` with `n` prompts, in their order.

    Args:
        answer: the JSON object.
        words: ids by text, for a server that does not know `return_tokens_as_token_ids`.

    Raises:
        ValueError: the answer is not complete.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise ValueError(f"{len(choices)} choices")
        found = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        return [_by_id(one, words or {}) for one in found]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the server's answer does not hold the log-probabilities of {n} tokens ({error!r}): {str(answer)[:200]}"
        ) from error


def _by_id(found: Mapping[str, float], words: Mapping[str, int]) -> LogProbabilities:
    """Tokens that have a text only, which is none of `words`, get ids below 0: their values are bounds for others."""
    ids = {text: int(text.removeprefix("token_id:")) for text in found if text.startswith("token_id:")} or words
    return {ids.get(text, -1 - i): value for i, (text, value) in enumerate(found.items())}
