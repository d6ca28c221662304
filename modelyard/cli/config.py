"""Commands about the configuration: check, schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from modelyard import plugins
from modelyard.cli.console import ConfigOption, err, out, print_notes, print_problem, print_table
from modelyard.core.units import format_size

if TYPE_CHECKING:
    from modelyard.config.problems import ConfigProblem
    from modelyard.config.settings import LoadedConfig
    from modelyard.core.engine import AvailableMemory
    from modelyard.router.router import CacheEntry, Catalog, ModelEntry, Router
    from modelyard.server.memory_estimate import ModelMemory


def check(
    file: Annotated[
        Path | None, typer.Argument(help="The configuration, as with --config.", show_default=False)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Show a configuration as it is resolved, and everything in it that is wrong or cannot run on this machine.

    The exit status is 1 if there is an error: an invalid setting, or a missing engine, program, file or memory of a
    model that requests can reach.
    """
    from modelyard.config.library_models import read_library_models
    from modelyard.config.load import load_config
    from modelyard.config.problems import ConfigError

    if file is not None and config is not None:
        raise typer.BadParameter("name one configuration, either FILE or --config FILE")
    problems: list[ConfigProblem] = []
    loaded: LoadedConfig | None
    try:
        loaded = load_config(file or config, library=read_library_models)
    except ConfigError as error:
        loaded, problems = error.rest, list(error.problems)
    if loaded is not None:
        problems = _check(loaded, show=not problems)
    for problem in problems:
        print_problem(problem)
    errors = sum(problem.level in ("error", "unavailable") for problem in problems)
    if errors > 1:
        err.print(f"[red]{errors} errors[/red]")
    raise typer.Exit(1 if errors else 0)


def _check(loaded: LoadedConfig, *, show: bool) -> list[ConfigProblem]:
    """The problems of the files and of this machine. The rest of a configuration with errors is checked, not shown."""
    from modelyard.server.memory_estimate import available_memory, estimate_all
    from modelyard.server.model_check import check_models
    from modelyard.telemetry.system import read_memory

    if show:
        print_notes(loaded)
        out.print(f"[dim]from {', '.join(map(str, loaded.sources))}[/dim]")
        _print_tables(describe_config(loaded))
    else:
        loaded = replace(loaded, config=loaded.config.without_faults())
    available = available_memory()
    estimates = list(estimate_all(loaded.config, available))
    if show:
        _print_memory(estimates, available)
    return check_models(loaded, estimates, read_memory())


def schema() -> None:
    """Print the configuration's JSON Schema, for editors that complete from it."""
    from modelyard.config.settings import json_schema

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n")


def _print_tables(description: ConfigDescription) -> None:
    print_table(
        ("model", "engine", "aliases", "loaded", ""),
        [(m.name, m.backend, ", ".join(m.aliases), m.starts, m.description) for m in description.models],
    )
    print_table(
        ("cache", "model", "window", "parallel", "tokens", "overflow", "description"),
        [
            (c.name, c.model, _count(c.window), str(c.parallel), _count(c.tokens), c.overflow, c.description)
            for c in description.caches
        ],
    )
    print_table(
        ("name", "endpoint", "model", "cache", "window", "then"),
        [(r.match, r.endpoint, r.model, r.cache, _count(r.window), ", ".join(r.fallback)) for r in description.routes],
    )


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _print_memory(estimates: list[ModelMemory], available: AvailableMemory) -> None:
    """Estimated memory of each model; why there is no estimate is reported as a problem."""
    rows = []
    for estimated in estimates:
        if (m := estimated.memory) is not None and m.total:
            layers = f"{m.gpu_layers} of {m.layers}" if m.gpu_layers else ""
            rows.append((estimated.model, *map(format_size, (m.weights, m.kv, m.compute, m.total)), layers))
    if rows:
        print_table(("memory", "weights", "KV caches", "compute", "total", "layers on the GPU"), rows)
        gpus = "".join(f", {format_size(free)} on GPU {name}" for name, free in available.gpus.items())
        out.print(f"[dim]free now: {format_size(available.ram_free)} of RAM{gpus}[/dim]")


# --- the effective configuration as rows ------------------------------------------------------------------------------


class RouteRow(Struct, frozen=True):
    """`match` is the requested model name; `endpoint` is `*` if every path matches."""

    match: str
    endpoint: str
    model: str
    cache: str
    window: int | None
    allow_remote: bool = False
    fallback: tuple[str, ...] = ()  # tried if this one cannot answer


class CacheRow(Struct, frozen=True):
    """`tokens` is the capacity of the cache: window × parallel. Both are None if only the remote server knows them."""

    name: str
    model: str
    window: int | None
    parallel: int
    tokens: int | None
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


def describe_config(loaded: LoadedConfig) -> ConfigDescription:
    router = loaded.config.router()
    catalog = router.catalog
    return ConfigDescription(
        sources=[str(source) for source in loaded.sources],
        models=[_model_row(entry) for entry in catalog.models.values()],
        caches=[_cache_row(cache, catalog) for cache in catalog.caches.values()],
        routes=[*_configured_routes(loaded, catalog), *_routes_by_name(router), *_default_route(loaded, catalog)],
    )


def _model_row(entry: ModelEntry) -> ModelRow:
    starts = "at start" if entry.enabled else "on demand" if entry.autoload else "by hand"
    return ModelRow(entry.name, entry.backend, entry.aliases, starts, entry.description)


def _window(cache: CacheEntry, catalog: Catalog) -> int | None:
    """That of a remote model which sets none is known to its server only."""
    model = catalog.models[cache.model]
    is_known = model.has_window or not plugins.is_remote_engine(model.backend)
    return cache.info.window if is_known else None


def _cache_row(cache: CacheEntry, catalog: Catalog) -> CacheRow:
    info, window = cache.info, _window(cache, catalog)
    overflow = "strict" if cache.strict else "clamp"
    tokens = None if window is None else window * info.parallel
    return CacheRow(cache.name, cache.model, window, info.parallel, tokens, overflow, info.description)


def _configured_routes(loaded: LoadedConfig, catalog: Catalog) -> Iterator[RouteRow]:
    for route in loaded.config.routes:
        cache = catalog.caches[route.cache] if route.cache else catalog.find(route.model or "")
        if cache is not None:
            match, endpoint = " | ".join(route.match), route.endpoint or "*"
            window, others = _window(cache, catalog), tuple(route.fallback)
            yield RouteRow(match, endpoint, cache.model, cache.name, window, route.allow_remote, others)


def _default_route(loaded: LoadedConfig, catalog: Catalog) -> Iterator[RouteRow]:
    """Names that no model has."""
    if (cache := catalog.find(loaded.config.default_model or "")) is not None:
        yield RouteRow("any other", "*", cache.model, cache.name, _window(cache, catalog), False)


def _routes_by_name(router: Router) -> Iterator[RouteRow]:
    """Ids and aliases, except those that a route overrides."""
    for name in router.names():
        target, own = router.resolve(name, "/"), router.catalog.find(name)
        if own is not None and target.cache == own.name:
            yield RouteRow(name, "*", target.model, target.cache, _window(own, router.catalog), target.allow_remote)
