"""Sessions: requests with a common beginning, which one replica's prefix cache should have.

All turns of a conversation are one session. Conversations that only begin alike are different ones, because a router
in front of the servers may send a whole session to one replica, however much that has to do.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from parse_infer.backends.pool.origin import SESSION_ID, origin
from parse_infer.text.conversation import Conversation
from parse_infer.text.prompts import RenderedPrompt

_REMEMBERED = 1 << 16  # turns
_ALIKE = 16  # sessions of the last conversations with the same turn


@dataclass(frozen=True)
class Session:
    """
    Attributes:
        id: the header `X-Session-ID` of all requests to servers.
        returns: later requests may belong to it.
    """

    id: str
    returns: bool = True


class Sessions:
    """Gives each conversation its session.

    A turn has the session of the turn before, the longest of its beginnings that was a request here. Without one the
    id is `Conversation.begin`, as in all processes, so that a conversation keeps it wherever its turns go. The next
    conversation with that beginning gets a random id. A client's own `X-Session-ID` is the id of its requests.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, list[str]] = OrderedDict()  # by turn; and by beginning, for those given out
        self._of_prompts: WeakKeyDictionary[RenderedPrompt, Session] = WeakKeyDictionary()

    def of_prompt(self, prompt: RenderedPrompt) -> Session:
        """Return the session of all answers to a prompt."""
        if (session := self._of_prompts.get(prompt)) is None:
            session = self._of_prompts[prompt] = self.of(Conversation.of(prompt))
        return session

    def of(self, conversation: Conversation | None) -> Session:
        """Return the session of a conversation's turn, or one of its own for another request (None)."""
        if (own := origin.get().get(SESSION_ID)) is not None:
            return Session(own)
        if conversation is None:
            return Session(uuid.uuid4().hex, returns=False)
        id = self._continued(conversation) or self._new(conversation)
        self._remember(conversation.turns[-1], id)
        return Session(id)

    def _continued(self, conversation: Conversation) -> str | None:
        for turn in reversed(conversation.turns[:-1]):
            if ids := self._ids.get(turn):
                ids.insert(0, ids.pop())  # the next conversation with the same turn takes another id
                return ids[0]
        return None

    def _new(self, conversation: Conversation) -> str:
        beginning = f"begin {conversation.begin}"
        id = uuid.uuid4().hex if beginning in self._ids else conversation.begin
        self._remember(beginning, id)
        return id

    def _remember(self, key: str, id: str) -> None:
        ids = self._ids.setdefault(key, [])
        if id not in ids:
            ids.append(id)
        del ids[:-_ALIKE]
        self._ids.move_to_end(key)
        if len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)
