"""The last lines that a child wrote: enough to explain its death, never more than was set aside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence

from modelyard.core.errors import NotFound
from modelyard.processes.parent_death import die_with_parent


class OutputTail:
    """Bytes cut anywhere go in, whole lines come out. A line without end is cut at `max_line` bytes."""

    def __init__(self, max_lines: int = 200, max_line: int = 4096) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._max_line = max_line
        self._open = b""
        self._cut = False  # the rest of an overlong line is on its way: drop it
        self.dropped = 0

    def feed(self, data: bytes) -> None:
        *ended, rest = data.split(b"\n")
        for bit in ended:
            self._extend(bit)
            self._end_line()
        self._extend(rest)

    def lines(self) -> list[str]:
        """The oldest first; a line that has not ended yet is the last one."""
        return [*self._lines, _text(self._open)] if self._open else list(self._lines)

    def tail(self, count: int) -> str:
        return "\n".join(self.lines()[-count:]) if count > 0 else ""

    def __len__(self) -> int:
        return len(self._lines) + bool(self._open)

    def _extend(self, bit: bytes) -> None:
        if not self._cut:
            self._open += bit[: self._max_line - len(self._open)]
            self._cut = len(self._open) >= self._max_line

    def _end_line(self) -> None:
        self.dropped += len(self._lines) == self._lines.maxlen
        self._lines.append(_text(self._open))
        self._open, self._cut = b"", False


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


# One program run as a child: on a tether, its output kept in a ring, its end waited for, stopped by signals.

_AT_ONCE = 1 << 16
_LAST_WORDS = 1.0  # seconds for output that is still in the pipe; a grandchild may hold it open for ever


class ChildProcess:
    """`ended` gives the exit code (negative: the signal that ended it). Whoever waits for it shields it."""

    def __init__(self, process: Process, output: int, log: OutputTail) -> None:
        """`output` is the end of a pipe that the program writes into; it is closed here."""
        self._process, self._output, self.log = process, output, log
        self._loop, self._silent = asyncio.get_running_loop(), asyncio.Event()
        os.set_blocking(output, False)
        self._loop.add_reader(output, self._read)
        self.ended: asyncio.Task[int] = self._loop.create_task(self._live())

    def __repr__(self) -> str:
        return f"<Child {self.pid}{' ended' if self.ended.done() else ''}>"

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> ChildProcess:
        """A program that is not there shows in its output and exit code: the tether runs in between."""
        # A pipe of our own: asyncio's would hide the program's end for as long as a child of its holds it open.
        output, theirs = os.pipe()
        try:
            # A session of its own: Ctrl-C in the terminal is for the parent alone.
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(list(argv), group=True),
                env=env,
                stdin=DEVNULL,
                stdout=theirs,
                stderr=STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            os.close(output)
            if isinstance(error, OSError):
                raise NotFound(f"{argv[0]} cannot be started: {error.strerror}", code="program_missing") from error
            raise
        finally:
            os.close(theirs)
        return cls(process, output, OutputTail())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _live(self) -> int:
        try:
            code = await self._process.wait()
            self._sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._silent.wait(), _LAST_WORDS)
            return code
        finally:
            self._hush()

    def _read(self) -> None:
        try:
            data = os.read(self._output, _AT_ONCE)
        except BlockingIOError:
            return
        if data:
            self.log.feed(data)
        else:
            self._hush()

    def _hush(self) -> None:
        """Nothing more is heard of it. Idempotent."""
        if not self._silent.is_set():
            self._silent.set()
            self._loop.remove_reader(self._output)
            os.close(self._output)

    def _sweep(self) -> None:
        """Ends what the program has left behind: its own children are of its group, and nobody's any more."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

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


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
