"""What the scheduler costs a request: with 1, 8 and 64 models, with nobody and with 1,000 waiting.

    python -m bench.pool [--rounds N]

Each row is the CPU time of a whole turn in microseconds, median over the rounds. «granted at once» is a request and its
release where a place is free. «through the queue» is a request that joins the queue, and the release that hands a place
to the next in line: the queue stays as long as it was. Waiters come from 20 keys, a third of them in the background.
The engines do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard.core.engine import CacheInfo, EngineInfo
from modelyard.core.lease import LeaseRequest
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.settings import SchedulerOptions
from modelyard.scheduler.scheduler import Scheduler

TARGET_US = 50.0
_CACHES = {"main": CacheInfo(window=4096, parallel=8)}
_TURNS = 2000
_KEYS = 20


class Idle:
    """An engine that opens at once and does nothing."""

    def __init__(self) -> None:
        self.info = EngineInfo("idle", _CACHES)
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def open(self, progress: Any) -> None: ...
    async def close(self) -> None: ...


class Case(Struct, frozen=True):
    models: int
    waiting: int
    replicas: int = 1


class Row(Struct, frozen=True):
    case: Case
    what: str
    micros: float


def cases() -> Iterator[Case]:
    for models in (1, 8, 64):
        for waiting in (0, 1000):
            yield Case(models, waiting)
    yield Case(8, 0, replicas=4)
    yield Case(8, 1000, replicas=4)


async def opened(case: Case) -> Scheduler:
    scheduler = Scheduler(SchedulerOptions(max_waiting=10_000, max_wait_s=600.0))
    names = [f"model-{number}" for number in range(case.models)]
    make: Callable[[], Any] = Idle
    scheduler.reconfigure(
        {
            name: ModelSpec(name=name, caches=_CACHES, make=make, replicas=case.replicas, replica_max=case.replicas)
            for name in names
        }
    )
    for name in names:
        await scheduler.scale(name, case.replicas)
    return scheduler


def demand(number: int, model: str) -> LeaseRequest:
    background = number % 3 == 0
    return LeaseRequest(
        model=model,
        cache="main",
        tokens=1000,
        key=f"key-{number % _KEYS}",
        session=f"session-{number % 500}",
        priority="background" if background else "main",
        trace=str(number),
    )


def at_once(scheduler: Scheduler, case: Case) -> float:
    """Microseconds a request where a place is free."""
    wanted = [demand(number, f"model-{number % case.models}") for number in range(_TURNS)]
    began = time.process_time()
    for each in wanted:
        scheduler.request(each).cancel()
    return (time.process_time() - began) * 1e6 / _TURNS


async def queued(scheduler: Scheduler, case: Case) -> float:
    """Microseconds a request that waits, from joining the queue to giving its place back."""
    places = 8 * case.replicas
    line = deque(scheduler.request(demand(number, "model-0")) for number in range(places + case.waiting))
    wanted = [demand(number, "model-0") for number in range(_TURNS)]
    began = time.process_time()
    for number, each in enumerate(wanted):
        line.append(scheduler.request(each))
        _next(line).cancel()
        if number % 100 == 0:
            await asyncio.sleep(0)
    spent = time.process_time() - began
    for ticket in line:
        ticket.cancel()
    return spent * 1e6 / _TURNS


def _next(line: deque[Any]) -> Any:
    """Somebody who runs: with keys in turn that is not always the oldest, but it is one of the oldest."""
    while not line[0].granted:
        line.rotate(-1)
    return line.popleft()


async def measure(case: Case, rounds: int) -> Row:
    scheduler = await opened(case)
    if case.waiting:
        what, found = "through the queue", [await queued(scheduler, case) for _ in range(rounds)]
    else:
        what, found = "granted at once", [at_once(scheduler, case) for _ in range(rounds)]
    await scheduler.close()
    return Row(case, what, statistics.median(found))


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="The scheduler", title_justify="left")
    for name in ("models", "replicas each", "waiting", "", "µs a request", "target"):
        table.add_column(name, justify="right")
    for row in rows:
        mark = "[green]✓[/green]" if row.micros <= TARGET_US else "[red]✗[/red]"
        numbers = (str(row.case.models), str(row.case.replicas), f"{row.case.waiting:,}")
        table.add_row(*numbers, row.what, f"{row.micros:.1f}", f"≤ {TARGET_US:.0f} {mark}")
    console.print(table)


async def run(rounds: int) -> list[Row]:
    return [await measure(case, rounds) for case in cases()]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduler costs a request.")
    parser.add_argument("--rounds", type=int, default=5)
    show(asyncio.run(run(parser.parse_args().rounds)), Console())


if __name__ == "__main__":
    main()
