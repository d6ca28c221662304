"""A scheduler with fake engines, which open, die and close on command, and a clock that the test advances."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from modelyard.core.engine import CacheInfo, EngineInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.pool import KeyLimits, LeaseRequest, ModelStatus
from modelyard.scheduler.memory_planner import MemoryLimits, MemoryPlanner
from modelyard.scheduler.pooled_model import Clock
from modelyard.scheduler.scheduler import Scheduler
from modelyard.scheduler.settings import SchedulerOptions

EPOCH = 1_700_000_000.0


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock(Clock):
    """Time passes only in `advance`, and due timers fire there."""

    def __init__(self, settle: Callable[[], Awaitable[None]]) -> None:
        self._settle = settle
        self._now, self._order = 0.0, count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return EPOCH + self._now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._now + max(0.0, delay), next(self._order), timer))
        return timer

    @property
    def pending(self) -> int:
        return sum(timer.callback is not None for _, _, timer in self._timers)

    async def advance(self, seconds: float) -> None:
        """Timers fire in order, each at its own time; the consequences of one happen before the next."""
        end = self._now + seconds
        await self._settle()
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
                await self._settle()
        self._now = end
        await self._settle()


async def run_ready(iterations: int = 20) -> None:
    """Run everything that is ready: no fake engine needs more loop iterations than this."""
    for _ in range(iterations):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  some of it comes back from threads
            await asyncio.sleep(0)


class FakeEngine:
    """Opening waits for `gate`; the test resolves `lost`. With `close_error` closing fails."""

    def __init__(self, caches: dict[str, CacheInfo], gate: asyncio.Event, fault: ModelyardError | None) -> None:
        self.info = EngineInfo("fake", caches)
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._gate, self._fault = gate, fault
        self.closed = 0
        self.close_error: Exception | None = None

    async def open(self, progress: Any) -> None:
        progress(0.5, "half way")
        await self._gate.wait()
        if self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        self.closed += 1
        if self.close_error is not None:
            raise self.close_error


class FakeModel:
    """The gate that its engines wait for, the fault that they open with, and all engines ever created."""

    def __init__(self, caches: dict[str, CacheInfo]) -> None:
        self.caches = caches
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: ModelyardError | None = None
        self.engines: list[FakeEngine] = []

    def make(self) -> Any:
        self.engines.append(FakeEngine(self.caches, self.gate, self.fault))
        return self.engines[-1]

    @property
    def open(self) -> int:
        return sum(not engine.closed for engine in self.engines)


class Harness:
    """`limit` is the RAM limit of all models; a model's `size` is the RAM of one of its replicas."""

    def __init__(self, *, limit: int | None = None, keys: dict[str, KeyLimits] | None = None, **options: Any) -> None:
        self.clock = FakeClock(self.settle)
        self.models: dict[str, FakeModel] = {}
        self.sizes: dict[str, int] = {}
        self.scheduler = Scheduler(
            SchedulerOptions(**options),
            create=lambda spec, _: self.models[spec.model].make(),
            limits=keys,
            memory_planner=MemoryPlanner(MemoryLimits(ram=limit), estimate=self._estimate),
            clock=self.clock,
        )

    async def __aenter__(self) -> Harness:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.scheduler.close()
        assert [name for name, model in self.models.items() if model.open] == []

    def add_model(self, name: str, *, size: int = 0, parallel: int = 1, **more: Any) -> FakeModel:
        model = self.scheduler._manager.add(self.spec(name, size=size, parallel=parallel, **more))
        if not size:
            model.need = {}
        return self.models[name]

    def spec(self, name: str, *, size: int = 0, parallel: int = 1, **more: Any) -> EngineSpec:
        caches = more.pop("caches", {"main": CacheInfo(window=100, parallel=parallel)})
        self.models[name] = FakeModel(caches)
        self.sizes[name] = size
        more.setdefault("replica_max", max(4, more.get("replicas", 1)))
        return EngineSpec(name, None, caches, **more)

    def _estimate(self, spec: EngineSpec, _: object) -> Any:
        size = self.sizes[spec.model]
        return MemoryEstimate(weights=size) if size else None

    async def load_model(self, name: str = "a", **more: Any) -> FakeModel:
        """Add a model and load it."""
        model = self.add_model(name, **more)
        await self.scheduler.load(name)
        return model

    def request(self, model: str = "a", cache: str = "main", **more: Any) -> Any:
        return self.scheduler.request(LeaseRequest(model=model, cache=cache, **more))

    async def settle(self) -> None:
        """Run everything that is ready. Memory estimates run in threads and are awaited."""
        await run_ready()
        while tasks := self.scheduler._manager._tasks:
            await asyncio.wait(tasks)
            await run_ready()

    def snapshot(self, name: str = "a") -> ModelStatus:
        return self.scheduler.snapshot().models[name]

    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self.scheduler.snapshot().models.items()}

    async def wait_for_state(self, name: str, state: str) -> None:
        await until(lambda: self.snapshot(name).state == state)
