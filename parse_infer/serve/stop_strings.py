"""Stop strings as in OpenAI's API: the answer ends before the first, and no part of a stop string is sent."""

from __future__ import annotations

from collections.abc import Sequence


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
        begun = 0  # length of the longest suffix of the text that begins a stop string
        for string in self._strings:
            sizes = range(min(len(string), len(text)), begun, -1)
            begun = next((size for size in sizes if text.endswith(string[:size])), begun)
        return self._release(text, begun)

    def finish(self, stopped: bool) -> str:
        """Release the rest, without the stop string at its end if a stop string ended the answer (`stopped`)."""
        ends = (len(string) for string in self._strings if stopped and self._held.endswith(string))
        return self._release(self._held, max(ends, default=0))

    def _release(self, text: str, behind: int) -> str:
        end = len(text) - behind
        self._held = text[end:]
        self.text += text[:end]
        return text[:end]
