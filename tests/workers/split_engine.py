"""An engine behind a scheduler of its own, as a gateway sees it, for suites that know engines only.

The worker is on the same loop, on another machine, or an actor of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from modelyard.core.engine import Control, Embeddings, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import ModelSpec
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store.memory import MemoryStore
from modelyard.workers.ray import RayCluster
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, generate_keys, write_keys
from modelyard.workers.worker import Worker
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine
from tests.workers.harness import DEADLINE_S, folder
from tests.workers.ray_nodes import HEAD
from tests.workers.remote_machine import HERE, machine


class SplitEngine:
    """A worker, a scheduler with its desk, and a gateway's pool, made when it is opened."""

    keys: ClusterKeys | None = None

    def __init__(self, backend: str, spec: EngineSpec, heartbeat: HeartbeatConfig) -> None:
        self._backend, self._spec, self._heartbeat = backend, spec, heartbeat
        self.info = EngineInfo(backend, dict(spec.caches))
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._parts: list[Any] = []  # the last one ends first
        self._engine: Any = None

    async def open(self, progress: OnProgress) -> None:
        home = folder()
        crew = await self._crew(home)
        scheduler = Scheduler()
        self._parts.append(scheduler)
        name, spec = self._spec.model, self._spec
        make = lambda: create_worker_engine(crew, self._backend, spec, "x")  # noqa: E731
        scheduler.reconfigure({name: ModelSpec(name=name, caches=spec.caches, make=make, identity="x")})
        store = MemoryStore(1, 1, 1)
        desk = SchedulerServer(
            self._address(home), scheduler, crew, store, _nothing, keys=self.keys, heartbeat=self._heartbeat
        )
        self._parts.append(desk)
        self._staff(crew, desk.endpoint, home)
        pool = self.pool = RemotePool(desk.endpoint, "gateway", keys=self.keys, heartbeat=self._heartbeat)
        self._parts.append(pool)
        await scheduler.load(name)
        async with asyncio.timeout(DEADLINE_S):
            while pool.engine(name) is None:  # noqa: ASYNC110  it hears of it in a moment
                await asyncio.sleep(0.005)
        self._engine = pool.engine(name)
        self.info = self._engine.info
        progress(1.0, "ready")

    def _address(self, home: Path) -> str:
        return f"ipc://{home / 's'}"

    async def _crew(self, home: Path) -> WorkerPool:
        return WorkerPool(home / "workers", heartbeat=self._heartbeat, launch=False)

    def _staff(self, crew: WorkerPool, scheduler: str, home: Path) -> None:
        worker = Worker(f"ipc://{home / 'w'}", heartbeat=self._heartbeat)
        self._parts.insert(0, worker)
        crew.register("w", worker.endpoint, [])

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
        for part in reversed(parts):
            await part.close()


class FarEngine(SplitEngine):
    """The worker is a process on the other machine, which has found the scheduler by its address and keys."""

    keys = generate_keys()

    def _address(self, home: Path) -> str:
        return f"tcp://{HERE}:*"

    async def _crew(self, home: Path) -> WorkerPool:
        machine()  # our own end of the cable is an address that the scheduler needs
        return WorkerPool(home / "workers", keys=self.keys, heartbeat=self._heartbeat, launch=False)

    def _staff(self, crew: WorkerPool, scheduler: str, home: Path) -> None:
        assert self.keys is not None
        write_keys(home / "keys", self.keys)
        config = home / "c.toml"
        config.write_text(f'[workers]\nkeys = "{home / "keys"}"\npatience = {self._heartbeat.worker_misses}\n')
        self._parts.insert(0, Guest(machine().worker(scheduler, config)))


class Guest:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def close(self) -> None:
        self._process.terminate()
        code = await asyncio.to_thread(self._process.wait, DEADLINE_S)
        assert code in (0, -15), f"the worker ended with {code}"  # it may not have come to listen to signals yet


class RayEngine(SplitEngine):
    """The worker is an actor, on whichever node Ray has put it."""

    keys = generate_keys()

    async def _crew(self, home: Path) -> WorkerPool:
        cluster = RayCluster(HEAD, {}, self.keys, self._heartbeat)
        self._parts.append(cluster)
        await cluster.open()
        return WorkerPool(home / "workers", keys=self.keys, heartbeat=self._heartbeat, cluster=cluster)

    def _staff(self, crew: WorkerPool, scheduler: str, home: Path) -> None:
        """That is Ray's."""


async def _nothing() -> None:
    raise Unavailable("nothing to read")
