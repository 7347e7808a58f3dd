"""`Plan`: what kind of request this is, decided once, before the first token.

The engine resolves settings, judge and draft source into one plan. Both model pairs execute it, and the replay of
calibrations keys its memory on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parse_infer.decoding.block_length import LONGEST, REPLAYED, threshold_class
from parse_infer.settings.generation import BlockTokens, GenerationSettings

Judging = Literal["token", "cut"]


@dataclass(frozen=True)
class SourceKind:
    """What a source of drafts can do.

    Attributes:
        is_model: a draft model, which can continue after the target's own tokens.
        one_segment: it drafts one segment at a time.
        blocks: it can stop after a number of tokens.
        confidences: it reports its probability of each token, by which a block may end early.
        lossless: above a threshold of 1 its drafts propose the target's own tokens.
    """

    is_model: bool = False
    one_segment: bool = False
    blocks: bool = False
    confidences: bool = False
    lossless: bool = False


@dataclass(frozen=True)
class Plan:
    """How one answer is written.

    Attributes:
        threshold: accept a prefix whose validity is at least this; above 1 accepts nothing for its validity.
        lossless: no judge decides: mode "exact", or a threshold above 1.
        drafts: the source writes drafts at all.
        judged: the judge scores every token of a block, or the segmenter's cuts; None: it scores nothing.
        block: longest draft, in the draft model's tokens; None: the rest of the answer.
        ends_early: a block ends where one more token is no longer faster.
        after_rejection: the target writes one token, a segment, or the rest of the answer.
        keeps_greedy_match: draft tokens after the cut that equal the target's greedy choice are kept.
        pauses: the target writes alone for a while where blocks are slower.
        streamed: the caller reads the text while it is written.
        replayed: a calibration reuses parts of this answer under other settings.
        falls_back: if drafts or judge fail, the target writes the rest. False: the error is raised.
        answer: the plan after the target's thinking, if that is another one.
    """

    threshold: float
    lossless: bool
    drafts: bool
    judged: Judging | None
    block: int | None
    ends_early: bool
    after_rejection: Literal["token", "segment", "rest"]
    keeps_greedy_match: bool
    pauses: bool
    streamed: bool
    replayed: bool
    falls_back: bool
    answer: Plan | None = None

    @classmethod
    def of(
        cls,
        settings: GenerationSettings,
        source: SourceKind,
        *,
        judging: Judging | None,
        pauses: bool = False,
        streamed: bool = False,
        replayed: bool = False,
        falls_back: bool = True,
    ) -> Plan:
        """Resolve a request.

        Args:
            settings: with a threshold.
            judging: what the judge can score in a block: every token, or the segmenter's cuts; None without a judge.
            pauses: the target may write alone for a while, where blocks are slower.
        """
        threshold = settings.threshold
        assert threshold is not None, "the engine sets the threshold"
        exact, lossless = settings.mode == "exact", settings.mode == "exact" or threshold > 1
        drafts = exact or threshold <= 1 or (settings.keeps_greedy_match and source.lossless)
        by_token = lossless or judging == "token"
        usable = drafts and not source.one_segment and (settings.keeps_greedy_match or not lossless)
        continues = usable and _continues(settings.block_tokens, source, by_token)
        block, ends_early = _block(settings.block_tokens, source, replayed) if continues else (None, False)
        judged: Judging | None = "token" if continues and by_token else "cut"
        if exact or judging is None or (lossless and continues):
            judged = None
        after: Literal["token", "segment", "rest"] = "token" if by_token else "segment"
        paced = lossless or (settings.risk is None and settings.adaptive is not False)
        return cls(
            threshold=threshold,
            lossless=lossless,
            drafts=drafts,
            judged=judged,
            block=block,
            ends_early=ends_early,
            after_rejection="segment" if source.one_segment else after if continues else "rest",
            keeps_greedy_match=settings.keeps_greedy_match,
            pauses=pauses and ends_early and paced,  # a calibration knows none, and they change a judged answer
            streamed=streamed,
            replayed=replayed,
            falls_back=falls_back and not replayed,
        )

    @property
    def phases(self) -> list[Plan]:
        """The plans of an answer, one after the other."""
        return [self] if self.answer is None else [self, self.answer]

    @property
    def continues(self) -> bool:
        """Whether drafts go on after a rejection."""
        return self.after_rejection != "rest"

    @property
    def block_tokens(self) -> BlockTokens | None:
        """The rule of blocks, for statistics; None without blocks."""
        if not self.drafts or (self.block is None and self.after_rejection == "segment"):
            return None
        if self.ends_early or (self.block is None and self.continues):
            return "auto"
        return self.block or "whole"

    @property
    def measured_as(self) -> int:
        """The class of thresholds whose blocks are measured together."""
        return threshold_class(2.0 if self.lossless else self.threshold)


def _continues(length: BlockTokens, source: SourceKind, by_token: bool) -> bool:
    """Whether the source drafts again after the target's own tokens. A judge of segments may reject again and again
    what a draft model writes behind its own rejected tokens, so "auto" is "whole" for it."""
    if length == "whole":
        return False
    of_tokens = source.is_model and by_token
    return of_tokens or (isinstance(length, int) and source.blocks)


def _block(length: BlockTokens, source: SourceKind, replayed: bool) -> tuple[int | None, bool]:
    """The longest block (None: the rest of the answer), and whether it may end earlier."""
    if isinstance(length, int):
        return (length if source.blocks else None), False
    if not source.confidences:
        return None, False
    return (REPLAYED, False) if replayed else (LONGEST, True)  # no replayed length may depend on measured times
