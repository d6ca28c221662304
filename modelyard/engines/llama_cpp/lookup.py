"""Guesses from a job's own text: where its last tokens stood before, what followed them then may follow again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GRAM = 3  # tokens that must be alike: two are found everywhere, four too late
_BITS = 21  # of a token id: three of them in one integer that is exact, so nothing is looked up by a mere hash
_BITE = 4096  # tokens taken in at a time: a prompt of 100,000 that was cached must not hold up a step


class Lookup:
    """Prompt and output so far, and where each run of three tokens stood last. A token costs one entry, once."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._places: dict[int, int] = {}  # what follows the run of three
        self._taken = 0  # tokens whose runs have their place
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        self._ids += ids

    def guess(self, count: int) -> list[int]:
        """What may come next, `count` tokens of it, or nothing. Cheap to ask at every token, and meant to be asked so:
        long texts are taken in by and by."""
        self._take_in()
        if self._taken < len(self._ids) or len(self._ids) < _GRAM:
            return []
        place = self._places.get(_key(self._ids[-_GRAM:]))
        return [] if place is None else self._from(place, count)

    def _from(self, place: int, count: int) -> list[int]:
        """A text that repeats itself goes on for as long as one likes: behind its end it begins again."""
        found = self._ids[place : place + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _take_in(self) -> None:
        """The last run has nothing behind it yet: it must not find itself."""
        ids, first = self._ids, max(self._taken, _GRAM)
        end = min(len(ids), first + _BITE)
        if end - first < 32:  # below it numpy costs more than it saves
            for at in range(first, end):
                self._places[_key(ids[at - _GRAM : at])] = at
        else:
            self._places.update(zip(_keys(ids[first - _GRAM : end - 1]), range(first, end), strict=True))
        self._taken = max(self._taken, end)


def _key(run: Sequence[int]) -> int:
    a, b, c = run
    return a << 2 * _BITS | b << _BITS | c


def _keys(ids: Sequence[int]) -> list[int]:
    """Of each run of three in a row."""
    held = np.asarray(ids, np.int64)
    keys: list[int] = (held[:-2] << 2 * _BITS | held[1:-1] << _BITS | held[2:]).tolist()
    return keys
