"""Commands about the configuration: check, schema, and config: its files, what is in effect and why, editing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.markup import escape

from modelyard import plugins
from modelyard.cli.console import (
    CommandGroup,
    ConfigOption,
    JsonOption,
    err,
    load_or_exit,
    out,
    print_json,
    print_notes,
    print_problem,
    print_table,
    run_or_exit,
)
from modelyard.core.errors import NotFound, Unavailable
from modelyard.core.units import format_size

if TYPE_CHECKING:
    from modelyard.config.effective import EffectiveSetting
    from modelyard.config.problems import ConfigPath, ConfigProblem
    from modelyard.config.settings import LoadedConfig
    from modelyard.core.engine import AvailableMemory
    from modelyard.router.router import CacheEntry, Catalog, ModelEntry, Router
    from modelyard.server.memory_estimate import ModelMemory


def check(
    file: Annotated[
        Path | None, typer.Argument(help="The configuration, as with --config.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
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
    resolved: dict[str, Any] = {}
    loaded: LoadedConfig | None
    try:
        loaded = load_config(file or config, library=read_library_models)
    except ConfigError as error:
        loaded, problems = error.rest, list(error.problems)
    if loaded is not None:
        resolved, problems = _check(loaded, is_valid=not problems, show=not as_json)
    if as_json:
        print_json({**resolved, "problems": problems})
    else:
        for problem in problems:
            print_problem(problem)
    errors = sum(problem.level in ("error", "unavailable") for problem in problems)
    if errors > 1 and not as_json:
        err.print(f"[red]{errors} errors[/red]")
    raise typer.Exit(1 if errors else 0)


def _check(loaded: LoadedConfig, *, is_valid: bool, show: bool) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """What is resolved, and the problems of the files and of this machine. The rest of a configuration with errors is
    checked, not shown."""
    from modelyard.server.memory_estimate import available_memory, estimate_all
    from modelyard.server.model_check import check_models
    from modelyard.telemetry.system import read_memory

    if not is_valid:
        loaded = replace(loaded, config=loaded.config.without_faults())
    router, available = loaded.config.router(), available_memory()
    if is_valid and show:
        print_notes(loaded)
        out.print(f"[dim]from {', '.join(map(str, loaded.sources))}[/dim]")
        print_table(("model", "engine", "aliases", "loaded", ""), model_rows(router.catalog))
        columns = ("cache", "model", "window", "parallel", "tokens", "overflow", "description")
        print_table(columns, cache_rows(router.catalog))
        print_table(("name", "endpoint", "model", "cache", "window", "then"), route_rows(router))
    estimates = list(estimate_all(loaded.config, available))
    if is_valid and show:
        _print_memory(estimates, available)
    problems = check_models(loaded, estimates, read_memory())
    return (_resolved(loaded, router, estimates) if is_valid else {}), problems


def _resolved(loaded: LoadedConfig, router: Router, estimates: list[ModelMemory]) -> dict[str, Any]:
    """The tables of `check` as values, for programs."""
    catalog = router.catalog
    models = [
        {"id": m.name, "engine": m.backend, "aliases": m.settings.aliases, "loaded": loaded_when(m)}
        for m in catalog.models.values()
    ]
    caches = [
        {"id": c.name, "model": c.model, "window": known_window(c, catalog), "parallel": c.info.parallel}
        for c in catalog.caches.values()
    ]
    routes = [
        {"match": r.route.match, "endpoint": r.route.endpoint, "model": r.route.target.model}
        | {"cache": r.route.target.cache, "fallbacks": [each.cache for each in r.route.target.fallbacks]}
        for r in router.rules()
    ]
    memory = [
        {"model": e.model, "weights_bytes": m.weights, "kv_bytes": m.kv, "compute_bytes": m.compute}
        for e in estimates
        if (m := e.memory) is not None
    ]
    sources = [str(source) for source in loaded.sources]
    return {"sources": sources, "models": models, "caches": caches, "routes": routes, "memory": memory}


def schema() -> None:
    """Print the configuration's JSON Schema, for editors that complete from it."""
    from modelyard.config.settings import json_schema

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n")


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


def model_rows(catalog: Catalog) -> Sequence[tuple[str, ...]]:
    """Model, engine, aliases, when it is loaded, description."""
    return [
        (m.name, m.backend, ", ".join(m.settings.aliases), loaded_when(m), m.settings.description)
        for m in catalog.models.values()
    ]


def loaded_when(model: ModelEntry) -> str:
    return "at start" if model.enabled else "on demand" if model.settings.autoload else "by hand"


def cache_rows(catalog: Catalog) -> Sequence[tuple[str, ...]]:
    """Cache, model, window, parallel, tokens (window × parallel), overflow, description."""
    rows = []
    for cache in catalog.caches.values():
        info, window = cache.info, known_window(cache, catalog)
        tokens = _count(None if window is None else window * info.parallel)
        overflow = "strict" if cache.strict else "clamp"
        rows.append((cache.name, cache.model, _count(window), str(info.parallel), tokens, overflow, info.description))
    return rows


def known_window(cache: CacheEntry, catalog: Catalog) -> int | None:
    """That of a remote model which sets none is known to its server only."""
    model = catalog.models[cache.model]
    is_known = model.has_window or not plugins.is_remote_engine(model.backend)
    return cache.info.window if is_known else None


def route_rows(router: Router) -> Sequence[tuple[str, ...]]:
    """Name, endpoint, model, cache, window, and what is tried if that cannot answer."""
    rows = []
    for rule in router.rules():
        route, target = rule.route, rule.route.target
        name = "any other" if rule.kind == "default" else " | ".join(route.match) + " (override)" * route.override
        window = _count(known_window(router.catalog.caches[target.cache], router.catalog))
        then = ", ".join(each.cache for each in target.fallbacks)
        rows.append((name, route.endpoint or "*", target.model, target.cache, window, then))
    return rows


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


