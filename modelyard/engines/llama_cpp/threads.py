"""How many threads compute a step: as many as pay on this machine now.

llama.cpp's threads wait for each other at every layer, and they spin while they wait. If another program has one of the
cores, all of them wait for the thread that has none: on two cores at a load of ten, 24 tokens took 7 to 14 s with two
threads and 1.2 to 1.7 s with one. How many cores are free is not known beforehand, and it changes. So the times of the
steps decide. Now and then a few steps run with the next smaller or larger number; if they are faster, it stays. That
happens soon after the times of the steps have changed, and more and more rarely while nothing changes: a try never
costs more than a small share of the time.

The numbers that a user sets are used as they are.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from modelyard.engines.llama_cpp.batch import LlamaBatch, VectorBatch
from modelyard.engines.llama_cpp.binding import lib, short

_TRIED_STEPS = 6
_BETTER = 0.93  # of the usual time of a step: what a try must beat, since times vary
_HOPELESS = 1.8  # of the usual time: ends a try
_SOON_S, _LATE_S = 0.25, 8.0  # of computing between two tries
_SHARE = 15  # a step is tried after as many times its duration
_SLOW, _FAST = 0.05, 0.3  # weights of a new time in the usual one, and in the present one
_CHANGED = 1.5  # the present time against the usual one, or the reverse


class _Pace(Struct):
    """Seconds per row of steps of one size, with the present number of threads."""

    usual: float
    present: float
    steps: int = 1

    def add(self, seconds: float) -> int:
        """1 if steps have become slower, -1 if faster, else 0."""
        self.steps += 1
        self.present += _FAST * (seconds - self.present)
        self.usual += max(_SLOW, 1 / self.steps) * (seconds - self.usual)
        if self.steps < _TRIED_STEPS or 1 / _CHANGED < self.present / self.usual < _CHANGED:
            return 0
        slower, self.usual = self.present > self.usual, self.present
        return 1 if slower else -1


class _Try(Struct):
    """Some steps with another number of threads."""

    place: int
    size: int
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0


class ThreadCount:
    """Pure: the times are arguments."""

    def __init__(self, most: int) -> None:
        self._counts = _worth_trying(most)
        self._place = len(self._counts) - 1
        self._paces: dict[int, _Pace] = {}  # by size of a step: its rows, in powers of two
        self._try: _Try | None = None
        self._direction = -1  # of the next try, in places
        self._interval, self._computed = _SOON_S, 0.0

    def __repr__(self) -> str:
        return f"<ThreadCount {self._counts[self._place]} of {self._counts[-1]}>"

    def next(self, rows: int) -> int:
        """The number of threads for a step with so many rows."""
        size = rows.bit_length()
        if self._try is None and self._is_time_for_a_try(rows, size):
            if self._place == (0 if self._direction < 0 else len(self._counts) - 1):
                self._direction = -1 if self._direction > 0 else 1
            self._try = _Try(min(max(0, self._place + self._direction), len(self._counts) - 1), size)
        place = self._try.place if self._try is not None and self._try.size == size else self._place
        return self._counts[place]

    def _is_time_for_a_try(self, rows: int, size: int) -> bool:
        pace = self._paces.get(size)
        if len(self._counts) == 1 or pace is None or pace.steps < _TRIED_STEPS:
            return False
        return self._computed >= max(self._interval, _SHARE * pace.usual * rows)

    def took(self, rows: int, seconds: float) -> None:
        """What `next` was asked for has been computed."""
        size = rows.bit_length()
        if self._try is not None and self._try.size == size:
            self._add_to_try(self._try, rows, seconds)
            return
        self._computed += seconds
        if (pace := self._paces.get(size)) is None:
            self._paces[size] = _Pace(seconds / rows, seconds / rows)
        elif change := pace.add(seconds / rows):
            self._interval, self._computed, self._direction = _SOON_S, max(self._computed, _SOON_S), -change

    def _add_to_try(self, tried: _Try, rows: int, seconds: float) -> None:
        tried.steps, tried.rows, tried.seconds = tried.steps + 1, tried.rows + rows, tried.seconds + seconds
        usual = self._paces[tried.size].usual
        if tried.steps < _TRIED_STEPS and tried.seconds < _HOPELESS * usual * max(tried.rows, _TRIED_STEPS * rows // 2):
            return
        self._try, self._computed = None, 0.0
        if tried.seconds < _BETTER * usual * tried.rows:
            self._place, self._interval, self._direction = tried.place, _SOON_S, 2 * self._direction
            pace = tried.seconds / tried.rows
            self._paces = {tried.size: _Pace(pace, pace)}
        else:
            self._direction = -1 if self._direction > 0 else 1
            self._interval = min(2 * self._interval, _LATE_S)


def _worth_trying(most: int) -> tuple[int, ...]:
    """All, one fewer for a neighbour that needs a core, and then in steps of a quarter."""
    counts = {most, max(1, most - 1)}
    while most > 1:
        most = max(1, min(most - 1, most * 3 // 4))
        counts.add(most)
    return tuple(sorted(counts))


class AdaptiveThreads:
    """Decodes batches of the contexts of a model, which share a thread pool. Belongs to the engine's thread."""

    def __init__(self, most: int) -> None:
        self._count = ThreadCount(most)
        self._set: dict[Any, int] = {}  # by context: what llama.cpp was told

    def decode(self, context: Any, batch: LlamaBatch | VectorBatch) -> int:
        rows = int(batch.raw.n_tokens)
        threads = self._count.next(rows)
        if self._set.get(context) != threads:
            short.set_n_threads(context, threads, threads)
            self._set[context] = threads
        started = time.perf_counter()
        code: int = lib.llama_decode(context, batch.raw)
        self._count.took(rows, time.perf_counter() - started)
        return code
