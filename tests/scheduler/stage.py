"""A scheduler with engines that do nothing but open, die and close when told, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from modelyard.core.engine import CacheInfo, EngineInfo, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.lease import LeaseRequest
from modelyard.core.pool import ModelSnapshot, ModelSpec
from modelyard.scheduler.memory_planner import MemoryLimits, MemoryPlanner
from modelyard.scheduler.rate_limit import KeyLimits
from modelyard.scheduler.scheduler import Scheduler
from modelyard.scheduler.settings import SchedulerOptions

EPOCH = 1_700_000_000.0


class Timer:
    def __init__(self, deed: Callable[[], None]) -> None:
        self.deed: Callable[[], None] | None = deed

    def cancel(self) -> None:
        self.deed = None


class HandClock:
    """Time passes when the test says so, and whatever is due then happens at once."""

    def __init__(self, settle: Callable[[], Awaitable[None]]) -> None:
        self._settle = settle
        self._now, self._order = 0.0, count()
        self._due: list[tuple[float, int, Timer]] = []

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return EPOCH + self._now

    def call_later(self, delay: float, deed: Callable[[], None]) -> Timer:
        timer = Timer(deed)
        heapq.heappush(self._due, (self._now + max(0.0, delay), next(self._order), timer))
        return timer

    @property
    def pending(self) -> int:
        return sum(timer.deed is not None for _, _, timer in self._due)

    async def pass_(self, seconds: float) -> None:
        """Timers fire in order, each at its own time, and everything that follows from one happens before the next."""
        end = self._now + seconds
        await self._settle()
        while self._due and self._due[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._due)
            if timer.deed is not None:
                timer.deed()
                await self._settle()
        self._now = end
        await self._settle()


async def turns(number: int = 20) -> None:
    """Let everything that is ready run: no puppet needs more turns of the loop than this."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  some of it comes back from threads
            await asyncio.sleep(0)


class Puppet:
    """An engine whose opening waits for `gate` and whose death is ours to call."""

    def __init__(self, caches: dict[str, CacheInfo], gate: asyncio.Event, fault: ModelyardError | None) -> None:
        self.info = EngineInfo("puppet", caches)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._gate, self._fault = gate, fault
        self.closed = 0

    async def open(self, progress: Any) -> None:
        progress(0.5, "half way")
        await self._gate.wait()
        if self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        self.closed += 1


class Act:
    """One model: the gate that its engines wait at while they open, their fault, and all engines ever made."""

    def __init__(self, caches: dict[str, CacheInfo]) -> None:
        self.caches = caches
        self.gate, self.fault = asyncio.Event(), None
        self.gate.set()
        self.engines: list[Puppet] = []
        self.fault: ModelyardError | None

    def make(self) -> Any:
        self.engines.append(Puppet(self.caches, self.gate, self.fault))
        return self.engines[-1]

    @property
    def open(self) -> int:
        return sum(not engine.closed for engine in self.engines)


class Stage:
    """`limit` is the RAM that all models may take; a model's `size` is what one of its replicas takes."""

    def __init__(self, *, limit: int | None = None, keys: dict[str, KeyLimits] | None = None, **bounds: Any) -> None:
        self.clock = HandClock(self.settle)
        self.acts: dict[str, Act] = {}
        self.blueprints: dict[str, ModelSpec] = {}
        self.scheduler = Scheduler(
            SchedulerOptions(**bounds),
            limits=keys,
            memory_planner=MemoryPlanner(MemoryLimits(ram=limit)),
            clock=self.clock,
        )

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.scheduler.close()
        assert [name for name, act in self.acts.items() if act.open] == []

    def model(self, name: str, *, size: int = 0, parallel: int = 1, **more: Any) -> Act:
        blueprint = self.blueprint(name, size=size, parallel=parallel, **more)
        self.scheduler._manager.add(blueprint)
        return self.acts[name]

    def blueprint(self, name: str, *, size: int = 0, parallel: int = 1, **more: Any) -> ModelSpec:
        caches = more.pop("caches", {"main": CacheInfo(window=100, parallel=parallel)})
        act = self.acts[name] = Act(caches)
        estimate = (lambda _: MemoryEstimate(weights=size)) if size else None
        more.setdefault("replica_max", max(4, more.get("replicas", 1)))
        return ModelSpec(name=name, caches=caches, make=act.make, estimate=estimate, **more)

    def ask(self, model: str, cache: str = "main", **more: Any) -> Any:
        return self.scheduler.request(LeaseRequest(model=model, cache=cache, **more))

    async def settle(self) -> None:
        """Let everything run that waits for nothing but its turn; surveys run in threads, and are waited for."""
        await turns()
        while tasks := self.scheduler._manager._tasks:
            await asyncio.wait(tasks)
            await turns()

    async def up(self, *names: str) -> Stage:
        for name in names:
            await self.scheduler.load(name)
        return self

    def of(self, name: str) -> ModelSnapshot:
        return self.scheduler.snapshot().models[name]

    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self.scheduler.snapshot().models.items()}

    async def becomes(self, name: str, state: str) -> None:
        await until(lambda: self.of(name).state == state)
