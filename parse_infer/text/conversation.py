"""What identifies the turns of a conversation, so that they find the prefix cache of the turns before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from parse_infer.text.prompts import Chat, RenderedPrompt, Verbatim


@dataclass(frozen=True)
class Conversation:
    """Hashes of a chat's beginnings.

    Attributes:
        begin: of the messages up to the first one of the user, which all turns share.
        turns: of the first message, of the first two, …, of all messages. One of them is the turn before.
    """

    begin: str
    turns: tuple[str, ...]

    @classmethod
    def of(cls, prompt: RenderedPrompt) -> Conversation | None:
        """Return the conversation of a chat; None of another text, which may begin like all texts of a benchmark."""
        own = prompt.prompt
        if isinstance(own, str | Verbatim):
            return None
        return cls.of_messages(own.messages if isinstance(own, Chat) else own)

    @classmethod
    def of_messages(cls, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Return the conversation of at least one message. Raises RecursionError for one that is nested too deeply."""
        beginning, turns = hashlib.blake2b(digest_size=16), list[str]()
        for message in messages:
            fields = ((str(name), value) for name, value in message.items() if value is not None)
            beginning.update(json.dumps(sorted(fields, key=itemgetter(0)), default=str).encode())
            turns.append(beginning.hexdigest())
        users = (turn for turn, message in zip(turns, messages, strict=True) if message.get("role") == "user")
        return cls(next(users, turns[-1]), tuple(turns))
