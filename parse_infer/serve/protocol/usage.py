"""Tokens that a request has cost, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from parse_infer.serve.choice_state import ChoiceState


class CompletionDetails(BaseModel):
    """OpenAI's words for what became of a draft."""

    model_config = ConfigDict(extra="forbid")
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | None = None


def usage_so_far(choice: ChoiceState, completion_tokens: int) -> Usage:
    """Of one choice while it is written; what became of its drafts is told at the end."""
    total = choice.prompt_tokens + completion_tokens
    return Usage(prompt_tokens=choice.prompt_tokens, completion_tokens=completion_tokens, total_tokens=total)


def usage_of(choices: Sequence[ChoiceState], per_prompt: int) -> Usage:
    """`per_prompt` choices in a row answer the same prompt, which counts once."""
    prompt = sum(choice.prompt_tokens for choice in choices[::per_prompt])
    completion = sum(choice.tokens for choice in choices)
    stats = [choice.answer.stats for choice in choices]
    accepted = sum(s.accepted_tokens for s in stats)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(s.draft_tokens for s in stats) - accepted,
        ),
    )
