"""Real children that report to the test: each connects, says who it is, and is dead when its connection ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelyard.processes.supervisor import RestartPolicy, SupervisedChild, run_supervised, should_give_up

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


_QUICK = RestartPolicy(first_delay=0.001, max_delay=0.002, min_uptime=600.0, grace=60.0, max_early_exits=3)


class Lobby:
    """A hub that only notes what became of it."""

    def __init__(self) -> None:
        self.path = ""
        self.closed = False

    async def open(self) -> None:
        self.path = "/the/hub"

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def _supervised(
    call: RollCall, workers: int, manner: str = "steady", policy: RestartPolicy = _QUICK
) -> AsyncIterator[_Running]:
    running = _Running(asyncio.create_task(run_supervised(call.argv(manner), workers, Lobby(), policy)))
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.wait({running.task})


class _Running:
    def __init__(self, task: asyncio.Task[int]) -> None:
        self.task = task

    async def code(self) -> int:
        async with asyncio.timeout(60):
            return await self.task


def _signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


async def test_every_child_gets_its_index_and_the_hub(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _supervised(call, 2):
        children = [await call.next(), await call.next()]
        assert {child.index for child in children} == {0, 1}
        assert {child.hub for child in children} == {"/the/hub"}


async def test_a_killed_child_is_replaced_with_the_same_index(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _supervised(call, 2):
        first = await call.next()
        second = await call.next()
        os.kill(first.pid, signal.SIGKILL)
        await first.gone()
        replacement = await call.next()
        assert replacement.index == first.index
        assert replacement.pid not in (first.pid, second.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_every_child_gracefully(tmp_path: Path, number: int) -> None:
    async with roll_call(tmp_path) as call, _supervised(call, 2) as supervisor:
        children = [await call.next(), await call.next()]
        _signal_self(number)
        assert await supervisor.code() == 0
        for child in children:
            await child.gone()
        assert call.count == 2


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    hasty = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=0.01)
    async with roll_call(tmp_path) as call, _supervised(call, 1, "deaf", hasty) as supervisor:
        child = await call.next()
        _signal_self(signal.SIGTERM)
        assert await supervisor.code() == 1
        await child.gone()


async def test_a_second_signal_skips_the_grace_period(tmp_path: Path) -> None:
    patient = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=3600.0)
    async with roll_call(tmp_path) as call, _supervised(call, 1, "deaf", patient) as supervisor:
        child = await call.next()
        _signal_self(signal.SIGTERM)
        _signal_self(signal.SIGINT)
        assert await supervisor.code() == 1
        await child.gone()


async def test_the_supervisor_gives_up_if_all_children_exit_early_three_times(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _supervised(call, 2, "brief") as supervisor:
        assert await supervisor.code() == 1
        for _ in range(6):
            await call.next()


async def test_a_missing_command_ends_the_supervisor_with_code_one(tmp_path: Path) -> None:
    lobby = Lobby()
    async with asyncio.timeout(60):
        assert await run_supervised([str(tmp_path / "nothing")], 1, lobby, _QUICK) == 1
    assert lobby.closed


_PARENT = """
import asyncio, sys
from modelyard.processes.supervisor import run_supervised
class Lobby:
    path = "/the/hub"
    async def open(self): ...
    async def close(self): ...
asyncio.run(run_supervised(sys.argv[1:], 2, Lobby()))
"""


async def test_no_child_survives_a_killed_supervisor(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, *call.argv("deaf"))
        children = [await call.next(), await call.next()]
        parent.kill()
        await parent.wait()
        for child in children:
            await child.gone()


def test_the_wait_doubles_while_a_child_dies_min_uptime_and_starts_over_when_it_lived() -> None:
    child, policy = SupervisedChild(0), RestartPolicy()
    waits = []
    for lived in (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 600.0, 0.1):
        child.record_exit(lived, policy)
        waits.append(child.restart_delay(policy))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 0.5]


def test_the_supervisor_gives_up_only_if_all_children_exit_early() -> None:
    children, policy = [SupervisedChild(0), SupervisedChild(1)], RestartPolicy()
    for _ in range(5):
        children[0].record_exit(0.1, policy)
    assert not should_give_up(children, policy)
    for _ in range(3):
        children[1].record_exit(0.1, policy)
    assert should_give_up(children, policy)
