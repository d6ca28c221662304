"""Speculation: several tokens a step, where guesses come true. Who guesses, how much, and what became of it.

A guess is read together with the token before it, in one decode; then the job's own samplers draw after each row, one
after the other, for as long as what they draw is what was guessed. So the text is the one that would have come without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.lookup import Lookup
from modelyard.engines.llama_cpp.odds import Price, Record, width

Guesses = dict[int, list[int]]  # by sequence


class Source(Protocol):
    """Who guesses. A job begins in a sequence and leaves it; in between it only grows."""

    is_free: bool  # guessing costs nothing, so what is not tried can still be compared with what came
    is_abreast: bool  # False where it had to read much before it could guess: such a step says nothing of its price

    def begin(self, sequence: int, job: Job) -> None: ...
    def guess(self, counts: Mapping[int, int]) -> Guesses:
        """At most so many tokens for each sequence that is counted."""
        ...

    def end(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class NGrams:
    """Guesses from each job's own text."""

    is_free = is_abreast = True

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Job, Lookup]] = {}

    def begin(self, sequence: int, job: Job) -> None:
        self._texts[sequence] = job, Lookup()

    def guess(self, counts: Mapping[int, int]) -> Guesses:
        return {sequence: self._guess(sequence, count) for sequence, count in counts.items()}

    def _guess(self, sequence: int, count: int) -> list[int]:
        job, text = self._texts[sequence]
        text.extend(job.ids[len(text) :].tolist())
        return text.guess(count)

    def end(self, sequence: int) -> None:
        del self._texts[sequence]

    def close(self) -> None:
        self._texts.clear()


class Bet(Struct):
    """What stands on one job's guesses: how they fared, and the token that was guessed but not tried in this step."""

    record: Record
    untried: int | None = None


class Speculator:
    """One cache's. With `measured` it guesses only where that brings more tokens a second, else always."""

    def __init__(self, source: Source, most: int, window: int, *, measured: bool) -> None:
        self._source, self._most, self._window, self._measured = source, most, window, measured
        self._price = Price()
        self._bets: dict[int, Bet] = {}
        self.rests = False  # nothing was worth trying of late: the next step need not wait for what is guessed
        self.guessed = self.kept = 0

    # --- jobs come and go -------------------------------------------------------------------------------------------

    def begin(self, sequence: int, job: Job) -> None:
        """Whoever asks for a seed asks for the same text again. It would be the same but for rounding, which depends
        on how many rows are read at once: measured times must not decide on that."""
        self.rests = False
        if not (self._measured and job.prompt.sampling.seed is not None):
            self._bets[sequence] = Bet(Record())
            self._source.begin(sequence, job)

    def end(self, sequence: int) -> None:
        if self._bets.pop(sequence, None) is not None:
            self._source.end(sequence)

    def close(self) -> None:
        self._source.close()

    # --- a step -----------------------------------------------------------------------------------------------------

    def guess(self, streams: Mapping[int, Job]) -> Guesses:
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

    def _width(self, bet: Bet, job: Job, price: float) -> int:
        """The last token that a job may say needs no row of its own."""
        room = max(0, min(self._most, job.prompt.max_tokens - job.output - 1, self._window - job.length - 1))
        return width(bet.record.acceptance, price, room) if self._measured else room

    def _worth_trying(self, sequence: int, job: Job, tokens: list[int], wanted: int) -> list[int]:
        if not wanted:
            self._bets[sequence].untried = tokens[0] if tokens else None
            return []
        return possible(job, tokens[:wanted])

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


def possible(job: Job, guess: list[int]) -> list[int]:
    """As far as the job could say it: up to a token that ends it, or that its grammar forbids."""
    stop = next((at for at, token in enumerate(guess) if token in job.stops), len(guess))
    return guess[:stop] if job.mask is None else guess[: job.mask.fitting(guess[:stop])]
