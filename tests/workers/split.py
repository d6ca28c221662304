"""An engine behind a scheduler of its own, as a gateway sees it, for suites that know engines only."""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.core.engine import Control, Embeddings, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import Blueprint
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store.memory import MemoryStore
from modelyard.workers.crew import Crew
from modelyard.workers.desk import Desk
from modelyard.workers.placed import placed
from modelyard.workers.pool import RemotePool
from modelyard.workers.pulse import Pace
from modelyard.workers.worker import Worker
from tests.workers.stage import folder


class SplitEngine:
    """A worker, a scheduler with its desk, and a gateway's pool, made when it is opened."""

    def __init__(self, backend: str, spec: EngineSpec, pace: Pace) -> None:
        self._backend, self._spec, self._pace = backend, spec, pace
        self.info = EngineInfo(backend, dict(spec.caches))
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._parts: list[Any] = []
        self._engine: Any = None

    async def open(self, progress: OnProgress) -> None:
        home = folder()
        crew = Crew(home / "workers", pace=self._pace, launch=False)
        scheduler = Scheduler()
        name, spec = self._spec.model, self._spec
        make = lambda: placed(crew, self._backend, spec, "x")  # noqa: E731
        scheduler.reconfigure({name: Blueprint(name=name, caches=spec.caches, make=make, identity="x")})
        desk = Desk(f"ipc://{home / 's'}", scheduler, crew, MemoryStore(1, 1, 1), _nothing, pace=self._pace)
        worker = Worker(f"ipc://{home / 'w'}", pace=self._pace)
        pool = RemotePool(desk.endpoint, "gateway", pace=self._pace)
        self._parts = [pool, desk, scheduler, worker]
        crew.enlist("w", worker.endpoint, [])
        await scheduler.load(name)
        while pool.engine(name) is None:  # noqa: ASYNC110  it hears of it in a moment
            await asyncio.sleep(0.005)
        self._engine = pool.engine(name)
        self.info = self._engine.info
        progress(1.0, "ready")

    def generate(self, prompt: Prompt) -> Any:
        return self._engine.generate(prompt)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def control(self, op: Control) -> None:
        await self._engine.control(op)

    async def embed(self, batch: Any) -> Embeddings:
        return await self._engine.embed(batch)

    async def close(self) -> None:
        parts, self._parts = self._parts, []
        for part in parts:
            await part.close()


async def _nothing() -> None:
    raise Unavailable("nothing to read")
