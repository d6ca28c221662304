"""What is measured, made ready: a configured model's engine in this process, a server made from it, or a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from modelyard.benchmark.bench.served import served
from modelyard.benchmark.chat_load import ChatLoad
from modelyard.benchmark.engine_load import EngineLoad
from modelyard.benchmark.lanes import Load
from modelyard.benchmark.url_load import UrlLoad
from modelyard.benchmark.workload import Workload
from modelyard.config.settings import Config
from modelyard.core.engine import ChatEngine, TextEngine
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.gateway.model import Model
from modelyard.library import default_model
from modelyard.router.catalog import CacheEntry
from modelyard.router.routes import Router
from modelyard.server.engine_factory import blueprint
from modelyard.server.model_definition import define

Say = Callable[[str], None]
Opening = Callable[[Say], AbstractAsyncContextManager[Load]]


class Candidate(Struct, frozen=True, kw_only=True):
    """`open` makes it ready for as long as it is entered. `places`: how many streams fit at once; None: they queue."""

    name: str
    model: str
    open: Opening
    places: int | None = None


class Access(Struct, frozen=True, kw_only=True):
    """How servers are asked: their key, fields for every request, and how long one answer may take."""

    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 600.0


def at_url(url: str, model: str | None, access: Access) -> Candidate:
    def opened(_: Say) -> AbstractAsyncContextManager[Load]:
        return UrlLoad(url, model, key=access.key, extra=access.extra, limit_s=access.limit_s)

    return Candidate(name=url, model=model or "", open=opened)


def in_process(config: Config, name: str, place: CacheEntry, workload: Workload, limit_s: float) -> Candidate:
    """The engine itself, as the pool would make it, with nothing around it."""
    _fits(place, workload)

    @asynccontextmanager
    async def opened(say: Say) -> AsyncIterator[Load]:
        entry = config.router().catalog.models[place.model]
        _fetched(config, place.model, say)
        model = define(entry, config.models[place.model]).model
        engine = blueprint(config, entry, model.fault).make()
        try:
            await engine.open(lambda done, what: say(f"{what} {done:.0%}"))
            yield _load(engine, model, name, place.name, limit_s)
        finally:
            await engine.close()

    return Candidate(name=name, model=place.model, open=opened, places=place.info.parallel)


def over_http(config: Config, path: Path | None, name: str, place: CacheEntry, access: Access) -> Candidate:
    """A server of its own, in a process of its own."""
    asked = address(config, place)

    @asynccontextmanager
    async def opened(say: Say) -> AsyncIterator[Load]:
        _fetched(config, place.model, say)
        async with (
            served(path, asked, access.key, say) as url,
            UrlLoad(url, asked, key=access.key, extra=access.extra, limit_s=access.limit_s, name=name) as load,
        ):
            yield load

    return Candidate(name=name, model=place.model, open=opened)


def find(config: Config, model: str | None, cache: str | None) -> CacheEntry:
    """The cache that is measured: the one that is named, else the model's default; without a model the first's."""
    catalog = config.router().catalog
    if not catalog.models:
        raise NotFound("the configuration has no models")
    found = catalog.find(model or next(iter(catalog.models)))
    if found is None:
        raise NotFound(f"no model {model!r}; there are {', '.join(catalog.names())}")
    caches = catalog.models[found.model].caches
    if cache is not None and cache not in caches:
        raise NotFound(f"the model {found.model} has no cache {cache!r}; it has {', '.join(caches)}")
    return found if cache is None else caches[cache]


def address(config: Config, place: CacheEntry) -> str:
    """A name by which requests reach this cache. Routes come before names, and one for `*` leaves no other in force."""
    router = config.router()
    entry = router.catalog.models[place.model]
    routed = (pattern.replace("*", "") for route in config.routes for pattern in route.match)
    for name in (entry.name, *entry.aliases, place.name, *filter(None, routed)):
        if _leads_to(router, name) == (place.model, place.name):
            return name
    raise InvalidRequest(
        f"the routes lead no name to the cache {place.name} of {place.model}: measure it in process, without --http"
    )


def _leads_to(router: Router, name: str) -> tuple[str, str] | None:
    try:
        target = router.resolve(name, "/v1/chat/completions")
    except NotFound:
        return None
    return target.model, target.cache


def _fits(place: CacheEntry, workload: Workload) -> None:
    if workload.longest > place.info.window:
        raise InvalidRequest(
            f"a conversation of this workload takes {workload.longest} tokens and the cache {place.name} has "
            f"{place.info.window}: set --prompt-tokens, --output-tokens or --turns lower, or its n_ctx higher"
        )


def _fetched(config: Config, model: str, say: Say) -> None:
    if default_model.is_default(config.models[model].path) and not default_model.is_fetched():
        say("fetching the default model")
        default_model.fetch()


def _load(engine: TextEngine | ChatEngine, model: Model, name: str, cache: str, limit_s: float) -> Load:
    if isinstance(engine, TextEngine):
        return EngineLoad(engine, model.parts.vocab, name=name, cache=cache, limit_s=limit_s)
    return ChatLoad(engine, model.name, name=name, limit_s=limit_s)
