"""A round of load: conversations side by side, each lane one after the other. What is asked, and of whom, is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from modelyard.benchmark.sample import Round, Sample
from modelyard.benchmark.workload import Ask, Workload, talk

_PATIENCE = 3  # conversations that fail one after the other, until a lane gives up for this round


class Conversation(Protocol):
    """Remembers what was said. What goes wrong is the sample's `error`: asking never raises for it."""

    async def ask(self, ask: Ask) -> Sample: ...


class Load(Protocol):
    """Whatever can be asked: an engine, a URL. `name` is what tables call it."""

    name: str

    def begin(self) -> Conversation: ...


class Extent(Struct, frozen=True):
    """How long a round is: so many conversations a lane, or new ones for so many seconds, and at least one.
    Those that have begun are finished."""

    conversations: int | None = None
    seconds: float | None = None

    def is_over(self, done: int, elapsed_s: float) -> bool:
        if self.conversations is not None:
            return done >= self.conversations
        return done > 0 and elapsed_s >= (self.seconds or 0.0)


class Lanes:
    """One round. `key` names it: rounds of other names get other prompts. `round()` may be asked before it is over."""

    def __init__(
        self,
        load: Load,
        workload: Workload,
        extent: Extent,
        *,
        streams: int | None = None,
        seed: int = 0,
        key: str = "",
        seen: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        self._load, self._workload, self._extent = load, workload, extent
        self._streams = streams if streams is not None else workload.streams
        self._seed, self._key, self._seen = seed, key, seen
        self._samples: list[Sample] = []
        self._began = self._ended = 0.0

    async def run(self) -> Round:
        self._began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as lanes:
                for number in range(self._streams):
                    lanes.create_task(self._lane(number))
        finally:
            self._ended = time.perf_counter()
        return self.round()

    def round(self) -> Round:
        wall = (self._ended or time.perf_counter()) - self._began
        return Round(streams=self._streams, wall_s=wall, samples=tuple(self._samples))

    async def _lane(self, number: int) -> None:
        failures = 0
        for done in count():
            if self._extent.is_over(done, time.perf_counter() - self._began) or failures == _PATIENCE:
                return
            failures = 0 if await self._converse(f"{self._key} {number} {done}") else failures + 1

    async def _converse(self, key: str) -> bool:
        """Whether all of it was answered: after an error there is nothing to build on."""
        conversation = self._load.begin()
        for ask in talk(self._workload, self._seed, key).asks:
            began = time.perf_counter() - self._began
            sample = replace(await conversation.ask(ask), began_s=began)
            self._samples.append(sample)
            self._seen(sample)
            if sample.error is not None:
                return False
        return True


async def play(
    load: Load,
    workload: Workload,
    extent: Extent = Extent(conversations=1),
    *,
    streams: int | None = None,
    seed: int = 0,
    key: str = "",
) -> Round:
    return await Lanes(load, workload, extent, streams=streams, seed=seed, key=key).run()
