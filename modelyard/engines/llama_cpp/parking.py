"""Conversations that had to make room, kept in memory until they come back: bounded, and the oldest go first. Pure.

A context has few sequences, and an agent more conversations: its own, its sub-agents', and errands in the background.
Whoever must wait for the next turn outside of the context comes back at memory speed instead of being read anew.
"""

from __future__ import annotations

from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.image import Image
from modelyard.engines.llama_cpp.sequences import Adapters, Ids


class Lot:
    """All parked conversations of one cache. `limit` is in bytes, for all of them together; 0: none is kept."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._parked: list[Image] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._parked)

    def has_room(self, size: int) -> bool:
        """Before the copy is made: it may be too large for all that there is."""
        return size <= self.limit

    def park(self, image: Image) -> None:
        for older in [one for one in self._parked if _goes_on(image, one)]:
            self.remove(older)
        while self._parked and self.size + image.size > self.limit:
            self.remove(self._parked[0])
        if self.has_room(image.size):
            self._parked.append(image)
            self.size += image.size

    def best(self, wanted: Ids, adapters: Adapters, *, can_cut: bool) -> tuple[Image, int] | None:
        """Which of them stands for most of the wanted tokens, and for how many."""
        found = [(sequences.reach(one, wanted, adapters, can_cut=can_cut), one) for one in self._parked]
        most, image = max(found, key=lambda each: each[0], default=(0, None))
        return (image, most) if image is not None and most else None

    def remove(self, image: Image) -> None:
        self._parked = [one for one in self._parked if one is not image]
        self.size = sum(one.size for one in self._parked)

    def forget(self, adapter: str) -> None:
        """It goes: KV of its time would be another's if its name came back."""
        for image in [one for one in self._parked if any(name == adapter for name, _ in one.adapters)]:
            self.remove(image)

    def clear(self) -> None:
        self._parked, self.size = [], 0


def _goes_on(image: Image, older: Image) -> bool:
    """It is the same conversation, later: all that the older one holds stands in it, too."""
    if image.adapters != older.adapters:
        return False
    return sequences.common(image.tokens, older.tokens) == len(older.tokens)
