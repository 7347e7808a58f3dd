"""Verifies a draft while it is written: segment by segment as they are complete, one call at a time.

While a call is under way, more segments become complete; the next call is about all of them. So a slow target gets few
calls, and at the end of the draft only what came last is left to ask.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from parse_infer.judge.cuts import Segmenter

Ask = Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]]
"""Validities of a draft (target tokens) at some cuts."""

# A segment is complete when something other than whitespace follows its end.
_MAY_END = {"step": re.compile(r"\n\s*\S"), "sentence": re.compile(r"[.!?]\S*\s+\S"), "tokens": re.compile(r"\S")}
_OVERLAP = 8  # characters: an end may be told by what follows it


class Checks:
    """Of one draft.

    Args:
        choose: of all cuts of a draft those that are worth asking about while it is written.
        threshold: the first cut below it ends the draft; None: no cut does.
        start: makes a task.

    Attributes:
        draft: what was known of it when `look` was called last.
        broken_at: the cut that has ended it.
        failure: why it cannot be judged.
        stop: called when the draft is broken or cannot be judged.
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
        self.broken_at: int | None = None
        self.failure: Exception | None = None
        self.stop: Callable[[], object] = lambda: None
        self._ask, self._segmenter, self._choose = ask, segmenter, choose
        self._threshold, self._start = threshold, start
        self._may_end = _MAY_END[segmenter.policy.kind]
        self._looked = 0  # characters
        self._least = segmenter.policy.every if segmenter.policy.kind == "tokens" else 0
        self._looked_tokens = 0
        self._complete: list[int] = []
        self._known: dict[int, float] = {}
        self._asked: Sequence[int] = ()  # in the call that is under way
        self._asking: asyncio.Task[None] | None = None

    def look(self, text: str, n: int, draft: Callable[[], Sequence[int]]) -> None:
        """The draft has become longer.

        Args:
            text: of the draft so far.
            n: how many tokens that is, of whichever model.
            draft: its target tokens; called only where a segment may be complete.
        """
        if n - self._looked_tokens < self._least or not self._may_end.search(text, self._looked):
            return
        self._looked, self._looked_tokens = max(0, len(text.rstrip()) - _OVERLAP), n
        self._follow(list(draft()))
        self._complete = self._choose(self._segmenter.cuts(self.draft))[:-1]
        if self._asking is None or self._asking.done():
            self._asking = self._start(self._ask_on())

    async def of(self, draft: Sequence[int], cuts: Sequence[int]) -> list[float]:
        """Validities of the whole draft at all its cuts: what is not known or on its way is asked now.

        Raises as asking does, also for what was asked before.
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
        if missing:  # the call under way was about tokens that have become others
            self._known.update(zip(missing, await self._ask(self.draft, missing), strict=True))
        return [self._known[cut] for cut in cuts]

    async def _ask_on(self) -> None:
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
                    self.broken_at = cut
                    self.stop()
                    return

    def _follow(self, draft: list[int]) -> None:
        """Text that goes on may change how its end is cut into tokens."""
        pairs = zip(self.draft, draft, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.draft), len(draft)))
        self._known = {cut: validity for cut, validity in self._known.items() if cut <= same}
        self.draft = draft
