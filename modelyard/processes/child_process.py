"""One program as a child process: it dies with this process, its output is kept, and its exit is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelyard.core.errors import NotFound
from modelyard.processes.parent_death import die_with_parent

_READ_SIZE = 1 << 16
_DRAIN_S = 1.0  # for output that is still in the pipe after the exit; a grandchild may hold the pipe open for ever


class OutputTail:
    """The last lines of a process's output. Bytes go in, cut anywhere; a line is cut at `max_line` bytes."""

    def __init__(self, max_lines: int = 200, max_line: int = 4096) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._max_line = max_line
        self._partial = b""
        self._is_cut = False  # the partial line is full: drop the rest of it

    def feed(self, data: bytes) -> None:
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._extend(piece)
            self._lines.append(_decode(self._partial))
            self._partial, self._is_cut = b"", False
        self._extend(rest)

    def _extend(self, piece: bytes) -> None:
        if not self._is_cut:
            self._partial += piece[: self._max_line - len(self._partial)]
            self._is_cut = len(self._partial) >= self._max_line

    def lines(self) -> list[str]:
        """Oldest first; an unfinished line is the last one."""
        return [*self._lines, _decode(self._partial)] if self._partial else list(self._lines)

    def tail(self, count: int) -> str:
        return "\n".join(self.lines()[-count:]) if count > 0 else ""


def _decode(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


class ChildProcess:
    """`ended` resolves to the exit code (negative: the signal that killed it). Shield it when you await it."""

    def __init__(self, process: Process, output: int, log: OutputTail) -> None:
        """`output` is the read end of the pipe that the program writes to; this object closes it."""
        self._process, self._output, self.log = process, output, log
        self._loop, self._output_closed = asyncio.get_running_loop(), asyncio.Event()
        os.set_blocking(output, False)
        self._loop.add_reader(output, self._read)
        self.ended: asyncio.Task[int] = self._loop.create_task(self._wait())

    def __repr__(self) -> str:
        return f"<ChildProcess {self.pid}{' ended' if self.ended.done() else ''}>"

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str] | None = None) -> ChildProcess:
        """A missing program shows in the output and the exit code, because `die_with_parent` runs in between."""
        # Not asyncio's own pipe: it hides the program's exit while a grandchild holds the pipe open.
        output, write_end = os.pipe()
        try:
            # A new session: Ctrl-C in the terminal must reach the parent only.
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(list(argv), group=True),
                env=env,
                stdin=DEVNULL,
                stdout=write_end,
                stderr=STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            os.close(output)
            if isinstance(error, OSError):
                raise NotFound(f"cannot start {argv[0]}: {error.strerror}", code="program_missing") from error
            raise
        finally:
            os.close(write_end)
        return cls(process, output, OutputTail())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _wait(self) -> int:
        try:
            code = await self._process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # children that the program left in its group
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._output_closed.wait(), _DRAIN_S)
            return code
        finally:
            self._close_output()

    def _read(self) -> None:
        try:
            data = os.read(self._output, _READ_SIZE)
        except BlockingIOError:
            return
        if data:
            self.log.feed(data)
        else:
            self._close_output()

    def _close_output(self) -> None:
        if not self._output_closed.is_set():
            self._output_closed.set()
            self._loop.remove_reader(self._output)
            os.close(self._output)

    def core_seconds(self) -> float:
        """How long its threads have run, or waited for a core that other programs had. A program that is stopped, or
        waits for something else, adds nothing. 0 where the system does not report it, which only Linux does."""
        total = 0
        for file in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # the thread has ended
                ran, waited, _ = map(int, file.read_text().split())
                total += ran + waited
        return total / 1e9

    def signal(self, number: int) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after `grace` seconds or when the caller is cancelled. Idempotent."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait({self.ended}, timeout=grace)
        finally:
            self.signal(signal.SIGKILL)
        return await asyncio.shield(self.ended)


_ASSERTION = re.compile(r"(?:^|/)([\w.-]+\.(?:c|cc|cpp|cu|h|hpp|m):\d+: .+)")  # without the folders of the build


def last_words(lines: Sequence[str], count: int) -> str:
    """Why a program ended: the assertion of a C library that failed, else its last lines."""
    failed = next((found[1].strip() for line in reversed(lines) if (found := _ASSERTION.search(line))), None)
    return failed if failed is not None else "\n".join(lines[-count:] if count > 0 else ())


def describe_exit(code: int) -> str:
    """An exit code as the end of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
