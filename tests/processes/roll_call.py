"""Real children that report to the test: each connects, says who it is, and is dead when its connection ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

# Runs in a child: reports its index, pid and hub, then lives until a signal. IGNORE makes it deaf to SIGTERM.
CHILD = """
import os, signal, socket, sys
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
report = socket.socket(socket.AF_UNIX)
report.connect(sys.argv[1])
facts = (os.environ["MODELYARD_WORKER_INDEX"], str(os.getpid()), os.environ["MODELYARD_WORKER_SOCKET"])
report.sendall((" ".join(facts) + "\\n").encode())
if sys.argv[2] == "brief":
    sys.exit(3)
while True:
    signal.pause()
"""


class Present:
    """A child that has reported."""

    def __init__(self, line: str, reader: asyncio.StreamReader) -> None:
        index, pid, self.hub = line.split()
        self.index, self.pid = int(index), int(pid)
        self._reader = reader

    async def gone(self) -> None:
        async with asyncio.timeout(60):
            try:
                await self._reader.read()
            except ConnectionError:
                return


class RollCall:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._arrivals: asyncio.Queue[Present] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self.count = 0

    def argv(self, manner: str = "steady") -> list[str]:
        return [sys.executable, "-S", "-c", CHILD, self.path, manner]

    async def next(self) -> Present:
        async with asyncio.timeout(60):
            return await self._arrivals.get()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        self._writers.append(writer)
        self._arrivals.put_nowait(Present((await reader.readline()).decode(), reader))

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def roll_call(folder: Path) -> AsyncIterator[RollCall]:
    call = RollCall(folder / "roll")
    server = await asyncio.start_unix_server(call.take, call.path)
    try:
        yield call
    finally:
        server.close()
        await call.close()
