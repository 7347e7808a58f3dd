"""`Request`: one prompt with its settings, its growing answer and its costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from parse_infer.judge.carried import Carried
from parse_infer.request.answer import Answer
from parse_infer.request.events import Accepted
from parse_infer.request.output import Fallback, Generation, Segment, Statistics, Timings
from parse_infer.settings.generation import BlockTokens, GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Prompt, RenderedPrompt, left_context
from parse_infer.text.tokenizer_spec import TokenizerSpec


class Request:
    """Owns the `Answer` to one prompt and its counts.

    Attributes:
        carried: the judge's state after the last accepted draft token, for answers that come in blocks.
        thinking: with `strict_answer`: where the thinking ends.

    Args:
        prompt: as the caller gave it.
        writer: the model whose tokens form the answer: the target, or the draft model if it answers alone.
        settings: the budget is `max_new_tokens`, limited by the rest of the writer's context window.
        sampling: how `writer` samples.

    Raises:
        ValueError: an empty prompt, a prompt beyond the context window, or a stop token unknown to the writer.
    """

    def __init__(
        self, prompt: Prompt, writer: TokenizerSpec, settings: GenerationSettings, sampling: Sampling
    ) -> None:
        self.prompt = RenderedPrompt.of(prompt)
        self.prompt_ids = writer.render(self.prompt)
        self.settings = settings
        self.sampling = sampling
        budget = min(settings.max_new_tokens, writer.window - len(self.prompt_ids))
        before = left_context(prompt, self.prompt_ids, writer.tokenizer)
        writer.check_tokens(settings.stop_token_ids)
        self.answer = Answer(
            writer.tokenizer,
            writer.eos_ids,
            settings.stop,
            budget,
            before,
            ignore_eos=settings.ignore_eos,
            stop_token_ids=settings.stop_token_ids,
            min_tokens=settings.min_tokens,
        )
        self.stats = Statistics()
        self.timings = Timings()
        self.thinking = writer.thinking(prompt, self.prompt_ids) if settings.strict_answer else None
        self.fallback: Fallback | None = None
        self.lossless = False
        self.carried = Carried()
        self._started = self._last_text = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def plan_as(self, lossless: bool, block_tokens: BlockTokens | None = None) -> None:
        """Record how the answer is written: `Generation.lossless` and `Statistics.block_tokens`."""
        self.lossless, self.stats.block_tokens = lossless, block_tokens

    def fall_back(self, reason: Fallback) -> None:
        """Record that the target writes the rest, and why."""
        self.fallback = reason

    def count_forwards(self, target: int = 0, draft: int = 0, drafter: int = 0) -> None:
        """Add forwards of the target, the draft model and the token drafter."""
        self.stats.target_forwards += target
        self.stats.draft_forwards += draft
        self.stats.drafter_forwards += drafter

    def note_text(self) -> None:
        """Record that the consumer gets new text now."""
        now, timings = time.perf_counter() - self._started, self.timings
        if timings.first_text_s is None:
            timings.first_text_s = now
        else:
            timings.longest_wait_s = max(timings.longest_wait_s, now - self._last_text)
        self._last_text = now

    @property
    def context(self) -> list[int]:
        """Prompt and answer so far, in the writer's tokens."""
        return self.prompt_ids + self.answer.ids

    @property
    def kept(self) -> int | None:
        """Accepted draft tokens; None at a threshold above 1, which accepts no token for its validity."""
        threshold = self.settings.threshold
        return None if threshold is not None and threshold > 1 else self.stats.accepted_tokens

    def accept(
        self, round: int, draft: Sequence[int], segments: Sequence[Segment], tail: int, joins: bool = False
    ) -> Accepted:
        """Add the accepted segments of the draft and the next `tail` draft tokens to the answer.

        Args:
            joins: the tokens extend the last span, because where a block ended means nothing.
        """
        text, cut = "", 0
        for segment in segments:
            text += self.answer.add(draft[cut : cut + segment.n_tokens], "draft", segment.validity, joins)
            cut += segment.n_tokens
        text += self.answer.add(draft[cut : cut + tail], "draft", joins=joins)
        rejected = draft[cut + tail :]
        self.stats.rounds = round
        self.stats.verification_passes += bool(draft)
        self.stats.draft_tokens += len(draft)
        self.stats.blocks += [len(draft)] if draft else []
        self.stats.accepted_tokens += cut + tail
        self.stats.exact_tail_tokens += tail
        return Accepted(round, text, cut + tail, "".join(self.answer.preview(rejected, [len(rejected)])))

    def result(self) -> Generation:
        """The finished answer."""
        self.timings.total_s = time.perf_counter() - self._started
        answer = self.answer
        assert answer.finish_reason is not None
        parts = answer.text, answer.ids, answer.spans, answer.finish_reason
        return Generation(*parts, self.stats, self.timings, self.fallback, self.lossless)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to a field of `timings`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.timings, name, getattr(self.timings, name) + time.perf_counter() - start)
