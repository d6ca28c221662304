"""Whether guessing tokens pays: what a guessed row costs, how often guesses come true, and how many to make. Pure.

A step that moves `streams` on takes T seconds, and each guessed row makes it c longer. The tokens that a row brings are
its chance to come true; the same seconds would bring c · streams / T tokens without it. So that is a row's `price`: the
chance from which on it pays. Guesses come true in a row, so the n-th has a chance of acceptanceⁿ.
"""

from __future__ import annotations

from math import log

_GUESS = 0.4  # a row's price until one was measured: less than what a small model on a CPU comes to, so it is tried
_CHANCE, _WEIGHT = 0.5, 2.0  # how often a new job's guesses come true, and how many guesses that opinion counts for
_SHARE = 0.1  # of a new measurement in what is believed
_FORGET = 1 / 256  # a step: what made guessing dear or vain may be over, and only trying shows it
_MEMORY = 24.0  # guesses: older ones count less and less
_OUTLIER = 4.0  # times what is believed: another process had the core


class Price:
    """One cache's: learned from how long its steps took."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step without guesses, by its streams
        self._row: float | None = None  # seconds of one guessed row more

    def of(self, streams: int) -> float:
        """Too dear to try where nobody knows yet what a step without guesses takes."""
        plain = self._plain.get(streams)
        if not plain:
            return 1.0
        return _GUESS if self._row is None else min(1.0, self._row * streams / plain)

    def observe(self, streams: int, guessed: int, seconds: float) -> None:
        """A step that only moved streams on; `guessed` of its rows were guesses."""
        plain = self._plain.get(streams, 0.0 if guessed else seconds)
        if not guessed:
            self._plain[streams] = _nearer(plain, seconds, _SHARE)
            if self._row is not None:
                self._row = _nearer(self._row, _GUESS * plain / streams, _FORGET)
        elif plain:
            found = max(0.0, seconds - plain) / guessed
            self._row = found if self._row is None else _nearer(self._row, found, _SHARE)


def _nearer(held: float, found: float, share: float) -> float:
    return held + share * (min(found, _OUTLIER * held) - held)


class Record:
    """One job's: how often its guesses came true of late."""

    def __init__(self) -> None:
        self._kept, self._tried = _CHANCE * _WEIGHT, _WEIGHT

    @property
    def acceptance(self) -> float:
        return self._kept / self._tried

    def note(self, guessed: int, kept: int) -> None:
        """Those behind the first miss were never tried."""
        fade = 1 - 1 / _MEMORY
        for true in [True] * kept + [False] * (kept < guessed):
            self._kept, self._tried = self._kept * fade + true, self._tried * fade + 1

    def rest(self) -> None:
        """A step without evidence."""
        self._kept += _FORGET * (_CHANCE * _WEIGHT - self._kept)
        self._tried += _FORGET * (_WEIGHT - self._tried)


def width(acceptance: float, price: float, most: int) -> int:
    """How many tokens to guess: as many as each pay for themselves."""
    if price >= 1 or acceptance <= price:
        return 0
    if acceptance >= 1 or price <= 0:
        return most
    return min(most, int(log(price) / log(acceptance)))
