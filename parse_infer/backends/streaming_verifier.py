"""Verify a draft while it is written: complete segments in one call at a time.

The next call covers all segments that became complete during the last one. So a slow target gets few calls, and the
end of the draft leaves only the last segments to verify.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from parse_infer.judge.cuts import Segmenter

Ask = Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]]
"""Returns the validities of a draft (target tokens) at the given cuts."""

_OVERLAP = 8  # characters to search again: a later character may complete a segment's end


class StreamingVerifier:
    """Verifies one draft.

    Args:
        choose: selects the cuts to verify while the draft is written.
        threshold: the first cut with a lower validity ends the draft; None: no cut ends it.
        start: starts a task.

    Attributes:
        draft: target tokens of the draft at the last `update`.
        rejected_at: the cut that ended the draft.
        failure: error of the judge.
        stop: called when a cut ends the draft or the judge fails.
    """

    def __init__(
        self,
        ask: Ask,
        segmenter: Segmenter,
        choose: Callable[[Sequence[int]], list[int]],
        threshold: float | None,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.draft: list[int] = []
        self.rejected_at: int | None = None
        self.failure: Exception | None = None
        self.stop: Callable[[], object] = lambda: None
        self._ask, self._segmenter, self._choose = ask, segmenter, choose
        self._threshold, self._start = threshold, start
        self._may_end = segmenter.policy.rule.may_end
        self._searched = 0  # characters
        self._least = segmenter.policy.every if segmenter.policy.rule.by_tokens else 0
        self._searched_tokens = 0
        self._complete: list[int] = []
        self._known: dict[int, float] = {}
        self._asked: Sequence[int] = ()  # in the current call
        self._asking: asyncio.Task[None] | None = None

    def update(self, text: str, n: int, draft: Callable[[], Sequence[int]]) -> None:
        """Verify newly complete segments of a longer draft.

        Args:
            text: text of the draft so far.
            n: number of its tokens, of either model.
            draft: returns its target tokens; called only if a segment may be complete.
        """
        if n - self._searched_tokens < self._least or not self._may_end.search(text, self._searched):
            return
        self._searched, self._searched_tokens = max(0, len(text.rstrip()) - _OVERLAP), n
        self._follow(list(draft()))
        self._complete = self._choose(self._segmenter.cuts(self.draft))[:-1]
        if self._asking is None or self._asking.done():
            self._asking = self._start(self._verify_complete())

    async def of(self, draft: Sequence[int], cuts: Sequence[int]) -> list[float]:
        """Validities of the whole draft at all cuts; requests those that are neither known nor pending.

        Raises the errors of `ask`, also of earlier calls.
        """
        self._follow(list(draft))
        self._complete = []
        asking = self._asking if self._asking is not None and not self._asking.done() else None
        missing = [cut for cut in cuts if cut not in self._known and (asking is None or cut not in self._asked)]
        if missing:
            self._known.update(zip(missing, await self._ask(self.draft, missing), strict=True))
        if self._asking is not None:
            await self._asking
        if self.failure is not None:
            raise self.failure
        missing = [cut for cut in cuts if cut not in self._known]
        if missing:  # the pending call verified tokens that have changed since
            self._known.update(zip(missing, await self._ask(self.draft, missing), strict=True))
        return [self._known[cut] for cut in cuts]

    async def _verify_complete(self) -> None:
        while cuts := [cut for cut in self._complete if cut not in self._known]:
            draft, self._asked = self.draft, cuts
            try:
                found = await self._ask(draft, cuts)
            except (ValueError, OSError) as error:
                self.failure = error
                self.stop()
                return
            for cut, validity in zip(cuts, found, strict=True):
                if draft[:cut] != self.draft[:cut]:
                    break
                self._known[cut] = validity
                if self._threshold is not None and not validity >= self._threshold:
                    self.rejected_at = cut
                    self.stop()
                    return

    def _follow(self, draft: list[int]) -> None:
        """Drop validities of tokens that changed: longer text may tokenize its end differently."""
        pairs = zip(self.draft, draft, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.draft), len(draft)))
        self._known = {cut: validity for cut, validity in self._known.items() if cut <= same}
        self.draft = draft
