"""Plays a job's beats into its mailbox: at once where nothing waits, by timers where something does. No task a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct

from modelyard.engines.generation_queue import GenerationQueue

T = TypeVar("T")

BURST = 4096  # units that go out in one piece before others get the loop
ROOM = 256  # items that may wait for a reader


class Put(Struct, frozen=True):
    """Items that go out together."""

    items: list[Any]


class Paced(Struct, frozen=True):
    """Units that go out one by one, `token_delay` apart; without a delay in bursts. `wrap` makes items of them."""

    units: Sequence[Any]
    wrap: Callable[[Any], Any]


class Pause(Struct, frozen=True):
    seconds: float


class Standstill(Struct, frozen=True):
    pass


Beat = Put | Paced | Pause | Standstill


class Player(Generic[T]):
    """`spoken` counts the paced units that really went out."""

    __slots__ = ("_at", "_beats", "_delay", "_loop", "_paced", "_stalled", "_timer", "box", "spoken")

    def __init__(self, beats: Iterator[Beat], delay: float, on_cancel: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._beats, self._delay = beats, delay
        self._paced: Paced | None = None
        self._at = 0
        self._stalled = False
        self._timer: asyncio.Handle | None = None
        self.spoken = 0
        self.box: GenerationQueue[T] = GenerationQueue(
            on_cancel=on_cancel, on_drained=self._go_on, limit=ROOM, loop=self._loop
        )

    def play(self) -> None:
        """Goes on from where it stood until something has to be waited for or the beats end."""
        self._timer = None
        if self._paced is not None and not self._speak(self._paced):
            return
        for beat in self._beats:
            if not self._strike(beat):
                return
        if not self.box.closed:
            self.box.close()

    def stop(self, items: list[T]) -> None:
        """Whatever was going on ends here, with these items."""
        if self._timer is not None:
            self._timer.cancel()
        self._beats = iter(())  # a job and its beats hold each other: let go, so that no collector has to
        self.box.put_many(items, last=True)

    def _strike(self, beat: Beat) -> bool:
        """False: to be continued by a timer, by the reader, or by nobody."""
        if isinstance(beat, Paced):
            self._paced, self._at = beat, 0
            return self._speak(beat)
        if isinstance(beat, Put):
            self.box.put_many(beat.items)
            return True
        if isinstance(beat, Pause):
            self._timer = self._loop.call_later(beat.seconds, self.play)
        return False

    def _speak(self, beat: Paced) -> bool:
        units, at = beat.units, self._at
        if at >= len(units):
            self._paced = None
            return True
        chunk = units[at : at + (1 if self._delay else BURST)]
        self._at = at + len(chunk)
        self.spoken += len(chunk)
        if not self.box.put(beat.wrap(chunk)):
            self._stalled = True
            return False
        if self._delay:
            self._timer = self._loop.call_later(self._delay, self.play)
            return False
        return self._finish_or_yield(beat)

    def _finish_or_yield(self, beat: Paced) -> bool:
        if self._at >= len(beat.units):
            self._paced = None
            return True
        self._timer = self._loop.call_soon(self.play)
        return False

    def _go_on(self) -> None:
        """Not at once: a reader that is fed while it reads would never give the loop to anybody else."""
        if self._stalled:
            self._stalled = False
            self._timer = self._loop.call_soon(self.play)
