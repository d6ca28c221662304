"""`modelyard serve`: one server process, or a supervisor of several."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Receive, Scope, Send

from modelyard import plugins
from modelyard.accounts.owner import OwnerProof
from modelyard.config.library_models import machine_budget, missing_hub_model, read_library_models
from modelyard.config.load import ConfigSources
from modelyard.config.settings import Config
from modelyard.config.sources import config_files
from modelyard.core.errors import ModelyardError
from modelyard.http import server as front
from modelyard.http.auth import check_bind
from modelyard.http.settings import HttpSettings
from modelyard.library import default_model, models
from modelyard.library.progress import ProgressReporter
from modelyard.processes.ports import PortUnusable, listen, reserve_port
from modelyard.processes.supervisor import INDEX_VARIABLE, RestartPolicy, private_folder, run_supervised
from modelyard.server import split_pool
from modelyard.server.admin_service import ConfigLoader
from modelyard.server.app import ServerApp, compose, key_limits, make_accounts, make_scheduler
from modelyard.server.config_watcher import on_hangup, watch, watch_library
from modelyard.server.engine_factory import prepare_engines
from modelyard.server.running_servers import (
    NOTE_VARIABLE,
    announced,
    announced_token,
    find_server,
    keep_alive_s,
    server_url,
)
from modelyard.server.scheduler_models import with_scheduler_models
from modelyard.server.split_pool import SplitPool
from modelyard.telemetry import log
from modelyard.telemetry.masking import add_secrets
from modelyard.telemetry.shared_metrics import last_written
from modelyard.workbench.peer_proxy import is_host_process
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.transport import scheduler_address
from modelyard.workers.worker_process import PARENT_VARIABLE

_UNUSED_POLL_S = 5.0
_SCHEDULER_WAIT_S = 10.0  # then the gateway starts without the scheduler and reports itself unhealthy


def serve(config: Config, path: Path | None, http: Mapping[str, Any], debug: bool, scheduler: str | None = None) -> int:
    """Serve until stopped; return the exit code. With several workers this process supervises them.

    `scheduler` is the address of a scheduler in another process, or "auto": then no engine runs in this one.
    """
    log.setup(config.log)
    check_bind(config.http, make_accounts(config).ring.keys)
    _check_port(config.http)
    scheduler = scheduler or config.scheduler.endpoint or None
    scheduler = None if scheduler is None else scheduler_address(scheduler)
    if scheduler is None:  # else engines and weights are where the scheduler's workers are
        prepare(config)
    split = config.http.workers > 1 or (config.workers.cluster and scheduler is None)
    if split and INDEX_VARIABLE not in os.environ:
        return _serve_supervised(config, path, http, debug, scheduler)
    with asyncio.Runner(loop_factory=front.loop_factory()) as runner:
        overrides = _overrides(http, debug) | {"scheduler": {"endpoint": scheduler}}
        reload = ConfigSources(path, overrides=overrides, library=read_library_models)
        return runner.run(_serve_one(config, reload, path, scheduler))


def _check_port(http: HttpSettings) -> None:
    """A second server says at once that the first one is there. Another program is noticed when this one listens."""
    other = find_server(server_url(http.host, http.port, http.ssl_certfile is not None))
    if other is not None and INDEX_VARIABLE not in os.environ:
        raise PortUnusable(
            f"Modelyard runs already at {other.url} (process {other.pid}): use that server, stop it with modelyard "
            "stop --server, or choose another port with --port"
        )


def create_app() -> ASGIApp:
    """The server as an app, for `uvicorn modelyard.app:create_app --factory`: one process, with the files that
    `modelyard serve` finds; with `scheduler.endpoint` it is a gateway of that scheduler. Address, TLS and the limits of
    connections are uvicorn's. It does not know its address, so no file has its token: only a key can have the role
    owner."""
    reload = ConfigSources(library=read_library_models)
    config = reload().config
    log.setup(config.log)
    check_bind(config.http, make_accounts(config).ring.keys)
    if config.scheduler.endpoint:
        return _gateway_app(config, reload, scheduler_address(config.scheduler.endpoint))
    prepare(config)
    return compose(config, load_config=reload).app


def _gateway_app(config: Config, reload: ConfigSources, scheduler: str) -> ASGIApp:
    """It joins its scheduler when it starts: a factory is called before, perhaps without an event loop."""
    app: ASGIApp | None = None

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal app
        if app is None:
            try:
                joined, pool = await _join(config, scheduler)
            except ModelyardError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": error.message})
                return
            built = compose(joined, load_config=reload, pool=pool)
            if pool is not None:
                follow(pool, built)
            app = built.app
        await app(scope, receive, send)

    return gateway


def _overrides(http: Mapping[str, Any], debug: bool) -> dict[str, Any]:
    """Options of the command line; they override the files, also after a reload."""
    return {"http": dict(http), "log": {"debug_dir": "debug"} if debug else {}}


def prepare(config: Config, progress: ProgressReporter | None = None) -> None:
    """Everything that may take long or fail, before the server announces itself."""
    progress = progress or ProgressReporter(write_line=logging.getLogger("modelyard.library").info)
    prepare_engines(config, progress)
    if any(default_model.is_default(model.path) for model in config.models.values()):
        default_model.fetch(progress)
    for model in config.models.values():
        if model.enabled and (source := missing_hub_model(model)) is not None:
            _pull(source, progress)


def _pull(source: str, progress: ProgressReporter) -> None:
    """A model that cannot be fetched is not loaded; others are."""
    try:
        models.pull(source, progress=progress, budget=machine_budget())
    except ModelyardError as error:
        logging.getLogger("modelyard.library").error("%s", error.message)


async def _serve_one(config: Config, load: ConfigLoader, path: Path | None, scheduler: str | None = None) -> int:
    config, pool = await _join(config, scheduler)
    owner = OwnerProof(announced_token())
    add_secrets([owner.token])
    built = compose(
        config, load_config=load, pool=pool, on_ready=lambda: _announce(config, listener, owner), owner=owner
    )
    if pool is not None:
        follow(pool, built)
    server = front.make_server(built.app, config.http, built)
    # A single process does not share its port: with SO_REUSEPORT a second server would take half of the requests.
    is_alone = INDEX_VARIABLE not in os.environ
    listener = listen(config.http.host, config.http.port, shared=not is_alone)
    note = announced(config.http, listener.getsockname()[1], owner.token) if is_alone else nullcontext()
    with note, on_hangup(built.admin.reload):
        watching = [asyncio.create_task(watch(watched_files(path), built.admin.reload))] if config.watch else []
        if config.library and pool is None:  # a scheduler in another process tells us
            reload = built.admin.reload_library if is_alone else partial(built.admin.reload_library, has_peers=True)
            watching.append(asyncio.create_task(watch_library(reload)))
        if (limit_s := keep_alive_s()) is not None and limit_s > 0:
            watching.append(asyncio.create_task(_end_when_unused(server, built, limit_s)))
        await server.serve(sockets=[listener, *second_listener(config, shared=not is_alone)])
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return 0 if server.started else 1


async def _end_when_unused(server: front.Server, built: ServerApp, limit_s: float) -> None:
    """A server that a command has started for itself ends when nobody has used it for a while. An open page of the
    workbench uses it."""
    requests, used = -1, 0.0
    while not server.should_exit:
        state, now = server.server_state, time.monotonic()
        if built.is_busy() or state.connections or state.total_requests != requests:
            requests, used = state.total_requests, now
        elif now - used > limit_s:
            logging.getLogger("modelyard").info("nobody has used this server for %g s: it ends", limit_s)
            server.should_exit = True
        await asyncio.sleep(min(limit_s / 4, _UNUSED_POLL_S))


async def _join(config: Config, scheduler: str | None) -> tuple[Config, RemotePool | None]:
    """The scheduler in another process, and the configuration with the models that only it defines."""
    if scheduler is None:
        return config, None
    pool = gateway_pool(config, scheduler)
    await pool.wait_ready(_SCHEDULER_WAIT_S)
    return await with_scheduler_models(config, pool), pool


def follow(pool: RemotePool, built: ServerApp) -> None:
    """Take over what changes in the scheduler from here on."""
    pool.on_config_change, pool.on_new_engine = built.admin.follow, built.admin.fetch_tokenizer
    built.admin.fetch_tokenizers()


def second_listener(config: Config, *, shared: bool) -> list[socket.socket]:
    """On the port of Ollama's clients, if it is set."""
    http = config.http
    if http.ollama_port in (None, http.port):
        return []
    bound = listen(http.host, http.ollama_port or 0, shared=shared)
    logging.getLogger("modelyard").info("also listening on port %d for clients of Ollama", http.ollama_port)
    return [bound]


