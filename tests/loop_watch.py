"""What a server takes meanwhile: how long its event loop works at a time, its memory and its open files.

A task on the loop wakes every 10 ms. The CPU time of the loop's thread between two wakes does not depend on what else
the machine does; the time on the clock does.

    python -m tests.loop_watch FILE serve --config …

is `modelyard serve …` with such a task on its loop, which writes each stall to the file: a line with the unix time and
the seconds. `stalls` reads it.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import uvloop

if TYPE_CHECKING:
    from tests.live_server import LiveServer

STALL_S = 0.25  # the longest that an event loop may work at a time


class LoopWatch:
    """The longest time between two wakes: CPU time of the loop's thread, and the clock. `file` gets each stall."""

    def __init__(self, file: Path | None = None) -> None:
        self.cpu = self.wall = 0.0
        self._file = file

    async def run(self) -> None:
        cpu, wall = time.thread_time(), time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now, clock = time.thread_time(), time.monotonic()
            self.cpu, self.wall = max(self.cpu, now - cpu), max(self.wall, clock - wall)
            if self._file is not None and now - cpu > STALL_S:
                with self._file.open("a") as file:
                    file.write(f"{time.time():.3f} {now - cpu:.3f}\n")
            cpu, wall = time.thread_time(), time.monotonic()


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

    def __init__(self, pid: int | None = None, loop: LoopWatch | None = None, file: Path | None = None) -> None:
        self._process, self._loop, self._file, self._since = psutil.Process(pid), loop, file, time.time()
        self._bytes, self._files = self._process.memory_info().rss, self._process.num_fds()

    def fault(self) -> str:
        """What is wrong since the last call; empty if nothing is."""
        grown, files = self._process.memory_info().rss - self._bytes, self._process.num_fds() - self._files
        if grown > self.max_bytes or files > self.max_files:
            return f"the server has grown by {grown >> 20} MiB and {files} open files"
        if self._loop is not None and self._loop.cpu > STALL_S:
            took, self._loop.cpu = self._loop.cpu, 0.0
            return f"the event loop worked for {took:.2f} s at a time"
        if self._file is not None and (longest := longest_stall(self._file, self._since)):
            self._since = time.time()
            return f"the event loop worked for {longest:.2f} s at a time"
        return ""


# --- another process --------------------------------------------------------------------------------------------------


def watched_command(file: Path, *arguments: str) -> list[str]:
    """`modelyard` with these arguments, watched."""
    return [sys.executable, "-m", "tests.loop_watch", str(file), *arguments]


def longest_stall(file: Path, since: float) -> float:
    """In seconds, of those that ended after this unix time; 0: none."""
    lines = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return max((float(seconds) for at, seconds in lines if float(at) >= since), default=0.0)


def run_watched(file: Path, arguments: list[str], module: str = "modelyard") -> None:
    """Every loop of the process starts with a watch as its first task."""

    def watched(make: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[], asyncio.AbstractEventLoop]:
        def made() -> asyncio.AbstractEventLoop:
            loop, watch = make(), LoopWatch(file)
            loop.call_soon(lambda: tasks.add(loop.create_task(watch.run())))
            return loop

        return made

    tasks: set[asyncio.Task[None]] = set()  # a loop has only weak references to them
    asyncio.new_event_loop = watched(asyncio.new_event_loop)
    uvloop.new_event_loop = watched(uvloop.new_event_loop)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    run_watched(Path(sys.argv[1]), sys.argv[2:])
