"""A gateway child's half of `/metrics` on several gateway processes: answers the hub, and asks it for everybody.

A child that is killed can say nothing any more, so each one tells the hub its counters every two seconds. Without a
hub (it died, or there is one process only) the own snapshot is all there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import count

from modelyard.telemetry.exposition import merge
from modelyard.telemetry.frames import Ask, Everything, Frames, Push, Want, for_child
from modelyard.telemetry.hub import MetricsHub
from modelyard.telemetry.metrics import Metrics

__all__ = ["MetricsHub", "MetricsPeer"]


class MetricsPeer:
    """`lost` is set when the hub has gone, and with it the parent: where no tether holds, the child should end."""

    def __init__(self, path: str, metrics: Metrics, push_every_s: float = 2.0, deadline_s: float = 2.0) -> None:
        self.lost = asyncio.Event()
        self._path, self._metrics = path, metrics
        self._push_every, self._deadline = push_every_s, deadline_s
        self._ids = count(1)
        self._frames: Frames[Want | Everything] | None = None
        self._asked: dict[int, asyncio.Future[list[bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            self.lost.set()
            return
        self._frames = Frames(reader, writer, for_child)
        self._spawn(self._listen(self._frames))
        self._spawn(self._keep_pushing(self._frames))

    async def close(self) -> None:
        """The last push goes out first: a child that ends in peace loses no count."""
        if self._frames is not None:
            self._frames.send(Push(self._metrics.snapshot()))
            await self._frames.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def scrape(self) -> bytes:
        return merge(await self.collect())

    async def collect(self) -> list[bytes]:
        """Everybody's snapshots, the dead ones' counters among them; only the own one where the hub fails us."""
        if self._frames is None or self.lost.is_set():
            return await self._own()
        id = next(self._ids)
        answer = self._asked[id] = asyncio.get_running_loop().create_future()
        self._frames.send(Ask(id))
        try:
            return await asyncio.wait_for(answer, self._deadline)
        except (TimeoutError, ConnectionError):
            return await self._own()
        finally:
            del self._asked[id]

    async def _own(self) -> list[bytes]:
        await self._metrics.measure()
        return [self._metrics.snapshot()]

    async def _listen(self, frames: Frames[Want | Everything]) -> None:
        while (message := await frames.receive()) is not None:
            if isinstance(message, Want):
                self._spawn(self._answer(frames, message))
            elif message.id in self._asked and not self._asked[message.id].done():
                self._asked[message.id].set_result(message.snapshots)
        self.lost.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the hub is gone"))

    async def _answer(self, frames: Frames[Want | Everything], want: Want) -> None:
        await self._metrics.measure()
        frames.send(Push(self._metrics.snapshot(), want.id))

    async def _keep_pushing(self, frames: Frames[Want | Everything]) -> None:
        while not self.lost.is_set():
            frames.send(Push(self._metrics.snapshot()))
            await asyncio.sleep(self._push_every)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
