"""Commands about the configuration: check, schema."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import msgspec
import typer
from rich.markup import escape

from modelyard import plugins
from modelyard.cli.console import ConfigOption, load_or_exit, make_table, out, print_problem
from modelyard.config.describe import ConfigDescription, describe_config
from modelyard.config.problems import ConfigProblem
from modelyard.config.schema import json_schema
from modelyard.config.settings import Config, LoadedConfig
from modelyard.core.errors import ModelyardError
from modelyard.router.catalog import ModelEntry


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
