"""What identifies the turns of a conversation, so that they find the prefix cache of the turns before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from parse_infer.text.prompts import Chat, RenderedPrompt, Verbatim


@dataclass(frozen=True)
class Conversation:
    """Hashes of parts of a chat.

    Attributes:
        begin: of the messages up to the first one of the user, which all turns share.
        before: of the messages without the last two, which are those of the turn before; None in the first turn.
        now: of all messages.
    """

    begin: str
    before: str | None
    now: str

    @classmethod
    def of(cls, prompt: RenderedPrompt) -> Conversation | None:
        """Return the conversation of a chat; None of another text, which may begin like all texts of a benchmark."""
        own = prompt.prompt
        if isinstance(own, str | Verbatim):
            return None
        messages = [dict(message) for message in (own.messages if isinstance(own, Chat) else own)]
        users = [n for n, message in enumerate(messages, 1) if message.get("role") == "user"]
        before = _hash(messages[:-2]) if len(users) > 1 else None
        return cls(_hash(messages[: users[0] if users else None]), before, _hash(messages))


def _hash(messages: Sequence[object]) -> str:
    return hashlib.blake2b(json.dumps(messages, default=str).encode(), digest_size=16).hexdigest()
