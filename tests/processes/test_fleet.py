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
from tests.processes.roll_call import RollCall, roll_call

_QUICK = RestartPolicy(first_wait=0.001, last_wait=0.002, young=600.0, grace=60.0, tries=3)


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
async def _fleet(
    call: RollCall, workers: int, manner: str = "steady", pace: RestartPolicy = _QUICK
) -> AsyncIterator[_Running]:
    running = _Running(asyncio.create_task(run_supervised(call.argv(manner), workers, Lobby(), pace)))
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


async def test_every_child_is_told_its_index_and_the_hub(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _fleet(call, 2):
        children = [await call.next(), await call.next()]
        assert {child.index for child in children} == {0, 1}
        assert {child.hub for child in children} == {"/the/hub"}


async def test_a_killed_child_is_replaced_in_its_place(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _fleet(call, 2):
        first = await call.next()
        second = await call.next()
        os.kill(first.pid, signal.SIGKILL)
        await first.gone()
        replacement = await call.next()
        assert replacement.index == first.index
        assert replacement.pid not in (first.pid, second.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_every_child_in_peace(tmp_path: Path, number: int) -> None:
    async with roll_call(tmp_path) as call, _fleet(call, 2) as fleet:
        children = [await call.next(), await call.next()]
        _signal_self(number)
        assert await fleet.code() == 0
        for child in children:
            await child.gone()
        assert call.count == 2


async def test_a_child_that_does_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    hasty = RestartPolicy(first_wait=0.001, young=600.0, grace=0.01)
    async with roll_call(tmp_path) as call, _fleet(call, 1, "deaf", hasty) as fleet:
        child = await call.next()
        _signal_self(signal.SIGTERM)
        assert await fleet.code() == 1
        await child.gone()


async def test_a_second_signal_skips_the_grace(tmp_path: Path) -> None:
    patient = RestartPolicy(first_wait=0.001, young=600.0, grace=3600.0)
    async with roll_call(tmp_path) as call, _fleet(call, 1, "deaf", patient) as fleet:
        child = await call.next()
        _signal_self(signal.SIGTERM)
        _signal_self(signal.SIGINT)
        assert await fleet.code() == 1
        await child.gone()


async def test_a_fleet_whose_children_all_die_at_the_start_gives_up_after_three_tries(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call, _fleet(call, 2, "brief") as fleet:
        assert await fleet.code() == 1
        for _ in range(6):
            await call.next()


async def test_a_command_that_does_not_exist_ends_the_fleet_with_code_one(tmp_path: Path) -> None:
    lobby = Lobby()
    async with asyncio.timeout(60):
        assert await run_supervised([str(tmp_path / "nothing")], 1, lobby, _QUICK) == 1
    assert lobby.closed


_PARENT = """
import asyncio, sys
from modelyard.processes.supervisor import run_fleet
class Lobby:
    path = "/the/hub"
    async def open(self): ...
    async def close(self): ...
asyncio.run(run_fleet(sys.argv[1:], 2, Lobby()))
"""


async def test_no_child_survives_a_parent_that_was_killed(tmp_path: Path) -> None:
    async with roll_call(tmp_path) as call:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, *call.argv("deaf"))
        children = [await call.next(), await call.next()]
        parent.kill()
        await parent.wait()
        for child in children:
            await child.gone()


def test_the_wait_doubles_while_a_child_dies_young_and_starts_over_when_it_lived() -> None:
    child, pace = SupervisedChild(0), RestartPolicy()
    waits = []
    for lived in (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 600.0, 0.1):
        child.died(lived, pace)
        waits.append(child.wait(pace))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 0.5]


def test_one_child_that_lives_keeps_the_hope_up() -> None:
    children, pace = [SupervisedChild(0), SupervisedChild(1)], RestartPolicy()
    for _ in range(5):
        children[0].died(0.1, pace)
    assert not should_give_up(children, pace)
    for _ in range(3):
        children[1].died(0.1, pace)
    assert should_give_up(children, pace)