# --- modelyard config -------------------------------------------------------------------------------------------------

config_app = CommandGroup(
    help="Where settings come from: the files that are read, the values in effect, and the user's own file.",
)

_ROLES = {
    "--config": "named by --config; no other file is read",
    "user": "yours, for every folder",
    "settings": "of this folder, pool style",
    "local": "of this machine, over the one above",
    "project": "of this folder",
}
TEMPLATE = """\
# Modelyard: settings of this user, for every folder.
#
# A project's modelyard.toml (or config/settings.json) overrides them, then come MODELYARD_* variables and the options
# of the command line. Tables are merged key by key; lists are replaced.
#
#   modelyard config show    the settings in effect, and where each comes from
#   modelyard check          models, caches, routes, memory and problems
#   docs/config.md           every setting

# [http]
# port = 8000                 # the address of the server is also where run, chat and ps look for it

# [decoding]
# temperature = 0.7           # for requests that set none

# [models.qwen]
# path = "/models/qwen.gguf"  # a file, a folder, or a name in the library
# n_ctx = 16384
"""


@config_app.command("path")
def path(config: ConfigOption = None) -> None:
    """List the files that are looked for, in the order in which later ones override earlier ones."""
    from modelyard.config.sources import config_files

    for file in config_files(config, os.environ, Path.cwd()):
        state = "missing" if file.state == "read" and not file.path.is_file() else file.state
        about = f"{escape(str(file.path))}  [dim]{escape(file.reason or _ROLES[file.role])}[/dim]"
        out.print(f"[{_COLOURS[state]}]{state:<8}[/] {about}", highlight=False, soft_wrap=True)
    out.print("[dim]then     MODELYARD_* variables, then options of the command line[/dim]")


_COLOURS = {"read": "green", "missing": "red", "absent": "dim", "ignored": "yellow", "unused": "yellow"}


@config_app.command("show")
def show(
    config: ConfigOption = None,
    defaults: Annotated[bool, typer.Option("--all", help="Also the settings that no source sets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per setting.")] = False,
) -> None:
    """Print the configuration in effect as TOML; a comment says where each value comes from. Secrets are masked."""
    from modelyard.config.effective import effective_settings
    from modelyard.config.problems import format_path

    loaded = load_or_exit(config)
    settings = list(effective_settings(loaded, defaults=defaults))
    if as_json:
        rows = ({"path": format_path(s.path), "value": s.value, "source": s.source} for s in settings)
        lines: Iterable[str] = (msgspec.json.encode(row).decode() for row in rows)
    else:
        lines = settings_as_toml(settings)
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for problem in loaded.problems:
        print_problem(problem)


def settings_as_toml(settings: Iterable[EffectiveSetting]) -> Iterator[str]:
    """One table per section, values before tables, the sources in a column."""
    top = sorted(settings, key=lambda setting: len(setting.path) > 1)
    for section, group in groupby(top, key=lambda setting: setting.path[:-1]):
        found = [(f"{_key(s.path[-1:])} = {_toml(s.value)}", s.source) for s in group]
        if section:
            yield f"[{_key(section)}]"
        width = max((len(text) for text, _ in found if len(text) <= 60), default=0)
        yield from (f"{text:<{width}}  # {source}" for text, source in found)
        yield ""


def _key(path: ConfigPath) -> str:
    parts = (str(part) for part in path)
    return ".".join(
        p if p.replace("-", "").replace("_", "").isalnum() and p.isascii() else json.dumps(p) for p in parts
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key((k,))} = {_toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


@config_app.command("edit")
def edit() -> None:
    """Open your own file in $VISUAL or $EDITOR, and check it afterwards. It is created if there is none."""
    from modelyard.config.load import load_config
    from modelyard.config.problems import ConfigError

    file = run_or_exit(_edited, os.environ)
    try:
        loaded = load_config(file)
    except ConfigError as error:
        for problem in error.problems:
            print_problem(problem)
        err.print(f"[red]{escape(str(file))} cannot be used as it is:[/red] run modelyard config edit again")
        raise typer.Exit(1) from None
    for problem in loaded.problems:
        print_problem(problem)
    out.print(f"{escape(str(file))} is valid. A running server reloads it with [bold]watch = true[/bold] or on SIGHUP.")


def _edited(env: Mapping[str, str]) -> Path:
    from modelyard.config.sources import user_file

    file = user_file(env)
    if file is None:
        raise NotFound("there is no home folder: set HOME or XDG_CONFIG_HOME")
    command = [*shlex.split(find_editor(env)), str(file)]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.touch(mode=0o600)  # it may get API keys
            file.write_text(TEMPLATE, encoding="utf-8")
        code = subprocess.call(command)  # noqa: S603  the user's own editor
    except OSError as error:
        raise Unavailable(f"cannot edit {file} with {command[0]}: {error.strerror}") from None
    if code != 0:
        raise Unavailable(f"{command[0]} ended with exit code {code}; {file} was not checked")
    return file


def find_editor(env: Mapping[str, str]) -> str:
    named = env.get("VISUAL") or env.get("EDITOR")
    usual = ("notepad",) if sys.platform == "win32" else ("nano", "vim", "vi")
    found = named or next((name for name in usual if shutil.which(name, path=env.get("PATH"))), None)
    if found is None:
        raise NotFound("no editor was found: set EDITOR, for example EDITOR=nano")
    return found
