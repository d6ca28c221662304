"""The scheduler as its own process: it runs models in workers and serves gateways. Also the worker command."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.library.cache_dir import run_dir
from modelyard.library.model_files import library_file
from modelyard.library.progress import ProgressReporter
from modelyard.object_store import objects_path, open_object_store
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.admin_service import ConfigLoader, reread_config
from modelyard.server.app import key_limits, make_scheduler
from modelyard.server.can_run import unrunnable_models
from modelyard.server.config_watcher import watch_library
from modelyard.server.engine_factory import configure_pool, prepare_engines
from modelyard.server.scheduler_models import describe_models
from modelyard.server.split_pool import runs_in_gateways
from modelyard.store import open_store
from modelyard.telemetry import log
from modelyard.workers.definitions import define, not_defined
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.transport import is_loopback, link_keys, scheduler_address
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine, workers_folder
from modelyard.workers.worker_process import KEYS_VARIABLE, PARENT_VARIABLE, run_worker, worker_loop_factory

_ADOPT_S = 5.0  # for adopting the engines of the previous scheduler's workers; some may belong to removed models

_log = logging.getLogger("modelyard.scheduler")


class SchedulerProcess:
    """`open` finds the workers of the previous scheduler process and loads what is missing."""

    def __init__(
        self, config: Config, endpoint: str, load_config: ConfigLoader, env: Mapping[str, str] = os.environ
    ) -> None:
        self._config, self._reread = config, load_config
        self._endpoint, self._env = endpoint, env
        workers = config.workers
        self._keys, self._heartbeat = workers.cluster_keys(), workers.heartbeat()
        folder = workers_folder(endpoint, run_dir(env))
        self._cluster = workers.make_cluster()
        self.workers = WorkerPool(
            folder,
            keys=self._keys,
            heartbeat=self._heartbeat,
            host=workers.host,
            launch=workers.launch,
            cluster=self._cluster,
        )
        self.scheduler: Scheduler = make_scheduler(config, env, self.workers.nodes, self._create_engine)
        self._store = open_store(config.store)
        self._objects = open_object_store(config.store, objects_path())
        self.server: SchedulerServer | None = None

    async def open(self) -> None:
        """Listen last: gateways that reconnect with running leases must find the engines open."""
        link_keys(self._endpoint, self._keys)  # refuse a bad address before models are loaded
        if self._cluster is not None:
            await self._cluster.open()
        found = await self.workers.find_running()
        await self._configure(self._config)
        for name in self.scheduler.status():
            if self._config.models[name].enabled:
                self.scheduler.preload(name)
        await self._wait_for_adopted(found)
        self.server = SchedulerServer(
            self._endpoint,
            self.scheduler,
            self.workers,
            self._store,
            self.reload,
            objects=self._objects,
            limits=key_limits(self._config.keys),
            describe_models=lambda: describe_models(self._config),
            keys=self._keys,
            heartbeat=self._heartbeat,
        )
        _log.info("the scheduler listens on %s; adopted %d open engines", self.server.endpoint, found)

    async def _wait_for_adopted(self, found: int) -> None:
        deadline = asyncio.get_running_loop().time() + _ADOPT_S
        while asyncio.get_running_loop().time() < deadline and self._open_engines() < found:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _open_engines(self) -> int:
        return sum(len(self.scheduler.engines(name)) for name in self.scheduler.status())

    def _create_engine(self, spec: EngineSpec, node: str) -> Engine:
        if spec.fault is not None:
            raise spec.fault
        return create_worker_engine(self.workers, spec, node)

    async def reload(self) -> None:
        loaded = await asyncio.to_thread(reread_config, self._reread, self._config)
        await self._configure(loaded.config)
        self._config = loaded.config

    async def _configure(self, config: Config) -> None:
        configure_pool(self.scheduler, config, {}, await self._unrunnable(config), runs_in_gateways)

    async def _unrunnable(self, config: Config) -> Collection[str]:
        """With `serve --workers` engines run on this machine; other workers have files and GPUs of their own."""
        is_here = PARENT_VARIABLE in os.environ and self._cluster is None
        return await asyncio.to_thread(unrunnable_models, config) if is_here else ()

    async def reload_library(self) -> None:
        """A model was pulled, added or removed: here first, then in all gateways."""
        if self.server is not None:
            await self.server.reload()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()
        await self.scheduler.close()
        if self._cluster is not None:
            await self._cluster.close()
        self.workers.remove_files()
        await self._store.close()
        await self._objects.close()


def run_scheduler(config: Config, endpoint: str | None, load_config: ConfigLoader) -> int:
    log.setup(config.log)
    address = scheduler_address(endpoint or config.scheduler.endpoint)
    if config.workers.keys is not None:
        os.environ[KEYS_VARIABLE] = str(config.workers.keys.expanduser())
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        return runner.run(_run(config, address, load_config))


async def _run(config: Config, endpoint: str, load_config: ConfigLoader) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    process = SchedulerProcess(config, endpoint, load_config)
    watching: asyncio.Task[None] | None = None
    try:
        await process.open()
        if config.library:
            watching = asyncio.create_task(watch_library(process.reload_library))
        await stopped.wait()
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await process.close()
    return 0


class ConfiguredDefinitions:
    """The models of a configuration, read again when its files change."""

    def __init__(self, load: ConfigLoader) -> None:
        self._load, self._loaded = load, load()
        self._read = self._changed()

    def _changed(self) -> tuple[int, ...]:
        files = [library_file(), *(source for source in self._loaded.sources if isinstance(source, Path))]
        return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)

    def _config(self) -> Config:
        if (changed := self._changed()) != self._read:
            self._read = changed
            try:
                self._loaded = self._load()
            except ModelyardError as error:
                _log.error("the configuration cannot be used, the last one stays: %s", error.message)
        return self._loaded.config

    def find(self, model: str) -> EngineSpec:
        entry = self._config().router().catalog.models.get(model)
        if entry is None:
            raise not_defined(model)
        return define(engine_spec(entry))

    def models(self) -> tuple[str, ...]:
        return tuple(self._config().models)


def run_worker_for(config: Config, scheduler: str, listen: str | None, load_config: ConfigLoader) -> int:
    prepare_engines(config, ProgressReporter(write_line=logging.getLogger("modelyard.library").info))
    workers, definitions = config.workers, ConfiguredDefinitions(load_config)
    scheduler = scheduler_address(scheduler)
    address = listen or _default_listen(scheduler)
    work = run_worker(
        address, definitions, keys=workers.cluster_keys(), heartbeat=workers.heartbeat(), scheduler=scheduler
    )
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        runner.run(work)
    return 0


def _default_listen(scheduler: str) -> str:
    """The default address of a worker for a scheduler at this address."""
    scheme, _, rest = scheduler.partition("://")
    if scheme == "ipc":
        return f"ipc://{Path(rest).parent / f'worker-{os.getpid()}.sock'}"
    host = rest.rpartition(":")[0]
    return "tcp://127.0.0.1:*" if is_loopback(host) else "tcp://0.0.0.0:*"
