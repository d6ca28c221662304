"""One program run as a child: on a tether, its output kept in a ring, its end waited for, stopped by signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence

from modelyard.core.errors import NotFound
from modelyard.processes.ring import RingBuffer
from modelyard.processes.tether import tethered

_AT_ONCE = 1 << 16
_LAST_WORDS = 1.0  # seconds for output that is still in the pipe; a grandchild may hold it open for ever


class Child:
    """`ended` gives the exit code (negative: the signal that ended it). Whoever waits for it shields it."""

    def __init__(self, process: Process, log: RingBuffer) -> None:
        self._process, self.log = process, log
        self.ended: asyncio.Task[int] = asyncio.get_running_loop().create_task(self._live())

    def __repr__(self) -> str:
        return f"<Child {self.pid}{' ended' if self.ended.done() else ''}>"

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """A program that is not there shows in its output and exit code: the tether runs in between."""
        try:
            # A session of its own: Ctrl-C in the terminal is for the parent alone.
            process = await asyncio.create_subprocess_exec(
                *tethered(list(argv)), env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise NotFound(f"{argv[0]} cannot be started: {error.strerror}", code="program_missing") from error
        return cls(process, RingBuffer())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _live(self) -> int:
        reading = asyncio.get_running_loop().create_task(self._read())
        try:
            code = await self._process.wait()
            await asyncio.wait({reading}, timeout=_LAST_WORDS)
            return code
        finally:
            reading.cancel()

    async def _read(self) -> None:
        output = self._process.stdout
        while output is not None and (data := await output.read(_AT_ONCE)):
            self.log.feed(data)

    def signal(self, number: int) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace: float = 10.0) -> int:
        """Asks, waits, and ends it. A caller that is itself cancelled has it ended at once. Idempotent."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait({self.ended}, timeout=grace)
        finally:
            self.signal(signal.SIGKILL)
        return await asyncio.shield(self.ended)


def fate(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
