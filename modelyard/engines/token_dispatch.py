"""What an engine's thread has to say, handed to the event loop in one call a step, at the moment that costs least.

A token is known when a step ends, and the next step begins at once: a loop that wakes then takes the GIL while the
thread still launches work for the GPU, and both lose. So tokens may lie here until the thread is about to wait for the
GPU without the GIL: then the loop runs while nobody else needs it. Whatever somebody waits for is handed over at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from modelyard.core.engine import Chunk, Tokens
from modelyard.engines.generation_queue import GenerationQueue


class Addressee(Protocol):
    @property
    def queue(self) -> GenerationQueue[Chunk]: ...


Parcel = tuple[Addressee, Sequence[Chunk], bool]
Round = tuple[Sequence[Addressee], Sequence[int]]  # a token for each of them


class TokenDispatch:
    """Belongs to the thread; made on the loop that its mailboxes are read on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parcels: list[Parcel | Round] = []
        self._urgent = self._waits = False

    def put(self, to: Addressee, chunks: Sequence[Chunk], last: bool = False, *, urgent: bool = True) -> None:
        """Not `urgent`: it may lie here until the thread's next wait, if there is one soon."""
        self._parcels.append((to, chunks, last))
        self._urgent = self._urgent or urgent or last

    def put_batch(self, to: Sequence[Addressee], tokens: Sequence[int]) -> None:
        """One token for each: what they are wrapped in is the loop's to make. The thread's time is dearer."""
        self._parcels.append((to, tokens))
        self._urgent = True

    def flush(self) -> None:
        self._urgent = False
        if self._parcels:
            parcels, self._parcels = self._parcels, []
            self._loop.call_soon_threadsafe(hand_out, parcels)

    def before_gpu_wait(self) -> None:
        """The thread is about to wait without the GIL."""
        self._waits = True
        self.flush()

    def end_step(self, soon: bool) -> None:
        """`soon`: another step like this one follows at once. A step that did not wait tells that the next may not."""
        waited, self._waits = self._waits, False
        if self._urgent or not (soon and waited):
            self.flush()


def hand_out(parcels: list[Parcel | Round]) -> None:
    """On the loop."""
    for parcel in parcels:
        if len(parcel) == 2:
            _hand_round(*parcel)
            continue
        to, chunks, last = parcel
        if not to.queue.closed:
            to.queue.put_many(chunks, last=last)


def _hand_round(to: Sequence[Addressee], tokens: Sequence[int]) -> None:
    for each, token in zip(to, tokens, strict=True):
        if not each.queue.closed:
            each.queue.put(Tokens([token]))
