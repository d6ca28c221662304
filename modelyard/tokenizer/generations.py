"""The memory of the token cache, bounded in bytes: what was not asked for during a whole generation is forgotten.

Reads take no lock: a dictionary look-up is atomic, and a generation that was just replaced still holds true answers.
Only what is stored takes it, to be booked.
"""

from __future__ import annotations

import sys
from threading import Lock

_TOKEN_BYTES = 40  # a reference and an int


class Generations:
    """Ids by stretch. Two dictionaries instead of an ordered one: a hit in the young one changes nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self.young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._limit = limit_bytes // 2
        self._spent = 0
        self._lock = Lock()

    def __contains__(self, key: str) -> bool:
        return key in self.young or key in self._old

    def get(self, key: str) -> list[int] | None:
        return self.young.get(key) or self.revived(key)

    def revived(self, key: str) -> list[int] | None:
        """Of the old generation: what is asked for is young again."""
        if (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: str, ids: list[int]) -> None:
        with self._lock:
            if key in self.young:
                return
            self._spent += sys.getsizeof(key) + _TOKEN_BYTES * len(ids) + 100
            if self._spent > self._limit:
                self._old, self.young, self._spent = self.young, {}, 0
            self.young[key] = ids
