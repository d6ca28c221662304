"""Whether guessing tokens pays: what a guessed row costs, how often guesses come true, and how many to make. Pure.

A step that moves `streams` on takes T seconds, and each guessed row makes it c longer. The tokens that a row brings are
its chance to come true; the same seconds would bring c · streams / T tokens without it. So that is a row's `price`: the
chance from which on it pays. Guesses come true in a row, so the n-th has a chance of acceptanceⁿ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Protocol

import numpy as np
from msgspec import Struct

from modelyard.engines.llama_cpp.job import LlamaCppJob

_GUESS = 0.4  # a row's price until one was measured: less than what a small model on a CPU comes to, so it is tried
_CHANCE, _WEIGHT = 0.5, 2.0  # how often a new job's guesses come true, and how many guesses that opinion counts for
_SHARE = 0.1  # of a new measurement in what is believed
_FORGET = 1 / 256  # a step: what made guessing dear or vain may be over, and only trying shows it
_MEMORY = 24.0  # guesses: older ones count less and less
_OUTLIER = 4.0  # times what is believed: another process had the core


class DraftCost:
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


class AcceptanceRate:
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


def draft_length(acceptance: float, price: float, most: int) -> int:
    """How many tokens to guess: as many as each pay for themselves."""
    if price >= 1 or acceptance <= price:
        return 0
    if acceptance >= 1 or price <= 0:
        return most
    return min(most, int(log(price) / log(acceptance)))


# Guesses from a job's own text: where its last tokens stood before, what followed them then may follow again. Pure.

_GRAM = 3  # tokens that must be alike: two are found everywhere, four too late
_BITS = 21  # of a token id: three of them in one integer that is exact, so nothing is looked up by a mere hash
_BITE = 4096  # tokens taken in at a time: a prompt of 100,000 that was cached must not hold up a step


class NgramIndex:
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


# Speculation: several tokens a step, where guesses come true. Who guesses, how much, and what became of it.
#
# A guess is read together with the token before it, in one decode; then the job's own samplers draw after each row, one
# after the other, for as long as what they draw is what was guessed. So the text is the one that would have come without.

Drafts = dict[int, list[int]]  # by sequence


class Drafter(Protocol):
    """Who guesses. A job begins in a sequence and leaves it; in between it only grows."""

    is_free: bool  # guessing costs nothing, so what is not tried can still be compared with what came
    is_abreast: bool  # False where it had to read much before it could guess: such a step says nothing of its price

    def begin(self, sequence: int, job: LlamaCppJob) -> None: ...
    def guess(self, counts: Mapping[int, int]) -> Drafts:
        """At most so many tokens for each sequence that is counted."""
        ...

    def end(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class NgramDrafter:
    """Guesses from each job's own text."""

    is_free = is_abreast = True

    def __init__(self) -> None:
        self._texts: dict[int, tuple[LlamaCppJob, NgramIndex]] = {}

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        self._texts[sequence] = job, NgramIndex()

    def guess(self, counts: Mapping[int, int]) -> Drafts:
        return {sequence: self._guess(sequence, count) for sequence, count in counts.items()}

    def _guess(self, sequence: int, count: int) -> list[int]:
        job, text = self._texts[sequence]
        text.extend(job.ids[len(text) :].tolist())
        return text.guess(count)

    def end(self, sequence: int) -> None:
        del self._texts[sequence]

    def close(self) -> None:
        self._texts.clear()


class JobSpeculation(Struct):
    """What stands on one job's guesses: how they fared, and the token that was guessed but not tried in this step."""

    record: AcceptanceRate
    untried: int | None = None


class Speculator:
    """One cache's. With `measured` it guesses only where that brings more tokens a second, else always."""

    def __init__(self, source: Drafter, most: int, window: int, *, measured: bool) -> None:
        self._source, self._most, self._window, self._measured = source, most, window, measured
        self._price = DraftCost()
        self._bets: dict[int, JobSpeculation] = {}
        self.rests = False  # nothing was worth trying of late: the next step need not wait for what is guessed
        self.guessed = self.kept = 0

    # --- jobs come and go -------------------------------------------------------------------------------------------

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        """Whoever asks for a seed asks for the same text again. It would be the same but for rounding, which depends
        on how many rows are read at once: measured times must not decide on that."""
        self.rests = False
        if not (self._measured and job.prompt.sampling.seed is not None):
            self._bets[sequence] = JobSpeculation(AcceptanceRate())
            self._source.begin(sequence, job)

    def end(self, sequence: int) -> None:
        if self._bets.pop(sequence, None) is not None:
            self._source.end(sequence)

    def close(self) -> None:
        self._source.close()

    # --- a step -----------------------------------------------------------------------------------------------------

    def guess(self, streams: Mapping[int, LlamaCppJob]) -> Drafts:
        """What may come next in the jobs that generate, as far as it is worth trying."""
        price = self._price.of(len(streams)) if self._measured else 0.0
        wanted = {
            sequence: self._width(self._bets[sequence], job, price)
            for sequence, job in streams.items()
            if sequence in self._bets
        }
        self.rests = not any(wanted.values())
        least = int(self._source.is_free)
        asked = {sequence: max(least, count) for sequence, count in wanted.items() if max(least, count)}
        found = self._source.guess(asked) if asked else {}
        return {
            sequence: guess
            for sequence, tokens in found.items()
            if (guess := self._worth_trying(sequence, streams[sequence], tokens, wanted[sequence]))
        }

    def _width(self, bet: JobSpeculation, job: LlamaCppJob, price: float) -> int:
        """The last token that a job may say needs no row of its own."""
        room = max(0, min(self._most, job.prompt.max_tokens - job.output - 1, self._window - job.length - 1))
        return draft_length(bet.record.acceptance, price, room) if self._measured else room

    def _worth_trying(self, sequence: int, job: LlamaCppJob, tokens: list[int], wanted: int) -> list[int]:
        if not wanted:
            self._bets[sequence].untried = tokens[0] if tokens else None
            return []
        return allowed_prefix(job, tokens[:wanted])

    def heard(self, sequence: int, guessed: int, kept: int, drawn: int) -> None:
        """`kept` of the guesses were what came; `drawn` is the first token that did."""
        bet = self._bets.get(sequence)
        if bet is None:
            return
        if guessed:
            bet.record.note(guessed, kept)
        elif bet.untried is not None:
            bet.record.note(1, bet.untried == drawn)
        else:
            bet.record.rest()
        bet.untried = None
        self.guessed, self.kept = self.guessed + guessed, self.kept + kept

    def took(self, streams: int, guessed: int, seconds: float) -> None:
        """A step that read nobody's prompt."""
        if self._measured and self._source.is_abreast:
            self._price.observe(streams, guessed, seconds)


def allowed_prefix(job: LlamaCppJob, guess: list[int]) -> list[int]:
    """As far as the job could say it: up to a token that ends it, or that its grammar forbids."""
    stop = next((at for at, token in enumerate(guess) if token in job.stops), len(guess))
    return guess[:stop] if job.mask is None else guess[: job.mask.fitting(guess[:stop])]
