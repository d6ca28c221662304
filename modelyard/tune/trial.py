"""A trial from the outside: a child process with a limit of time and of memory. Whatever it does, it is a result."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.tune.order import Failure, Order, Outcome

_LOOK_S = 0.05  # between two looks at what it takes: about the time in which 100 MB can be filled
_WORDS = 3  # of its last lines, to explain a death


class Limits(msgspec.Struct, frozen=True):
    seconds: float
    memory: int | None = None


def command(order: Path, answer: Path) -> list[str]:
    return [sys.executable, "-m", "modelyard.tune.child", str(order), str(answer)]


async def run(
    order: Order,
    limits: Limits,
    command: Callable[[Path, Path], list[str]] = command,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="modelyard-trial-") as folder:
        told, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
        told.write_bytes(msgspec.json.encode(order))
        child = await ChildProcess.start(command(told, answer), dict(os.environ))
        try:
            failure = await _watch(child, limits, clock)
        finally:
            _kill(child)
            code = await asyncio.shield(child.ended)
        if failure is not None:
            return failure
        return _read(answer) or _death(child, code)


async def _watch(child: ChildProcess, limits: Limits, clock: Callable[[], float]) -> Failure | None:
    """Until it ends by itself, or for too long, or with too much memory."""
    deadline = clock() + limits.seconds
    while not child.ended.done():
        if clock() > deadline:
            return Failure("hang", f"stopped after {limits.seconds:.0f} s")
        taken = resident(child.pid)
        if limits.memory is not None and taken > limits.memory:
            return Failure("memory", f"stopped at {taken / 2**20:.0f} MiB")
        await asyncio.wait({child.ended}, timeout=_LOOK_S)
    return None


def resident(pid: int) -> int:
    """Bytes of RAM that a process and its children hold."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0  # it ended while we looked


def _kill(child: ChildProcess) -> None:
    """With all that it started: it has a session of its own."""
    if not child.ended.done():
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _read(answer: Path) -> Outcome | None:
    return msgspec.json.decode(answer.read_bytes(), type=Outcome) if answer.is_file() else None


def _death(child: ChildProcess, code: int) -> Failure:
    words = child.log.tail(_WORDS)
    if code == -signal.SIGKILL:
        return Failure("memory", "the system killed it, as it does when memory runs out")
    return Failure("crash", f"it {describe_exit(code)}" + (f": {words}" if words else ""))
