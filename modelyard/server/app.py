"""The composition root: builds all parts of a gateway process, connects them and closes them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.file import AccountsFile
from modelyard.accounts.keys import Key, read_keys
from modelyard.accounts.owner import OwnerProof
from modelyard.accounts.settings import KeySettings
from modelyard.chat_store import ChatStore, default_path
from modelyard.config.load import ConfigSources
from modelyard.config.secrets import config_paths, config_secrets
from modelyard.config.settings import Config
from modelyard.core.engine import Engine, EngineSpec, Node
from modelyard.core.errors import Cancelled, Unavailable
from modelyard.core.pool import KeyLimits
from modelyard.core.store import ObjectStore, Store
from modelyard.engines.in_process import trim_memory
from modelyard.gateway.background_responses import BackgroundResponses
from modelyard.gateway.batches import Batches
from modelyard.gateway.conversations import Conversations
from modelyard.gateway.files import Files
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.records import OwnerProcess
from modelyard.gateway.replay_memory import ReplayMemory
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.http import server as front
from modelyard.http.admin.context import AdminContext
from modelyard.http.admin.peers import PeerGateways
from modelyard.http.auth import check_bind
from modelyard.library.attempts import MAX_DEATHS, Attempts
from modelyard.library.cache_dir import cache_dir
from modelyard.mcp.servers import McpServers
from modelyard.object_store import objects_path, open_object_store
from modelyard.processes.supervisor import FOLDER_VARIABLE, INDEX_VARIABLE
from modelyard.prompt.images import Images
from modelyard.scheduler.memory_planner import MeasurementStore, MemoryPlanner
from modelyard.scheduler.scheduler import Scheduler
from modelyard.server.admin_service import AdminService, ConfigLoader, define_models
from modelyard.server.can_run import require_runnable, unrunnable_models
from modelyard.server.config_editor import ConfigEditor
from modelyard.server.engine_factory import configure_pool, create_engine
from modelyard.server.memory_estimate import available_memory, estimate_engine
from modelyard.server.model_library import Downloads, ModelLibrary
from modelyard.server.running_servers import TEMPORARY_VARIABLE
from modelyard.store import open_store
from modelyard.telemetry.history import History
from modelyard.telemetry.log import log_event
from modelyard.telemetry.masking import add_paths, add_secrets
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import CombinedCaptureSink, DiskCaptureSink, MemoryCaptureSink
from modelyard.telemetry.shared_metrics import SharedMetrics
from modelyard.telemetry.system import SystemMonitor, total_ram
from modelyard.workbench.app import WorkbenchApp
from modelyard.workbench.peer_proxy import host_socket_path, is_host_process, process_socket_path
from modelyard.workers.remote_pool import RemotePool, RemoteStore

log = logging.getLogger("modelyard.server")

_LOOK_S = 0.5  # at models that load
_LARGE = 64 << 20  # bytes that requests have reserved and returned
_LIMITS_APART = (
    "each gateway process counts the rate limits of this key by itself until the server is restarted: until then its "
    "processes have no common scheduler"
)


class ServerApp(Struct):
    """One gateway process, built and not yet running."""

    config: Config
    accounts: Accounts
    scheduler: Scheduler | RemotePool
    gateway: Gateway
    admin: AdminService
    objects: ClientObjects
    app: ASGIApp
    owner: OwnerProof

    async def drain(self) -> None:
        """Batches are put back: another process goes on with them, or this one after its restart."""
        self.gateway.draining = True
        await self.objects.batches.close()

    def is_busy(self) -> bool:
        return self.gateway.metrics.active > 0 or bool(self.gateway.running.by_trace())

    async def stop(self) -> None:
        await _stop(self.gateway, self.scheduler, self.objects)


async def _stop(gateway: Gateway, scheduler: Scheduler | RemotePool, objects: ClientObjects) -> None:
    """End every running request with an error that its client can read; accept no new ones. Batches are put back first,
    and what background responses ended with is stored before the scheduler, which may have the store, is left."""
    await objects.batches.close()
    gateway.running.end(Unavailable("the server is shutting down", code="shutting_down"))
    await objects.background.close()
    await scheduler.close()


def compose(
    config: Config,
    env: Mapping[str, str] = os.environ,
    load_config: ConfigLoader | None = None,
    pool: RemotePool | None = None,
    on_ready: Callable[[], None] = lambda: None,
    owner: OwnerProof | None = None,
) -> ServerApp:
    """`pool` is a scheduler in another process; without it, this process has its own. `on_ready` is called when the
    server can be reached, before the first model is loaded. `owner`: the token that all its processes have."""
    owner = owner or OwnerProof()
    add_secrets(config_secrets(config, env))
    add_paths(config_paths(config))
    accounts = make_accounts(config, env)
    accounts.admission.limit = config.http.max_memory_bytes or total_ram() // 4
    check_bind(config.http, accounts.ring.keys)
    metrics, router = Metrics(), config.router()
    models = define_models(config)
    scheduler = pool or make_scheduler(config, env)
    faults = {name: model.fault for name, model in models.items()}
    configure_pool(scheduler, config, faults, unrunnable_models(config) if pool is None else ())
    store, shared = _store(config, scheduler)
    objects = _client_objects(config, scheduler)
    gateway = Gateway(
        router=router,
        models=models,
        leases=scheduler,
        images=Images(config.images),
        mcp=McpServers(config.mcp, env),
        metrics=metrics,
        history=History(config.log.history_requests),
        replay=ReplayMemory(store if shared else None),
        accounts=accounts,
        stored=StoredResponses(store, objects.conversations, objects.background),
        files=objects.files,
    )
    metrics.usage_series = lambda: accounts.ledger.series(accounts.currency)
    metrics.queue_depths = lambda: {name: status.waiting for name, status in scheduler.status().items()}
    index, folder = int(env.get(INDEX_VARIABLE, "0")), env.get(FOLDER_VARIABLE)
    if index == 0:  # of several gateways on one pool, one reports its metrics
        metrics.pool_values = scheduler.metrics
    shared_metrics = SharedMetrics(Path(folder), index, metrics) if folder else None
    service = AdminService(config, scheduler, gateway, load_config)
    accounts.on_change = lambda: scheduler.set_limits(key_limits(accounts.ring.keys))
    accounts.on_revoked = lambda key: gateway.running.end(Cancelled("the API key was revoked"), key)
    accounts.on_change()
    return ServerApp(
        config,
        accounts,
        scheduler,
        gateway,
        service,
        objects,
        _build_http(
            config,
            accounts,
            scheduler,
            gateway,
            shared_metrics,
            service,
            store,
            objects,
            on_ready,
            env,
            load_config,
            owner,
        ),
        owner,
    )


def make_scheduler(
    config: Config,
    env: Mapping[str, str],
    nodes: Callable[[], Sequence[Node]] = lambda: (Node(),),
    create: Callable[[EngineSpec, str], Engine] | None = None,
) -> Scheduler:
    """`nodes` are the machines on which engines may be opened; `create` makes the engine for one of them, by default
    here, where it is checked first."""
    monitor = SystemMonitor()
    measurements = MeasurementStore(cache_dir(env) / "measured.json")
    settings = config.scheduler
    planner = MemoryPlanner(
        settings.memory_limits(),
        available=available_memory,
        meter=monitor.used_memory,
        measurements=measurements,
        nodes=nodes,
        estimate=estimate_engine,
    )
    return Scheduler(
        settings.options(),
        create=create or create_engine,
        check=(lambda spec: require_runnable(spec, settings.memory_limits())) if create is None else None,
        limits=key_limits(config.keys),
        memory_planner=planner,
    )


def make_accounts(config: Config, env: Mapping[str, str] = os.environ) -> Accounts:
    """A server for one command keeps nothing: created keys are for the servers that others use."""
    file = None if env.get(TEMPORARY_VARIABLE) else AccountsFile.of(config.accounts)
    made = Accounts(read_keys(config.keys, env), file, currency=config.accounts.currency)
    made.ledger.prices = config.prices()
    return made


def key_limits(keys: Iterable[Key | KeySettings]) -> dict[str, KeyLimits]:
    """Only of keys that have limits."""
    fields = KeyLimits.__struct_fields__
    limits = {key.name: KeyLimits(**{field: getattr(key, field) for field in fields}) for key in keys}
    return {name: its for name, its in limits.items() if its != KeyLimits()}


def _store(config: Config, scheduler: Scheduler | RemotePool) -> tuple[Store, bool]:
    """The store for data between requests, and whether other gateways share it."""
    in_memory = config.store.backend == "memory"
    if in_memory and isinstance(scheduler, RemotePool):
        return RemoteStore(scheduler, "responses"), True
    return open_store(config.store), not in_memory


class ClientObjects(Struct, frozen=True):
    """What clients keep here: conversations, background responses, files and batches."""

    store: ObjectStore
    owner: OwnerProcess
    conversations: Conversations
    background: BackgroundResponses
    files: Files
    batches: Batches

    async def close(self) -> None:
        """The batches and the background responses are closed."""
        await self.owner.close()
        await self.store.close()


def _client_objects(config: Config, scheduler: Scheduler | RemotePool) -> ClientObjects:
    """In a file that the processes of this machine share; with a scheduler process, in that of its machine."""
    store: ObjectStore
    if isinstance(scheduler, RemotePool):
        store = RemoteStore(scheduler, "objects")
    else:
        store = open_object_store(config.store, objects_path())
    owner, ttl_s = OwnerProcess(store), config.store.object_ttl_s
    conversations = Conversations(store, ttl_s)
    files = Files(store, ttl_s, config.batches.max_file_bytes)
    return ClientObjects(
        store,
        owner,
        conversations,
        BackgroundResponses(store, ttl_s, conversations, owner),
        files,
        Batches(store, files, owner, config.batches, ttl_s, config.http.max_body_bytes),
    )


def _build_http(
    config: Config,
    accounts: Accounts,
    scheduler: Scheduler | RemotePool,
    gateway: Gateway,
    shared_metrics: SharedMetrics | None,
    service: AdminService,
    store: Store,
    objects: ClientObjects,
    on_ready: Callable[[], None],
    env: Mapping[str, str],
    load_config: ConfigLoader | None,
    owner: OwnerProof,
) -> ASGIApp:
    settings = config.log
    disk_captures = (
        DiskCaptureSink(settings.debug_dir, settings.debug_max_requests, settings.debug_max_bytes)
        if settings.debug_dir is not None
        else None
    )

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        if shared_metrics is not None:
            await shared_metrics.open()
        accounts.open()
        await workbench.listen(built)
        on_ready()
        preloading = asyncio.create_task(_preload(config, scheduler, set_aside))
        _tune_garbage_collector()
        await asyncio.sleep(0)  # the models are being loaded when the server says that it has started
        collecting = asyncio.create_task(collect_garbage(gateway))
        if not env.get(TEMPORARY_VARIABLE):
            objects.batches.open()
        yield
        for task in (collecting, preloading):
            task.cancel()
        await asyncio.gather(preloading, return_exceptions=True)
        await _stop(gateway, scheduler, objects)  # not every ASGI server calls `ServerApp.stop` first
        await service.close()
        await gateway.close()
        await accounts.close()
        await store.close()
        await objects.close()
        await chats.close()
        await downloads.close()
        await workbench.close()
        await peers.close()
        if shared_metrics is not None:
            await shared_metrics.close()
        if disk_captures is not None:
            await asyncio.to_thread(disk_captures.close)

    set_aside: set[str] = set()  # models
    scrape: Callable[[], Awaitable[bytes]] = (shared_metrics or gateway.metrics).scrape
    memory_captures = MemoryCaptureSink(settings.history_bytes, enabled=settings.history_texts)
    captures = memory_captures if disk_captures is None else CombinedCaptureSink(disk_captures, memory_captures)
    peers = PeerGateways(process_socket_path())
    chats = ChatStore(config.store.chats or default_path())
    library = ModelLibrary(service)
    downloads = Downloads(library)
    admin = AdminContext(
        scheduler,
        gateway,
        memory_captures,
        service,
        cache_dir() / "tune",
        time.time,
        chats,
        downloads,
        library.remove,
        accounts,
        _LIMITS_APART if isinstance(scheduler, Scheduler) and env.get(INDEX_VARIABLE) else "",
        peers,
        ConfigEditor(load_config, lambda: service.config, partial(service.reload, keep_unchanged=True))
        if isinstance(load_config, ConfigSources)
        else None,
        shares_scheduler=isinstance(scheduler, RemotePool),
        set_aside=objects.batches.set_aside,
    )
    workbench = WorkbenchApp(
        owner=owner, host_socket=host_socket_path(), is_host=is_host_process(), process_socket=process_socket_path()
    )
    context = front.HttpContext(
        gateway,
        config.http,
        accounts.ring,
        scrape,
        captures,
        admin,
        workbench if config.http.workbench else None,
        library,
        objects.files,
        objects.batches,
        owner,
        lambda: service.config.needed_models() - set_aside,  # a reload replaces the configuration
    )
    built = front.build_app(context, lifespan)
    return built


async def _preload(config: Config, scheduler: Scheduler | RemotePool, set_aside: set[str]) -> None:
    """Load the enabled models. One with which processes have died twice while it loaded is left to a request. Those
    with one death are loaded last and one at a time, so that the next death is counted for one only. `set_aside` gets
    the names of those that are left out: the server is ready without them."""
    enabled = {name: model.model_dump_json() for name, model in config.models.items() if model.enabled}
    if not isinstance(scheduler, Scheduler):
        for name in enabled:
            scheduler.preload(name)
        return
    attempts = Attempts()
    deaths = {name: attempts.deaths(f"model {name}", settings) for name, settings in enabled.items()}
    for name, number in deaths.items():
        if number >= MAX_DEATHS:
            set_aside.add(name)
            log_event(log, logging.ERROR, "a model was set aside: the server died twice while it loaded", model=name)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_watch(list(set_aside), enabled, scheduler, attempts))
        await _load([name for name in enabled if not deaths[name]], enabled, scheduler, attempts)
        for name in enabled:
            if 0 < deaths[name] < MAX_DEATHS:
                await _load([name], enabled, scheduler, attempts)


async def _load(names: list[str], settings: Mapping[str, str], scheduler: Scheduler, attempts: Attempts) -> None:
    for name in names:
        attempts.begin(f"model {name}", settings[name])
        scheduler.preload(name)
    await _watch(names, settings, scheduler, attempts)


async def _watch(names: list[str], settings: Mapping[str, str], scheduler: Scheduler, attempts: Attempts) -> None:
    """Until they are loaded, or could not be: then they have not killed this process. Each change is looked at, for a
    server that is killed a moment after a model was ready has not died with it."""
    left, changes = set(names), scheduler.subscribe()
    try:
        while True:
            status = scheduler.status()
            for name in [name for name in left if name not in status or status[name].state in ("ready", "failed")]:
                attempts.end(f"model {name}", settings[name])
                left.remove(name)
            with suppress(TimeoutError):  # a model that a reload removes has no change
                async with asyncio.timeout(_LOOK_S):
                    if not left or await anext(changes, None) is None:
                        return
    finally:
        for name in left:
            attempts.stop(f"model {name}", settings[name])


def _tune_garbage_collector() -> None:
    """Objects of the start-up live for ever, and most of a request is freed without the collector. Without this it
    traverses all of them again and again, and 1,000 streams wait up to 170 ms for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def collect_garbage(gateway: Gateway, every_s: float = 60.0, look_s: float = 2.0) -> None:
    """Broken connections, errors and templates with macros leave cycles. What outlives one pass of the collector waits
    for hours until the next one looks at it, so here it does not: with streams running, all objects are traversed every
    tenth time only. Large requests that have left are looked for at once, and their memory is returned to the system:
    100 prompts of 1 MB left 500 MB behind."""
    admission, waited, number = gateway.accounts.admission, 0.0, 0
    while True:
        await asyncio.sleep(min(look_s, every_s))
        waited += min(look_s, every_s)
        if admission.freed >= (_LARGE if admission.total else _LARGE // 16):
            admission.freed = 0
            gc.collect()
            await asyncio.to_thread(trim_memory)
        elif waited >= every_s:
            waited, number = 0.0, number + 1
            gc.collect(1 if number % 10 and gateway.running.by_trace() else 2)
