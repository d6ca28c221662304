"""The effective configuration as rows for `modelyard check`: resolved routes, caches with sizes, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from modelyard.config.problems import ConfigProblem
from modelyard.config.settings import LoadedConfig
from modelyard.router.catalog import CacheEntry, Catalog, ModelEntry
from modelyard.router.routes import Router


class RouteRow(Struct, frozen=True):
    """`match` is the requested model name; `endpoint` is `*` if every path matches."""

    match: str
    endpoint: str
    model: str
    cache: str
    window: int
    allow_remote: bool = False


class CacheRow(Struct, frozen=True):
    """`tokens` is the capacity of the cache: window × parallel."""

    name: str
    model: str
    window: int
    parallel: int
    tokens: int
    overflow: str
    description: str = ""


class ModelRow(Struct, frozen=True):
    name: str
    backend: str
    aliases: tuple[str, ...]
    starts: str  # "at start", "on demand" or "by hand"
    description: str = ""


class ConfigDescription(Struct, frozen=True):
    sources: list[str]
    models: list[ModelRow]
    caches: list[CacheRow]
    routes: list[RouteRow]
    problems: list[ConfigProblem]  # of the sources, and advice about the whole


def describe_config(loaded: LoadedConfig) -> ConfigDescription:
    router = loaded.config.router()
    catalog = router.catalog
    return ConfigDescription(
        sources=[str(source) for source in loaded.sources],
        models=[_model_row(entry) for entry in catalog.models.values()],
        caches=[_cache_row(cache) for cache in catalog.caches.values()],
        routes=[*_configured_routes(loaded, catalog), *_routes_by_name(router)],
        problems=[*loaded.problems, *_advice(catalog)],
    )


def _model_row(entry: ModelEntry) -> ModelRow:
    starts = "at start" if entry.enabled else "on demand" if entry.autoload else "by hand"
    return ModelRow(entry.name, entry.backend, entry.aliases, starts, entry.description)


def _cache_row(cache: CacheEntry) -> CacheRow:
    info = cache.info
    overflow = "strict" if cache.strict else "clamp"
    tokens = info.window * info.parallel
    return CacheRow(cache.name, cache.model, info.window, info.parallel, tokens, overflow, info.description)


def _configured_routes(loaded: LoadedConfig, catalog: Catalog) -> Iterator[RouteRow]:
    for route in loaded.config.routes:
        cache = catalog.caches[route.cache] if route.cache else catalog.find(route.model or "")
        if cache is not None:
            match, endpoint = " | ".join(route.match), route.endpoint or "*"
            yield RouteRow(match, endpoint, cache.model, cache.name, cache.info.window, route.allow_remote)


def _routes_by_name(router: Router) -> Iterator[RouteRow]:
    """Ids and aliases, except those that a route overrides."""
    for name in router.names():
        target, own = router.resolve(name, "/"), router.catalog.find(name)
        if own is not None and target.cache == own.name:
            yield RouteRow(name, "*", target.model, target.cache, target.window, target.allow_remote)


def _advice(catalog: Catalog) -> Iterator[ConfigProblem]:
    for model, count in Counter(cache.model for cache in catalog.caches.values()).items():
        if count > 1:
            names = ", ".join(catalog.models[model].caches)
            message = f"has {count} caches ({names}): their requests are isolated, so they are not batched together."
            yield ConfigProblem("", f"models.{model}", message, "warning")
