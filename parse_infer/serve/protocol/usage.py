"""Token usage of a request, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from parse_infer.serve.choice_state import ChoiceState


class CompletionDetails(BaseModel):
    """Accepted and rejected draft tokens, under OpenAI's names."""

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
    """Usage of an unfinished choice, without its draft tokens."""
    total = choice.prompt_tokens + completion_tokens
    return Usage(prompt_tokens=choice.prompt_tokens, completion_tokens=completion_tokens, total_tokens=total)


def usage_of(choices: Sequence[ChoiceState], per_prompt: int) -> Usage:
    """Usage of a request. Each run of `per_prompt` choices shares a prompt, which counts once."""
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
