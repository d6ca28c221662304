"""The composition root: the only file that knows every part. It makes them, joins them and ends them; no globals."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp

from modelyard.config.settings import Config
from modelyard.core.engine import Node
from modelyard.core.errors import Unavailable
from modelyard.core.store import Store
from modelyard.gateway import Gateway
from modelyard.gateway.replay_memory import ReplayMemory
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.http import server as front
from modelyard.http.admin.context import AdminContext
from modelyard.http.admin.peers import PeerGateways
from modelyard.http.auth import Key, check_bind, read_keys
from modelyard.library.cache_dir import cache_dir
from modelyard.processes.supervisor import INDEX_VARIABLE, SOCKET_VARIABLE
from modelyard.prompt.images import Images
from modelyard.scheduler.memory_planner import MeasurementStore, MemoryPlanner
from modelyard.scheduler.rate_limit import KeyLimits
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.admin_service import AdminService, Reread, defined
from modelyard.server.engine_factory import blueprints
from modelyard.server.memory_estimate import machine
from modelyard.store import open_store
from modelyard.telemetry.history import History
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.metrics_hub import MetricsPeer
from modelyard.telemetry.request_capture import CombinedCaptureSink, DiskCaptureSink, MemoryCaptureSink
from modelyard.telemetry.system import MemoryGauge
from modelyard.workbench.mount import Workbench
from modelyard.workbench.relay import is_keeper, meeting_place, own_place
from modelyard.workers.remote_pool import RemotePool, RemoteStore


class ServerApp(Struct):
    """One gateway process, put together and not yet running."""

    config: Config
    keys: tuple[Key, ...]
    scheduler: Scheduler | RemotePool
    gateway: Gateway
    admin: AdminService
    app: ASGIApp

    async def stop(self) -> None:
        await _stop(self.gateway, self.scheduler)


async def _stop(gateway: Gateway, scheduler: Scheduler | RemotePool) -> None:
    """Every answer under way ends in an error that its client can read, and nothing new begins."""
    gateway.stop(Unavailable("the server is shutting down", code="shutting_down"))
    await scheduler.close()


def compose(
    config: Config,
    env: Mapping[str, str] = os.environ,
    reread: Reread | None = None,
    pool: RemotePool | None = None,
    welcome: Callable[[], None] = lambda: None,
) -> ServerApp:
    """`pool` is a scheduler in another process; without one it is part of this. `welcome` is called once all of it is
    open to others, and before the first model is loaded."""
    keys = read_keys(config.keys, env)
    check_bind(config.http, keys)
    metrics, router = Metrics(), config.router()
    models = {name: definition.model for name, definition in defined(config).items()}
    scheduler = pool or make_scheduler(config, env)
    scheduler.reconfigure(blueprints(config, {name: model.fault for name, model in models.items()}))
    store, shared = _store(config, scheduler)
    gateway = Gateway(
        router=router,
        models=models,
        leases=scheduler,
        images=Images(config.images),
        metrics=metrics,
        history=History(config.log.history_requests),
        replay=ReplayMemory(store if shared else None),
        stored=StoredResponses(store),
    )
    metrics.set_queue_source(lambda: {name: status.waiting for name, status in scheduler.status().items()})
    if env.get(INDEX_VARIABLE, "0") == "0":  # of several gateways on one pool, one tells its figures
        metrics.set_pool_source(scheduler.metrics)
    peer = MetricsPeer(env[SOCKET_VARIABLE], metrics) if env.get(SOCKET_VARIABLE) else None
    service = AdminService(config, scheduler, gateway, reread)
    return ServerApp(
        config,
        keys,
        scheduler,
        gateway,
        service,
        _front(config, keys, scheduler, gateway, peer, service, store, welcome),
    )


def make_scheduler(
    config: Config, env: Mapping[str, str], sites: Callable[[], Sequence[Node]] = lambda: (Node(),)
) -> Scheduler:
    """`sites` are the machines on which engines may be opened, where this is not the only one."""
    gauge = MemoryGauge()
    ledger = MeasurementStore(cache_dir(env) / "measured.json")
    settings = config.scheduler
    planner = MemoryPlanner(
        settings.memory_limits(), available=machine, meter=gauge.read, measurements=ledger, nodes=sites
    )
    return Scheduler(settings.options(), limits=key_limits(config), memory_planner=planner)


def key_limits(config: Config) -> dict[str, KeyLimits]:
    """Of the keys that have any: the others cost a request nothing."""
    fields = KeyLimits.__struct_fields__
    limits = {key.name: KeyLimits(**{field: getattr(key, field) for field in fields}) for key in config.keys}
    return {name: its for name, its in limits.items() if its != KeyLimits()}


def _store(config: Config, scheduler: Scheduler | RemotePool) -> tuple[Store, bool]:
    """What is remembered between requests, and whether other gateways see it, too."""
    in_memory = config.store.backend == "memory"
    if in_memory and isinstance(scheduler, RemotePool):
        return RemoteStore(scheduler), True
    return open_store(config.store), not in_memory


def _front(
    config: Config,
    keys: tuple[Key, ...],
    scheduler: Scheduler | RemotePool,
    gateway: Gateway,
    peer: MetricsPeer | None,
    service: AdminService,
    store: Store,
    welcome: Callable[[], None],
) -> ASGIApp:
    settings = config.log
    disk_captures = (
        DiskCaptureSink(settings.debug_dir, settings.debug_max_requests, settings.debug_max_bytes)
        if settings.debug_dir is not None
        else None
    )

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        if peer is not None:
            await peer.open()
        await workbench.meet(built)
        welcome()
        for name, model in config.models.items():
            if model.enabled:
                scheduler.preload(name)
        _calm_collector()
        yield
        await _stop(gateway, scheduler)  # not everybody who runs this app says goodbye first
        await service.close()
        await gateway.close()
        await store.close()
        await workbench.close()
        await peers.close()
        if peer is not None:
            await peer.close()
        if disk_captures is not None:
            await asyncio.to_thread(disk_captures.close)

    scrape: Callable[[], Awaitable[bytes]] = gateway.metrics.scrape if peer is None else peer.scrape
    memory_captures = MemoryCaptureSink(settings.history_bytes, enabled=settings.history_texts)
    captures = memory_captures if disk_captures is None else CombinedCaptureSink(disk_captures, memory_captures)
    peers = PeerGateways(own_place())
    admin = AdminContext(scheduler, gateway, memory_captures, service, cache_dir() / "tune", time.time, peers)
    workbench = Workbench(meeting=meeting_place(), keeper=is_keeper(), own=own_place())
    context = front.HttpContext(gateway, config.http, keys, scrape, captures, admin, workbench)
    built = front.build_app(context, life)
    return built


def _calm_collector() -> None:
    """What is there at start stays for good, and requests leave no cycles behind: without this the collector walks
    everything again and again, and 1,000 streams wait up to 170 ms for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
