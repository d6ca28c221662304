"""The scheduler as a process of its own: models in workers, gateways at its desk; and what the other processes need."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from modelyard.config.settings import Config
from modelyard.core.engine import Engine, EngineSpec
from modelyard.library.cache_dir import cache_dir
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.admin_service import Reread
from modelyard.server.app import make_scheduler
from modelyard.server.engine_factory import blueprints
from modelyard.store import open_store
from modelyard.telemetry import log
from modelyard.workers.__main__ import KEYS_VARIABLE
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.transport import check_endpoint, is_loopback
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine, workers_folder
from modelyard.workers.worker_process import run_worker, worker_loop_factory

ENDPOINT = "tcp://127.0.0.1:5555"
_ADOPT_S = 5.0  # to take over what the last scheduler's workers hold; it may be of models that are not wanted any more

_log = logging.getLogger("modelyard.scheduler")


class Dispatch:
    """The scheduler's process. `open` finds the workers of the one before it, and loads what is missing."""

    def __init__(self, config: Config, endpoint: str, reread: Reread, env: Mapping[str, str] = os.environ) -> None:
        self._config, self._reread = config, reread
        self._endpoint, self._env = endpoint, env
        workers = config.workers
        self._keys, self._pace = workers.pair(), workers.pace()
        folder = workers_folder(endpoint, cache_dir(env) / "run")
        self._cluster = workers.ray()
        self.crew = WorkerPool(
            folder,
            keys=self._keys,
            pace=self._pace,
            host=workers.host,
            launch=workers.launch,
            cluster=self._cluster,
        )
        self.scheduler: Scheduler = make_scheduler(config, env, self.crew.sites)
        self._store = open_store(config.store)
        self.desk: SchedulerServer | None = None

    async def open(self) -> None:
        """Gateways are let in last: those who come back with places that they use must find the engines up."""
        check_endpoint(self._endpoint, self._keys)
        if self._cluster is not None:
            await self._cluster.open()
        found = await self.crew.find()
        self._install(self._config)
        for name, model in self._config.models.items():
            if model.enabled:
                self.scheduler.preload(name)
        await self._adopted(found)
        self.desk = SchedulerServer(
            self._endpoint, self.scheduler, self.crew, self._store, self.reload, keys=self._keys, pace=self._pace
        )
        _log.info("the scheduler listens on %s; %d engines were found open", self.desk.endpoint, found)

    async def _adopted(self, found: int) -> None:
        deadline = asyncio.get_running_loop().time() + _ADOPT_S
        while asyncio.get_running_loop().time() < deadline and self._up() < found:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _up(self) -> int:
        return sum(len(self.scheduler.engines(name)) for name in self.scheduler.status())

    def _install(self, config: Config) -> None:
        def place(backend: str, spec: EngineSpec, identity: str, site: str) -> Engine:
            return create_worker_engine(self.crew, backend, spec, identity, site)

        self.scheduler.reconfigure(blueprints(config, {}, place))

    async def reload(self) -> None:
        loaded = await asyncio.to_thread(self._reread)
        self._install(loaded.config)
        self._config = loaded.config

    async def close(self) -> None:
        if self.desk is not None:
            await self.desk.close()
        await self.scheduler.close()
        if self._cluster is not None:
            await self._cluster.close()
        self.crew.clear()
        await self._store.close()


def run_scheduler(config: Config, endpoint: str | None, reread: Reread) -> int:
    log.setup(config.log)
    address = endpoint or config.scheduler.endpoint or ENDPOINT
    if config.workers.keys is not None:
        os.environ[KEYS_VARIABLE] = str(config.workers.keys.expanduser())
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        return runner.run(_run(config, address, reread))


async def _run(config: Config, endpoint: str, reread: Reread) -> int:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    dispatch = Dispatch(config, endpoint, reread)
    try:
        await dispatch.open()
        await told.wait()
    finally:
        await dispatch.close()
    return 0


def gateway_pool(config: Config, endpoint: str) -> RemotePool:
    """To be called on the loop that the gateway runs on."""
    workers = config.workers
    name = f"gateway-{os.getpid()}-{uuid4().hex[:8]}"
    timeout_s = config.scheduler.timeout_ms / 1000
    return RemotePool(endpoint, name, keys=workers.pair(), pace=workers.pace(), timeout_s=timeout_s)


def run_worker_for(config: Config, scheduler: str, listen: str | None) -> int:
    workers = config.workers
    address = listen or _beside(scheduler)
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        runner.run(run_worker(address, keys=workers.pair(), pace=workers.pace(), scheduler=scheduler))
    return 0


def _beside(scheduler: str) -> str:
    """Where a worker of a scheduler on this machine listens, if nobody says."""
    scheme, _, rest = scheduler.partition("://")
    if scheme == "ipc":
        return f"ipc://{Path(rest).parent / f'worker-{os.getpid()}.sock'}"
    host = rest.rpartition(":")[0]
    return "tcp://127.0.0.1:*" if is_loopback(host) else "tcp://0.0.0.0:*"
