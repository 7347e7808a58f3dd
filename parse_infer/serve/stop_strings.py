"""Stop strings as OpenAI's API has them: the answer ends before the first of them, and no part of one is ever sent."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text that grows, released without stop strings. The engine ends its text right behind the first one.

    Attributes:
        text: all that was released.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.text = ""
        self._strings = strings
        self._held = ""

    def add(self, text: str) -> str:
        """Take more text; return what cannot be part of a stop string."""
        text = self._held + text
        begun = 0  # the longest end of the text that a stop string begins with
        for string in self._strings:
            sizes = range(min(len(string), len(text)), begun, -1)
            begun = next((size for size in sizes if text.endswith(string[:size])), begun)
        return self._release(text, begun)

    def finish(self, stopped: bool) -> str:
        """The rest; without the stop string at its end, if the answer was `stopped` by one."""
        ends = (len(string) for string in self._strings if stopped and self._held.endswith(string))
        return self._release(self._held, max(ends, default=0))

    def _release(self, text: str, behind: int) -> str:
        end = len(text) - behind
        self._held = text[end:]
        self.text += text[:end]
        return text[:end]
