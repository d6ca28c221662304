"""An engine behind a scheduler, as a gateway sees it, for tests that know engines only.

The worker runs on the same loop, on another machine, or as an actor of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import Control, Embeddings, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store import MemoryStore
from modelyard.workers.definitions import FixedDefinitions, define
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, generate_keys, write_keys
from modelyard.workers.worker import Worker
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine
from modelyard_ray import RayCluster
from tests.workers.harness import DEADLINE_S, short_folder
from tests.workers.ray_nodes import HEAD
from tests.workers.remote_machine import LOCAL_ADDRESS, remote_machine


class SplitEngine:
    """Opening it creates a worker, a scheduler with its server, and a gateway's pool."""

    keys: ClusterKeys | None = None

    def __init__(self, backend: str, spec: EngineSpec, heartbeat: HeartbeatConfig) -> None:
        self._spec, self._heartbeat = replace(spec, backend=backend, identity="x"), heartbeat
        self.info = EngineInfo(backend, dict(spec.caches))
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._parts: list[Any] = []  # closed in reverse order
        self._engine: Any = None

    async def open(self, progress: OnProgress) -> None:
        folder = short_folder()
        workers = await self._worker_pool(folder)
        scheduler = Scheduler(create=lambda spec, _: create_worker_engine(workers, spec))
        self._parts.append(scheduler)
        name = self._spec.model
        scheduler.reconfigure({name: self._spec})
        server = SchedulerServer(
            self._address(folder),
            scheduler,
            workers,
            MemoryStore(1, 1, 1),
            _no_reload,
            keys=self.keys,
            heartbeat=self._heartbeat,
        )
        self._parts.append(server)
        self._start_worker(workers, server.endpoint, folder)
        pool = self.pool = RemotePool(server.endpoint, "gateway", keys=self.keys, heartbeat=self._heartbeat)
        self._parts.append(pool)
        await scheduler.load(name)
        async with asyncio.timeout(DEADLINE_S):
            while pool.engine(name) is None:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.005)
        self._engine = pool.engine(name)
        self.info = self._engine.info
        progress(1.0, "ready")

    def _address(self, folder: Path) -> str:
        return f"ipc://{folder / 's'}"

    async def _worker_pool(self, folder: Path) -> WorkerPool:
        return WorkerPool(folder / "workers", heartbeat=self._heartbeat, launch=False)

    def _start_worker(self, workers: WorkerPool, scheduler: str, folder: Path) -> None:
        worker = Worker(f"ipc://{folder / 'w'}", FixedDefinitions(self._definition()), heartbeat=self._heartbeat)
        self._parts.insert(0, worker)
        workers.register("w", worker.endpoint, [], models=(self._spec.model,))

    def _definition(self) -> EngineSpec:
        return define(self._spec)

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


class RemoteMachineEngine(SplitEngine):
    """The worker is a process on the other machine, which finds the scheduler by its address and keys."""

    keys = generate_keys()

    def _address(self, folder: Path) -> str:
        return f"tcp://{LOCAL_ADDRESS}:*"

    async def _worker_pool(self, folder: Path) -> WorkerPool:
        remote_machine()  # creates the local address that the scheduler listens on
        return WorkerPool(folder / "workers", keys=self.keys, heartbeat=self._heartbeat, launch=False)

    def _start_worker(self, workers: WorkerPool, scheduler: str, folder: Path) -> None:
        assert self.keys is not None
        write_keys(folder / "keys", self.keys)
        definition, config = self._definition(), folder / "c.json"
        model = {"backend": definition.backend, **definition.options}
        settings = {"keys": str(folder / "keys"), "patience": self._heartbeat.worker_misses}
        config.write_text(json.dumps({"workers": settings, "models": {definition.model: model}}))
        self._parts.insert(0, WorkerProcess(remote_machine().start_worker(scheduler, config)))


class WorkerProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def close(self) -> None:
        self._process.terminate()
        code = await asyncio.to_thread(self._process.wait, DEADLINE_S)
        assert code in (0, -15), f"the worker ended with {code}"  # it may not have installed its handlers yet


class RayEngine(SplitEngine):
    """The worker is an actor on a node of Ray's choice."""

    keys = generate_keys()

    async def _worker_pool(self, folder: Path) -> WorkerPool:
        cluster = RayCluster(HEAD, {}, self.keys, self._heartbeat)
        self._parts.append(cluster)
        await cluster.open()
        return WorkerPool(folder / "workers", keys=self.keys, heartbeat=self._heartbeat, cluster=cluster)

    def _start_worker(self, workers: WorkerPool, scheduler: str, folder: Path) -> None:
        """Ray does."""


async def _no_reload() -> None:
    raise Unavailable("there is no configuration to reload")
