"""What the scheduler costs a request: with 1, 8 and 64 models, with an empty queue and with 1,000 waiting.

    python -m bench.pool [--rounds N]

Each row is the CPU time of one request in microseconds, the median over the rounds. "granted at once" is a request and
its release while a slot is free. "through the queue" is a request that joins the queue, and the release that gives its
slot to the next: the queue keeps its length. Waiting requests come from 20 keys, a third of them with background
priority. The engines do nothing. `python -m bench.loading` measures the loading of models.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard.core.engine import CacheInfo, EngineInfo, EngineSpec
from modelyard.core.pool import LeaseRequest
from modelyard.scheduler.scheduler import Scheduler
from modelyard.scheduler.settings import SchedulerOptions

TARGET_US = 50.0
_CACHES = {"main": CacheInfo(window=4096, parallel=8)}
_REQUESTS = 2000
_KEYS = 20


class IdleEngine:
    """An engine that opens at once and does nothing."""

    def __init__(self) -> None:
        self.info = EngineInfo("idle", _CACHES)
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def open(self, progress: Any) -> None: ...
    async def close(self) -> None: ...


class PoolCase(Struct, frozen=True):
    models: int
    waiting: int
    replicas: int = 1


class PoolCost(Struct, frozen=True):
    case: PoolCase
    name: str
    micros: float


def cases() -> Iterator[PoolCase]:
    for models in (1, 8, 64):
        for waiting in (0, 1000):
            yield PoolCase(models, waiting)
    yield PoolCase(8, 0, replicas=4)
    yield PoolCase(8, 1000, replicas=4)


async def open_scheduler(case: PoolCase) -> Scheduler:
    scheduler = Scheduler(SchedulerOptions(max_waiting=10_000, max_wait_s=600.0), create=lambda *_: IdleEngine())  # type: ignore[arg-type,return-value]
    names = [f"model-{number}" for number in range(case.models)]
    count = case.replicas
    scheduler.reconfigure({n: EngineSpec(n, None, _CACHES, replicas=count, replica_max=count) for n in names})
    for name in names:
        await scheduler.scale(name, case.replicas)
    return scheduler


def lease_request(number: int, model: str) -> LeaseRequest:
    return LeaseRequest(
        model=model,
        cache="main",
        tokens=1000,
        key=f"key-{number % _KEYS}",
        session=f"session-{number % 500}",
        priority="background" if number % 3 == 0 else "main",
        trace=str(number),
    )


def granted_at_once(scheduler: Scheduler, case: PoolCase) -> float:
    """Microseconds per request while a slot is free."""
    requests = [lease_request(number, f"model-{number % case.models}") for number in range(_REQUESTS)]
    began = time.process_time()
    for request in requests:
        scheduler.request(request).cancel()
    return (time.process_time() - began) * 1e6 / _REQUESTS


async def through_the_queue(scheduler: Scheduler, case: PoolCase) -> float:
    """Microseconds per request from joining the queue to the release of its slot."""
    slots = 8 * case.replicas
    tickets = deque(scheduler.request(lease_request(number, "model-0")) for number in range(slots + case.waiting))
    requests = [lease_request(number, "model-0") for number in range(_REQUESTS)]
    began = time.process_time()
    for number, request in enumerate(requests):
        tickets.append(scheduler.request(request))
        while not tickets[0].granted:  # keys take turns, so the oldest is not always granted first
            tickets.rotate(-1)
        tickets.popleft().cancel()
        if number % 100 == 0:
            await asyncio.sleep(0)
    spent = time.process_time() - began
    for ticket in tickets:
        ticket.cancel()
    return spent * 1e6 / _REQUESTS


async def measure(case: PoolCase, rounds: int) -> PoolCost:
    scheduler = await open_scheduler(case)
    if case.waiting:
        name, found = "through the queue", [await through_the_queue(scheduler, case) for _ in range(rounds)]
    else:
        name, found = "granted at once", [granted_at_once(scheduler, case) for _ in range(rounds)]
    await scheduler.close()
    return PoolCost(case, name, statistics.median(found))


def show(costs: list[PoolCost], out: Console) -> None:
    table = Table(title="The scheduler", title_justify="left")
    for name in ("models", "replicas each", "waiting", "", "µs per request", "target"):
        table.add_column(name, justify="right")
    for cost in costs:
        mark = "[green]✓[/green]" if cost.micros <= TARGET_US else "[red]✗[/red]"
        numbers = (str(cost.case.models), str(cost.case.replicas), f"{cost.case.waiting:,}")
        table.add_row(*numbers, cost.name, f"{cost.micros:.1f}", f"≤ {TARGET_US:.0f} {mark}")
    out.print(table)


async def run(rounds: int) -> list[PoolCost]:
    return [await measure(case, rounds) for case in cases()]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduler costs a request.")
    parser.add_argument("--rounds", type=int, default=5)
    show(asyncio.run(run(parser.parse_args().rounds)), Console())


if __name__ == "__main__":
    main()
