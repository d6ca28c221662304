"""The composition root: the only file that knows every part. It makes them, joins them and ends them; no globals."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp

from modelyard import plugins
from modelyard.config import Config, Problem, engine_spec
from modelyard.core.engine import Engine
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.definition import Definition, define
from modelyard.footprint import footprint, machine, sentence
from modelyard.gateway import Gateway
from modelyard.http import server as front
from modelyard.http.auth import Key, check_bind, read_keys
from modelyard.library import default, shelf
from modelyard.library.describe import explain, explain_entry
from modelyard.library.progress import Meter
from modelyard.processes.fleet import INDEX_VARIABLE, SOCKET_VARIABLE, run_fleet
from modelyard.processes.port import listen, reserve
from modelyard.prompt.media import Images
from modelyard.router.catalog import ModelEntry
from modelyard.scheduler.scheduler import Bounds, Scheduler
from modelyard.store import open_store
from modelyard.telemetry import log
from modelyard.telemetry.hub import MetricsHub
from modelyard.telemetry.journal import Journal
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.peers import MetricsPeer


class Yard(Struct):
    """One gateway process, put together and not yet running."""

    config: Config
    keys: tuple[Key, ...]
    scheduler: Scheduler
    gateway: Gateway
    app: ASGIApp

    async def stop(self) -> None:
        await _stop(self.gateway, self.scheduler)


async def _stop(gateway: Gateway, scheduler: Scheduler) -> None:
    """Every answer under way ends in an error that its client can read, and nothing new begins."""
    gateway.stop(Unavailable("the server is shutting down", code="shutting_down"))
    await scheduler.close()


def compose(config: Config, env: Mapping[str, str] = os.environ) -> Yard:
    keys = read_keys(config.keys, env)
    check_bind(config.http, keys)
    metrics, router = Metrics(), config.router()
    scheduler = Scheduler(_bounds(config))
    definitions = {name: define(entry, config.models[name]) for name, entry in router.catalog.models.items()}
    for name, entry in router.catalog.models.items():
        scheduler.add(name, entry.cache_infos, _maker(config, entry, definitions[name]))
    models = {name: definition.model for name, definition in definitions.items()}
    gateway = Gateway(router=router, models=models, leases=scheduler, images=Images(config.images), metrics=metrics)
    metrics.watch_queue(lambda: {name: status.waiting for name, status in scheduler.status().items()})
    peer = MetricsPeer(env[SOCKET_VARIABLE], metrics) if env.get(SOCKET_VARIABLE) else None
    return Yard(config, keys, scheduler, gateway, _front(config, keys, scheduler, gateway, peer))


def _bounds(config: Config) -> Bounds:
    settings = config.scheduler
    return Bounds(settings.max_waiting, settings.max_waiting_tokens, settings.timeout_ms / 1000)


def _maker(config: Config, entry: ModelEntry, definition: Definition) -> Callable[[], Engine]:
    """Makes the engine when it is loaded. A definition that is broken fails there, with its reason, and alone."""

    def make() -> Engine:
        if definition.model.fault is not None:
            raise definition.model.fault
        engine: Engine = plugins.load("engines", entry.backend).create(engine_spec(entry, config.models[entry.name]))
        return engine

    return make


def _front(
    config: Config, keys: tuple[Key, ...], scheduler: Scheduler, gateway: Gateway, peer: MetricsPeer | None
) -> ASGIApp:
    store = open_store(config.store)
    settings = config.log
    journal = (
        Journal(settings.debug_dir, settings.debug_max_requests, settings.debug_max_bytes)
        if settings.debug_dir is not None
        else None
    )

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        if peer is not None:
            await peer.open()
        for name, model in config.models.items():
            if model.enabled:
                scheduler.load(name)
        _calm_collector()
        yield
        await _stop(gateway, scheduler)  # not everybody who runs this app says goodbye first
        await gateway.close()
        await store.close()
        if peer is not None:
            await peer.close()
        if journal is not None:
            await asyncio.to_thread(journal.close)

    scrape: Callable[[], Awaitable[bytes]] = gateway.metrics.scrape if peer is None else peer.scrape
    edge = front.Edge(gateway, config.http, keys, store, scrape, journal)
    return front.build(edge, life)


def _calm_collector() -> None:
    """What is there at start stays for good, and requests leave no cycles behind: without this the collector walks
    everything again and again, and 1,000 streams wait up to 170 ms for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# --- running it -------------------------------------------------------------------------------------------------------


