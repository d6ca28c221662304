"""Why a cache missed: the system prompt of each cache by its fingerprint, and where a changed one leaves the old. Pure.

A client that changes its system prompt from request to request (a date, a counter, a list in another order) has
everything after the change read anew each time. Nobody sees that but the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from modelyard.core.request import Message, Text


class Change(Struct, frozen=True):
    """The fingerprints of the system prompt that a cache saw last and of the one that came."""

    before: str
    after: str


class Fingerprints:
    """What each cache saw last. A prompt that stays costs a look-up and a comparison; only a change is hashed."""

    def __init__(self) -> None:
        self._last: dict[str, Message] = {}

    def look(self, cache: str, system: Message) -> Change | None:
        """None for the first one and for one that stayed."""
        last = self._last.get(cache)
        if last == system:
            return None
        self._last[cache] = system
        return Change(fingerprint(last), fingerprint(system)) if last is not None else None


def fingerprint(message: Message) -> str:
    text = "\0".join(_texts(message))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def leading_system(messages: Sequence[Message]) -> Message | None:
    return messages[0] if messages and messages[0].role in ("system", "developer") else None


def message_at(prompt: str, position: int, messages: Sequence[Message]) -> int:
    """The index of the message that a character of the rendered prompt lies in: the last one whose own text begins at
    or before it. What a template writes around a message counts for the one before; at the head, for the first."""
    found = cursor = 0
    for index, message in enumerate(messages):
        text = next((text for text in _texts(message) if text), None)
        start = prompt.find(text, cursor) if text else -1
        if start < 0:
            continue  # a template may trim, move or leave out what it likes
        if start > position:
            break
        found, cursor = index, start + len(text or "")
    return found


def _texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text)]
