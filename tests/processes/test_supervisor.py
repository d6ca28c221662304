"""Supervision of real children, which report to the test over a connection that ends when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelyard.processes.supervisor import (
    RestartPolicy,
    SupervisedChild,
    private_folder,
    run_supervised,
    should_give_up,
)

# Runs in a child: reports its index, pid and folder, then waits for a signal.
CHILD = """
import os, signal, socket, sys
if sys.argv[2] == "ignore_sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "second":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
report = socket.socket(socket.AF_UNIX)
report.connect(sys.argv[1])
facts = (os.environ["MODELYARD_WORKER_INDEX"], str(os.getpid()), os.environ["MODELYARD_WORKER_FOLDER"])
report.sendall((" ".join(facts) + "\\n").encode())
if sys.argv[2] == "exit_at_once":
    sys.exit(3)
if sys.argv[2] == "second":
    signal.sigwait({signal.SIGTERM})
    again = socket.socket(socket.AF_UNIX)
    again.connect(sys.argv[1])
    again.sendall((" ".join(facts) + "\\n").encode())
    signal.sigwait({signal.SIGTERM})
    sys.exit(0)
while True:
    signal.pause()
"""


class ReportedChild:
    """A child that has reported."""

    def __init__(self, line: str, reader: asyncio.StreamReader) -> None:
        index, pid, self.folder = line.split()
        self.index, self.pid = int(index), int(pid)
        self._reader = reader

    async def wait_dead(self) -> None:
        async with asyncio.timeout(60):
            try:
                await self._reader.read()
            except ConnectionError:
                return


class Reports:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._arrivals: asyncio.Queue[ReportedChild] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self.count = 0

    def argv(self, mode: str = "wait") -> list[str]:
        return [sys.executable, "-S", "-c", CHILD, self.path, mode]

    async def next(self) -> ReportedChild:
        async with asyncio.timeout(60):
            return await self._arrivals.get()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        self._writers.append(writer)
        self._arrivals.put_nowait(ReportedChild((await reader.readline()).decode(), reader))

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def collect_reports(folder: Path) -> AsyncIterator[Reports]:
    reports = Reports(folder / "reports")
    server = await asyncio.start_unix_server(reports.take, reports.path)
    try:
        yield reports
    finally:
        server.close()
        await reports.close()


FOLDER = Path("/the/folder")
_QUICK = RestartPolicy(first_delay=0.001, max_delay=0.002, min_uptime=600.0, grace=60.0, max_early_exits=3)


@asynccontextmanager
async def _supervised(
    reports: Reports, workers: int, mode: str = "wait", policy: RestartPolicy = _QUICK
) -> AsyncIterator[_Running]:
    running = _Running(asyncio.create_task(run_supervised(reports.argv(mode), workers, FOLDER, policy)))
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


async def test_every_child_gets_its_index_and_the_folder(tmp_path: Path) -> None:
    async with collect_reports(tmp_path) as reports, _supervised(reports, 2):
        children = [await reports.next(), await reports.next()]
        assert {child.index for child in children} == {0, 1}
        assert {child.folder for child in children} == {"/the/folder"}


async def test_a_killed_child_is_replaced_with_the_same_index(tmp_path: Path) -> None:
    async with collect_reports(tmp_path) as reports, _supervised(reports, 2):
        first = await reports.next()
        second = await reports.next()
        os.kill(first.pid, signal.SIGKILL)
        await first.wait_dead()
        replacement = await reports.next()
        assert replacement.index == first.index
        assert replacement.pid not in (first.pid, second.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_every_child_gracefully(tmp_path: Path, number: int) -> None:
    async with collect_reports(tmp_path) as reports, _supervised(reports, 2) as supervisor:
        children = [await reports.next(), await reports.next()]
        _signal_self(number)
        assert await supervisor.code() == 0
        for child in children:
            await child.wait_dead()
        assert reports.count == 2


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    short_grace = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=0.01, short_grace=0.01)
    async with (
        collect_reports(tmp_path) as reports,
        _supervised(reports, 1, "ignore_sigterm", short_grace) as supervisor,
    ):
        child = await reports.next()
        _signal_self(signal.SIGTERM)
        assert await supervisor.code() == 1
        await child.wait_dead()


async def test_a_second_signal_is_passed_on_and_a_third_kills(tmp_path: Path) -> None:
    long_grace = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=3600.0, short_grace=3600.0)
    async with collect_reports(tmp_path) as reports, _supervised(reports, 1, "second", long_grace) as supervisor:
        child = await reports.next()
        _signal_self(signal.SIGTERM)
        assert (await reports.next()).pid == child.pid, "it has seen the first signal"
        _signal_self(signal.SIGINT)
        assert await supervisor.code() == 0
    async with (
        collect_reports(tmp_path) as reports,
        _supervised(reports, 1, "ignore_sigterm", long_grace) as supervisor,
    ):
        child = await reports.next()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            _signal_self(number)
            await asyncio.sleep(0)
        assert await supervisor.code() == 1
        await child.wait_dead()


async def test_a_second_signal_shortens_the_grace_period(tmp_path: Path) -> None:
    long_grace = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=3600.0, short_grace=0.01)
    async with (
        collect_reports(tmp_path) as reports,
        _supervised(reports, 1, "ignore_sigterm", long_grace) as supervisor,
    ):
        child = await reports.next()
        _signal_self(signal.SIGTERM)
        _signal_self(signal.SIGINT)
        assert await supervisor.code() == 1
        await child.wait_dead()


async def test_the_supervisor_gives_up_if_all_children_exit_early_three_times(tmp_path: Path) -> None:
    async with collect_reports(tmp_path) as reports, _supervised(reports, 2, "exit_at_once") as supervisor:
        assert await supervisor.code() == 1
        for _ in range(6):
            await reports.next()


async def test_a_missing_command_ends_the_supervisor_with_code_one(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        assert await run_supervised([str(tmp_path / "nothing")], 1, FOLDER, _QUICK) == 1


_PARENT = """
import asyncio, sys
from pathlib import Path
from modelyard.processes.supervisor import run_supervised
asyncio.run(run_supervised(sys.argv[1:], 2, Path("/the/folder")))
"""


async def test_no_child_survives_a_killed_supervisor(tmp_path: Path) -> None:
    async with collect_reports(tmp_path) as reports:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, *reports.argv("ignore_sigterm"))
        children = [await reports.next(), await reports.next()]
        parent.kill()
        await parent.wait()
        for child in children:
            await child.wait_dead()


async def test_a_child_that_falls_silent_is_replaced_and_others_are_not(tmp_path: Path) -> None:
    watchful = RestartPolicy(first_delay=0.001, min_uptime=600.0, grace=60.0, max_silence=0.05, max_early_exits=99)
    beats, looks = {0: 0, 1: 0, 2: 0}, Counter[int]()

    def heartbeat(index: int) -> int:
        looks[index] += 1  # one of them is before the start
        return beats[index]

    async with collect_reports(tmp_path) as reports:
        running = asyncio.create_task(run_supervised(reports.argv(), 3, FOLDER, watchful, heartbeat=heartbeat))
        children = {child.index: child for child in [await reports.next() for _ in range(3)]}
        lively, mute = children[1].pid, children[2].pid  # the last has never written anything
        replacement, before = asyncio.create_task(reports.next()), looks[0]
        while not replacement.done():
            beats[0] += looks[0] < before + 5  # then it falls silent
            beats[1] += 1
            await asyncio.sleep(0)
        assert (await replacement).index == 0
        await children[0].wait_dead()
        os.kill(lively, 0)
        os.kill(mute, 0)
        running.cancel()
        await asyncio.wait({running})


def test_the_restart_delay_doubles_with_early_exits_and_resets_after_a_long_run() -> None:
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


def test_the_folder_is_private_and_removed() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_temporary_folder_too_long_for_a_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder:
        assert len(str(folder)) < 80
    assert list(long.iterdir()) == []