def serve(config: Config, path: Path | None, http: Mapping[str, Any], debug: bool) -> int:
    """Serve until told to stop; the exit code. With several workers this process only looks after them."""
    log.setup(config.log)
    check_bind(config.http, read_keys(config.keys))
    _prepare(config)
    if config.http.workers > 1 and INDEX_VARIABLE not in os.environ:
        return _serve_fleet(config, path, http, debug)
    with asyncio.Runner(loop_factory=front.loop_factory()) as runner:
        return runner.run(_serve_one(config))


def _prepare(config: Config) -> None:
    """All that may take long or be refused before anybody is told to come."""
    if config.http.workers > 1:
        _refuse_copies_of_weights(config)
    here = [model for model in config.models.values() if model.enabled]
    if here and all(model.backend == "llama_cpp" for model in here) and find_spec("llama_cpp") is None:
        raise plugins.MissingLibrary(
            "the llama.cpp engine is not built: run make install, which compiles it in a few minutes, "
            "or try --config configs/demo.toml, which needs no engine"
        )
    if any(default.is_default(model.path) for model in config.models.values()):
        default.fetch(Meter(say=logging.getLogger("modelyard.library").info))


async def _serve_one(config: Config) -> int:
    yard = compose(config)
    server = front.server(yard.app, config.http, yard.stop)
    # Alone, it shares its port with nobody: SO_REUSEPORT would let a second server take half of the requests.
    listening = listen(config.http.host, config.http.port, shared=INDEX_VARIABLE in os.environ)
    log.announce(
        config.http.host, listening.getsockname()[1], config.http.ssl_certfile is not None, list(config.models)
    )
    await server.serve(sockets=[listening])
    return 0 if server.started else 1


def _serve_fleet(config: Config, path: Path | None, http: Mapping[str, Any], debug: bool) -> int:
    held = reserve(config.http.host, config.http.port)
    port = held.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="modelyard-store-") as folder:
        argv = [sys.executable, "-m", "modelyard", "serve", *_arguments(path, http, port, debug)]
        if config.store.backend == "memory":  # a conversation may go on in another process than it began in
            os.environ |= {
                "MODELYARD_STORE__BACKEND": "sqlite",
                "MODELYARD_STORE__PATH": str(Path(folder) / "store.sqlite"),
            }
        return asyncio.run(run_fleet(argv, config.http.workers, MetricsHub()))


def _arguments(path: Path | None, http: Mapping[str, Any], port: int, debug: bool) -> list[str]:
    arguments = ["--port", str(port)]
    if path is not None:
        arguments += ["--config", str(path)]
    if http.get("host"):
        arguments += ["--host", str(http["host"])]
    return arguments + (["--debug"] if debug else [])


def _refuse_copies_of_weights(config: Config) -> None:
    for name, entry in config.router().catalog.models.items():
        if entry.backend in plugins.names("engines") and plugins.load("engines", entry.backend).HOLDS_WEIGHTS:
            raise InvalidRequest(
                f"--workers {config.http.workers} would load the weights of {name!r} {config.http.workers} times: its "
                f"engine {entry.backend} runs inside the gateway's process. Use --workers 1.",
                code="workers_refused",
            )


def broken_engines(config: Config) -> list[Problem]:
    """Every model whose engine's native library is not here or does not work on this machine."""
    return [problem for entry in config.router().catalog.models.values() for problem in _broken_engine(entry)]


def _broken_engine(entry: ModelEntry) -> Iterator[Problem]:
    if entry.backend not in plugins.names("engines"):
        return  # the configuration's own checks have said so
    try:
        plugins.verify(plugins.load("engines", entry.backend))
    except ModelyardError as error:
        yield Problem("", f"models.{entry.name}.backend", error.message, "unavailable")


def explain_model(config: Config, name: str) -> list[tuple[str, str]]:
    """What `modelyard models show` prints: of a model of the configuration, else of one in the library."""
    catalog = config.router().catalog
    entry = catalog.models.get(name) or catalog.models.get(catalog.aliases.get(name, ""))
    if entry is not None:
        settings = config.models[entry.name]
        rows = [("model", entry.name), ("engine", entry.backend), *explain(settings.path)]
        here = machine()
        rows.append(("memory", sentence(footprint(config, entry, here), here)))
        return [*rows, *define(entry, settings).notes]
    if (kept := shelf.find(name)) is not None:
        return explain_entry(kept)
    raise NotFound(f"no model {name!r}; there are {', '.join(catalog.names())}")
