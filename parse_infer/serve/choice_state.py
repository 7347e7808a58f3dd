"""State of one answer of a request: the client's text so far, statistics and token usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict

from parse_infer.request.events import Accepted, Done, Drafted, Event, Resumed, Verified
from parse_infer.request.output import Fallback, Generation, Source, Span
from parse_infer.serve.reasoning import ReasoningSplitter, begun_length
from parse_infer.serve.runner import Job, Moment


class Part(BaseModel):
    """A stretch of the answer by one author, with the validity of the answer up to its end."""

    model_config = ConfigDict(extra="forbid")
    text: str
    source: Source
    n_tokens: int
    validity: float | None = None


class Seconds(BaseModel):
    """Timings. `waiting_s`: time in the queue; `first_text_s`: from the request to the first text; `longest_wait_s`:
    longest time without new text after it."""

    model_config = ConfigDict(extra="forbid")
    draft_s: float
    verify_s: float
    resume_s: float
    total_s: float
    longest_wait_s: float
    waiting_s: float
    first_text_s: float | None


class ParseStatistics(BaseModel):
    """Authors, cost and risk promise of one answer."""

    model_config = ConfigDict(extra="forbid")
    spans: list[Part]
    kept: float
    """Share of the draft tokens that became part of the answer."""
    draft_tokens: int
    accepted_tokens: int
    exact_tail_tokens: int
    rounds: int
    target_forwards: int
    draft_forwards: int
    drafter_forwards: int
    verification_passes: int
    block_tokens: int | Literal["auto", "whole"] | None
    """What the request's `block_tokens` became; None without drafts."""
    blocks: list[int]
    """Draft tokens of each block that the target read."""
    risk: float | None
    """The risk promise of this answer: at most this share of such requests is lost."""
    fallback: Fallback | None
    """Why the target answered without the requested draft. Such an answer has no risk promise."""
    unpromised: str | None
    """Why the server's risk promise does not cover the answer; None: it does."""
    timings: Seconds


class StopStrings:
    """Releases growing text without stop strings. The engine ends its text right after the first stop string.

    Attributes:
        text: all released text.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.text = ""
        self._strings = strings
        self._held = ""

    def add(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop string."""
        text = self._held + text
        return self._release(text, begun_length(text, self._strings))

    def finish(self, stopped: bool) -> str:
        """Release the rest, without the stop string at its end if a stop string ended the answer (`stopped`)."""
        ends = (len(string) for string in self._strings if stopped and self._held.endswith(string))
        return self._release(self._held, max(ends, default=0))

    def _release(self, text: str, behind: int) -> str:
        end = len(text) - behind
        self._held = text[end:]
        self.text += text[:end]
        return text[:end]


class ChoiceState:
    """Accumulates the events of one job."""

    def __init__(self, index: int, job: Job, prompt_tokens: int, asked_at: float) -> None:
        self.index = index
        self.job = job
        self.prompt_tokens = prompt_tokens
        self.generation: Generation | None = None
        self.first_text_s: float | None = None
        self.drafted = False
        self.tokens_so_far = 0
        self.unpromised: str | None = None
        self.asked_at = self.started_at = asked_at
        self._text, self.splitter = StopStrings(job.settings.stop), ReasoningSplitter(job.thinking)

    @property
    def text(self) -> str:
        """Text of the answer that may be sent so far."""
        return self._text.text

    @property
    def answer(self) -> Generation:
        assert self.generation is not None, "the answer has not ended"
        return self.generation

    @property
    def tokens(self) -> int:
        return len(self.answer.token_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "length" if self.answer.finish_reason == "length" else "stop"

    def take(self, moment: Moment) -> str:
        """Add an event; return the text that may be sent now."""
        event, text = moment.event, ""
        if isinstance(event, Drafted):
            self.drafted |= event.n_tokens > 0
        elif isinstance(event, (Accepted, Resumed)):
            self.tokens_so_far += event.n_tokens if isinstance(event, Accepted) else 1
            text = self._text.add(event.text)
        elif isinstance(event, Done):
            self.generation = event.generation
            self.started_at = moment.at - event.generation.timings.total_s
            text = self._text.finish(event.generation.finish_reason == "stop")
        if text and self.first_text_s is None:
            self.first_text_s = moment.at - self.asked_at
        return text

    def statistics(self) -> ParseStatistics:
        stats, timings = self.answer.stats, self.answer.timings
        return ParseStatistics(
            spans=self._parts(self.answer.spans),
            kept=stats.acceptance_rate,
            **asdict(stats),
            risk=None if self.answer.fallback else self.job.settings.risk,
            fallback=self.answer.fallback,
            unpromised=self.unpromised,
            timings=Seconds(
                **asdict(timings)
                | {"waiting_s": max(0.0, self.started_at - self.asked_at), "first_text_s": self.first_text_s}
            ),
        )

    def _parts(self, spans: list[Span]) -> list[Part]:
        """Spans without the stop string after the text; their texts concatenate to `text`."""
        parts, remaining = [], len(self.text)
        for span in spans:
            text = span.text[:remaining]
            remaining -= len(text)
            parts.append(Part(text=text, source=span.source, n_tokens=span.n_tokens, validity=span.validity))
        return parts


def event_body(event: Event) -> dict[str, object] | None:
    """JSON body of an event for clients that set `parse.events`; None for `Done`."""
    if isinstance(event, Done):
        return None
    name = type(event).__name__.lower()
    if isinstance(event, (Drafted, Accepted, Verified, Resumed)):
        return {"event": name, **asdict(event)}
    return {"event": name}


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
