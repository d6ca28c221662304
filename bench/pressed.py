"""What one answer takes of a server's CPU time while it gets more requests than it can answer."""

from __future__ import annotations

import asyncio
import time

from bench.load import Connection, requests

_CONNECTIONS = 16
_LEAD_S = 0.5  # until the queues are as full as they get
_PATIENCE_S = 60.0


def cpu_s(pid: int) -> float:
    """All the CPU time of a process so far, to the nanosecond; what /proc says comes in hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # how the kernel numbers the clock of another process


async def pressed(port: int, pid: int, body: str, seconds: float, lead_s: float = _LEAD_S) -> float:
    """CPU seconds an answer, over so many seconds and at least one answer."""
    count = _Count()
    loop, asked = asyncio.get_running_loop(), requests(port, body)
    make = lambda: Connection(asked, False, count.answered)  # noqa: E731
    connections = [(await loop.create_connection(make, "127.0.0.1", port))[1] for _ in range(_CONNECTIONS)]
    try:
        for connection in connections:
            connection.send()
        await asyncio.sleep(lead_s)
        before, cpu = count.answers, cpu_s(pid)
        await asyncio.sleep(seconds)
        async with asyncio.timeout(_PATIENCE_S):
            await count.more_than(before)
        return (cpu_s(pid) - cpu) / (count.answers - before)
    finally:
        count.over = True
        for connection in connections:
            connection.transport.abort()


class _Count:
    def __init__(self) -> None:
        self.answers, self.broken, self.over = 0, "", False
        self._news = asyncio.Event()

    def answered(self, connection: Connection) -> None:
        if self.over:
            return
        self._news.set()
        if connection.broken:
            self.broken = connection.said
            return
        self.answers += 1
        connection.send()

    async def more_than(self, answers: int) -> None:
        while self.answers <= answers and not self.broken:
            self._news.clear()
            await self._news.wait()
        if self.broken:
            raise SystemExit(f"the server did not answer: {self.broken}")
