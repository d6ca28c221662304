"""What a server takes meanwhile: how long its event loop works at a time, its memory and its open files.

A task on the loop wakes every 10 ms. The CPU time of the loop's thread between two wakes does not depend on what else
the machine does; the time on the clock does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.live_server import LiveServer

STALL_S = 0.25  # the longest that an event loop may work at a time


class LoopWatch:
    """The longest time between two wakes: CPU time of the loop's thread, and the clock."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    async def run(self) -> None:
        cpu, wall = time.thread_time(), time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now, clock = time.thread_time(), time.monotonic()
            self.cpu, self.wall = max(self.cpu, now - cpu), max(self.wall, clock - wall)
            cpu, wall = now, clock


@contextmanager
def watched_loop(server: LiveServer) -> Iterator[LoopWatch]:
    watch = LoopWatch()
    running = asyncio.run_coroutine_threadsafe(watch.run(), server.loop)
    try:
        yield watch
    finally:
        running.cancel()


@contextmanager
def never_stalls(server: LiveServer) -> Iterator[None]:
    with watched_loop(server) as watch:
        time.sleep(0.5)
        usual, watch.wall = watch.wall, 0.0
        yield
    assert watch.cpu < STALL_S, f"the event loop worked for {watch.cpu:.2f} s at a time"
    assert watch.wall < max(2.0, 10 * usual), f"the event loop was held up for {watch.wall:.2f} s"


class ProcessWatch:
    """A process may grow by so much while it is tested; what it keeps for good is found by `make soak`."""

    max_bytes, max_files = 512 << 20, 64

    def __init__(self, pid: int | None = None, loop: LoopWatch | None = None) -> None:
        self._process, self._loop = psutil.Process(pid), loop
        self._bytes, self._files = self._process.memory_info().rss, self._process.num_fds()

    def fault(self) -> str:
        """What is wrong since the last call; empty if nothing is."""
        grown, files = self._process.memory_info().rss - self._bytes, self._process.num_fds() - self._files
        if grown > self.max_bytes or files > self.max_files:
            return f"the server has grown by {grown >> 20} MiB and {files} open files"
        if self._loop is not None and self._loop.cpu > STALL_S:
            took, self._loop.cpu = self._loop.cpu, 0.0
            return f"the event loop worked for {took:.2f} s at a time"
        return ""
