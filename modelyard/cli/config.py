"""Commands about the configuration: check, schema."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator

import msgspec
import typer
from msgspec import Struct
from rich.markup import escape

from modelyard import plugins
from modelyard.cli.console import ConfigOption, load_or_exit, make_table, out, print_problem
from modelyard.config.problems import ConfigProblem
from modelyard.config.settings import Config, LoadedConfig, json_schema
from modelyard.core.errors import ModelyardError
from modelyard.router.router import CacheEntry, Catalog, ModelEntry, Router


def check(config: ConfigOption = None) -> None:
    """Show a configuration as it is resolved: models, caches, routes, memory, problems, and engines that fail."""
    loaded = load_or_exit(config)
    description = describe_config(loaded)
    out.print(f"[dim]from {', '.join(description.sources)}[/dim]")
    _print_tables(description)
    _print_memory(loaded)
    problems = [*description.problems, *engine_problems(loaded.config)]
    for problem in problems:
        print_problem(problem)
    raise typer.Exit(1 if any(p.level != "warning" for p in problems) else 0)


def schema() -> None:
    """Print the configuration's JSON Schema, for editors that complete from it."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n")


def engine_problems(config: Config) -> list[ConfigProblem]:
    """One problem per model whose engine's native library is missing or does not work on this machine."""
    entries = config.router().catalog.models.values()
    return [problem for entry in entries for problem in _engine_problem(entry, config.models[entry.name].python)]


def _engine_problem(entry: ModelEntry, python: str | None) -> Iterator[ConfigProblem]:
    """With another interpreter, that interpreter must be able to run the engine."""
    from modelyard.workers import interpreter

    if entry.backend not in plugins.names("engines"):
        return  # reported by the configuration's checks
    try:
        if python is None:
            plugins.verify(plugins.load("engines", entry.backend))
        elif interpreter.interpreter_exists(python):  # a missing one is reported by the configuration's checks
            asyncio.run(interpreter.check_interpreter(python))
    except ModelyardError as error:
        field = "backend" if python is None else "python"
        yield ConfigProblem("", f"models.{entry.name}.{field}", error.message, "unavailable")


def _print_tables(description: ConfigDescription) -> None:
    models = make_table("model", "engine", "aliases", "loaded", "")
    for m in description.models:
        models.add_row(m.name, m.backend, ", ".join(m.aliases), m.starts, m.description)
    out.print(models)
    caches = make_table("cache", "model", "window", "parallel", "total tokens", "overflow", "description")
    for c in description.caches:
        caches.add_row(c.name, c.model, str(c.window), str(c.parallel), str(c.tokens), c.overflow, c.description)
    out.print(caches)
    routes = make_table("name", "endpoint", "model", "cache", "window")
    for r in description.routes:
        routes.add_row(r.match, r.endpoint, r.model, r.cache, str(r.window))
    out.print(routes)


def _print_memory(loaded: LoadedConfig) -> None:
    """Estimated memory of each model; a model without an estimate is reported as a problem."""
    from modelyard.server.memory_estimate import available_memory, estimate_all, format_size

    available = available_memory()
    table = make_table("memory", "weights", "KV caches", "compute", "total")
    for estimated in estimate_all(loaded.config, available):
        if (m := estimated.memory) is not None and m.total:
            table.add_row(escape(estimated.model), *map(format_size, (m.weights, m.kv, m.compute, m.total)))
    if table.row_count:
        out.print(table)
        gpus = "".join(f", {format_size(free)} on GPU {name}" for name, free in available.gpus.items())
        out.print(f"[dim]free now: {format_size(available.ram_free)} of RAM{gpus}[/dim]")


# --- the effective configuration as rows ------------------------------------------------------------------------------


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
