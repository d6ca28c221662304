"""`/metrics` of several gateway processes: the sum of what each keeps in a file, in a folder that only they use.

A process writes its file every two seconds, at its end, and when another one is scraped, which asks over a unix
socket. A scrape adds up files and nothing else, so that no total decreases, even after kill -9: a process that replaces
a dead one carries its totals on.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from modelyard.telemetry.metrics import Metrics, MetricsSnapshot, render_snapshot, sum_snapshots, without_gauges


class ProcessValues(Struct):
    """`past` are the totals of the processes that had this place before."""

    pid: int
    past: MetricsSnapshot
    current: MetricsSnapshot

    def total(self) -> MetricsSnapshot:
        return sum_snapshots([self.past, self.current if _is_alive(self.pid) else without_gauges(self.current)])


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ProcessValues)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def last_written(folder: Path, index: int) -> int:
    """When the process at this place wrote its file, in nanoseconds: a heartbeat. 0: not yet."""
    try:
        return (folder / f"metrics-{index}").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class SharedMetrics:
    """The place `index` among the processes of `folder`. One that is late counts with what it wrote last."""

    def __init__(
        self, folder: Path, index: int, metrics: Metrics, write_every_s: float = 2.0, deadline_s: float = 1.0
    ) -> None:
        self._folder, self._metrics = folder, metrics
        self._file, self._socket = folder / f"metrics-{index}", folder / f"scrape-{index}"
        self._write_every, self._deadline = write_every_s, deadline_s
        self._past = MetricsSnapshot()
        self._writing = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._file.exists():
            self._past = without_gauges(_read(self._file))
        self._socket.unlink(missing_ok=True)
        await self._write()
        self._server = await asyncio.start_unix_server(self._answer, self._socket)
        self._task = asyncio.create_task(self._write_periodically())

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.close()
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._write()

    async def scrape(self) -> bytes:
        others = [each for each in self._folder.glob("scrape-*") if each != self._socket]
        await asyncio.gather(self._measure_and_write(), *(self._ask(other) for other in others))
        return await asyncio.to_thread(_render_all, self._folder)

    async def _ask(self, socket: Path) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._deadline):
                reader, writer = await asyncio.open_unix_connection(socket)
                try:
                    await reader.read()
                finally:
                    writer.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The end of the connection says that the file is written."""
        try:
            await self._measure_and_write()
        finally:
            writer.close()

    async def _measure_and_write(self) -> None:
        await self._metrics.measure_system()
        await self._write()

    async def _write_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._write_every)
            await self._write()

    async def _write(self) -> None:
        async with self._writing:
            data = _encode(ProcessValues(os.getpid(), self._past, self._metrics.snapshot()))
            await asyncio.to_thread(_replace, self._file, data)


def _replace(file: Path, data: bytes) -> None:
    new = file.with_name(f"new-{file.name}")
    new.write_bytes(data)
    new.replace(file)


def _render_all(folder: Path) -> bytes:
    return render_snapshot(sum_snapshots([_read(file) for file in folder.glob("metrics-*")]))


def _read(file: Path) -> MetricsSnapshot:
    return _decoder.decode(file.read_bytes()).total()
