"""Sequential verification, one step at a time, as SpecReason does it (arXiv 2504.07891): what PARSE is compared with.

The draft model writes one segment; the target reads it and judges it; a segment that is judged valid stays, any other
one the target writes itself. Same judge, same caches and same decode loop as PARSE, so that only the order of work
differs: one target forward per segment, and the draft model waits for each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from parse_infer.decoder import Decoder
from parse_infer.drafters.model import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.generation import Generation, GenerationSettings
from parse_infer.loading import LanguageModel
from parse_infer.prompts import Prompt
from parse_infer.request import Request
from parse_infer.sampling import Sampling
from parse_infer.segments import Segmenter


class SequentialVerification:
    """Answers prompts with the target, draft model and judge of `engine`, greedily.

    Raises:
        ValueError: the engine has no draft model or no judge.
    """

    def __init__(self, engine: ParseEngine) -> None:
        if engine.draft is None or engine.judge is None:
            raise ValueError("sequential verification needs a draft model and an adapter: give both")
        self._probe_len = len(engine.judge.probe.ids)
        self._engine = engine
        self._drafter = ModelDrafter(_one_segment_at_a_time(engine.draft, engine), engine.target)

    def generate(self, prompt: Prompt, settings: GenerationSettings) -> Generation:
        """Answer one prompt. Of the settings, `max_new_tokens`, `threshold` and `stop` apply."""
        engine, drafter = self._engine, self._drafter
        target, verifier = engine.target.decoder, engine.verifier
        threshold = engine.threshold if settings.threshold is None else settings.threshold
        request = Request(prompt, engine.target, settings, Sampling())
        answer, stats = request.answer, request.stats
        target_before, draft_before = target.forwards, drafter.forwards
        drafter.reset(prompt, Sampling(), settings.stop)
        request.start()
        while answer.open:
            room = min(answer.room, engine.target.window - self._probe_len - len(request.context))
            draft = answer.clip(drafter.propose(answer.ids, room).ids, room) if room > 0 else []
            target.seek(request.context)
            verification = verifier.verify(draft, cuts=[len(draft)] if draft else [])
            stats.rounds += 1
            stats.draft_tokens += len(draft)
            stats.verification_passes += bool(draft)
            if draft and verification.validity[0] >= threshold:
                stats.accepted_tokens += len(draft)
                answer.add(draft, "draft", verification.validity[0])
                continue
            target.seek(request.context)
            target.set_next_logits(target.logits(verification.hidden[0]))
            written: list[int] = []
            for token in target.decode(answer.room):
                written.append(token)
                answer.add([token], "target")
                if not answer.open or engine.segmenter.first_segment_end(written) is not None:
                    break
        stats.target_forwards = target.forwards - target_before
        stats.draft_forwards = drafter.forwards - draft_before
        return request.result()


class _SegmentDecoder:
    """A decoder whose decodes end with the first complete segment; in all else the one it stands for."""

    def __init__(self, decoder: Decoder, segmenter: Segmenter) -> None:
        self._decoder = decoder
        self._segmenter = segmenter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decode(
        self, max_new_tokens: int, sampling: Sampling | None = None, generator: torch.Generator | None = None
    ) -> Iterator[int]:
        written: list[int] = []
        for token in self._decoder.decode(max_new_tokens, sampling, generator):
            written.append(token)
            yield token
            if self._segmenter.first_segment_end(written) is not None:
                return


def _one_segment_at_a_time(draft: LanguageModel, engine: ParseEngine) -> LanguageModel:
    """The same loaded draft model with a decoder that stops after a segment."""
    stopping = copy.copy(draft)
    segmenter = Segmenter(draft.tokenizer, engine.segmenter.policy)
    stopping.decoder = _SegmentDecoder(draft.decoder, segmenter)  # type: ignore[assignment]
    return stopping