def gateway_pool(config: Config, endpoint: str) -> RemotePool:
    """Call it on the gateway's event loop."""
    workers = config.workers
    name = f"gateway-{os.getpid()}-{uuid4().hex[:8]}"
    timeout_s = config.scheduler.timeout_ms / 1000
    make = partial(SplitPool, make_scheduler(config, os.environ)) if split_pool.VARIABLE in os.environ else RemotePool
    return make(endpoint, name, keys=workers.cluster_keys(), heartbeat=workers.heartbeat(), timeout_s=timeout_s)


def _announce(config: Config, listener: socket.socket, owner: OwnerProof) -> None:
    """Called when signal handlers and peer sockets are ready: people and programs wait for this line."""
    http = config.http
    code = owner.new_code(time.time()) if http.workbench and is_host_process() else ""
    log.announce(
        http.host, listener.getsockname()[1], http.ssl_certfile is not None, list(config.models), http.workbench, code
    )


def watched_files(path: Path | None) -> tuple[Path, ...]:
    """Every file that is looked for: one that is missing now may be written later."""
    return tuple(file.path for file in config_files(path, os.environ, Path.cwd()))


def _serve_supervised(
    config: Config, path: Path | None, http: Mapping[str, Any], debug: bool, scheduler: str | None
) -> int:
    held = [reserve_port(config.http.host, config.http.port)]
    port = held[0].getsockname()[1]
    if config.http.ollama_port is not None:
        held.append(reserve_port(config.http.host, config.http.ollama_port))
    with private_folder() as folder:
        argv = [sys.executable, "-m", "modelyard", "serve", *_arguments(path, http, port, debug)]
        beside: list[list[str]] = []
        if scheduler is None and needs_scheduler(config):
            scheduler = f"ipc://{folder / 'scheduler'}"
            beside.append([sys.executable, "-m", "modelyard", "scheduler", "--listen", scheduler, *_file(path)])
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            if not (key_limits(make_accounts(config).ring.keys) or config.workers.cluster):
                os.environ[split_pool.VARIABLE] = "1"
        if scheduler is not None:
            argv += ["--scheduler", scheduler]
        elif config.store.backend == "memory":  # a conversation may continue in another process
            os.environ |= {
                "MODELYARD_STORE__BACKEND": "sqlite",
                "MODELYARD_STORE__PATH": str(folder / "store.sqlite"),
            }
        policy = RestartPolicy(grace=config.http.drain_s + RestartPolicy().grace)
        heartbeat = partial(last_written, folder)
        with announced(config.http, port, OwnerProof().token) as note:
            os.environ[NOTE_VARIABLE] = str(note)
            return asyncio.run(run_supervised(argv, config.http.workers, folder, policy, beside, heartbeat))


def _file(path: Path | None) -> list[str]:
    return [] if path is None else ["--config", str(path)]


def _arguments(path: Path | None, http: Mapping[str, Any], port: int, debug: bool) -> list[str]:
    arguments = ["--port", str(port), *_file(path)]
    if http.get("host"):
        arguments += ["--host", str(http["host"])]
    return arguments + (["--debug"] if debug else [])


def needs_scheduler(config: Config) -> bool:
    """Whether several gateways need one scheduler: if each would load the weights, or if keys have limits. Otherwise
    each gateway has its own engines, and tokens take no detour."""
    backends = {entry.backend for entry in config.router().catalog.models.values()} & set(plugins.names("engines"))
    return bool(key_limits(make_accounts(config).ring.keys) or config.workers.cluster) or any(
        plugins.engine(backend).holds_weights for backend in backends
    )
