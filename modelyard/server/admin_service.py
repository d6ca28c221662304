"""Admin operations on the running server: model details, memory, estimates, and reloading the configuration while
requests run."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from modelyard.accounts.keys import read_keys
from modelyard.config.problems import ConfigError
from modelyard.config.secrets import config_paths, config_secrets, public_settings
from modelyard.config.settings import Config, LoadedConfig
from modelyard.core.engine import MemoryEstimate
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.pool import Pool
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model
from modelyard.http.admin.context import ReloadResult
from modelyard.library.cache_dir import cache_dir
from modelyard.library.progress import ProgressReporter
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings
from modelyard.server.can_run import unrunnable_models
from modelyard.server.engine_factory import (
    configure_pool,
    names_files,
    override_schemas,
    prepare_engines,
    with_overrides,
)
from modelyard.server.memory_estimate import available_memory, estimate_memory
from modelyard.server.model_definition import define_later, define_model, trial_fault
from modelyard.server.scheduler_models import named_only, with_scheduler_models
from modelyard.telemetry.masking import add_paths, add_secrets
from modelyard.telemetry.system import MachineMemory, read_memory
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.tokenizer_files import cached_tokenizers, store_tokenizer

log = logging.getLogger(__name__)

_FILES_ELSEWHERE = (
    "model_file_missing",
    "tokenizer_missing",
    "missing_library",
)  # faults of a model whose files only its worker has
_IN_USE = ("loading", "ready", "draining")  # states in which a reload must not break a model
_LOG_WAIT_S = 2.0
# Sections that take effect at the start only.
_NEEDS_RESTART = ("http", "log", "store", "images", "scheduler")

ConfigLoader = Callable[[], LoadedConfig]


class AdminService:
    def __init__(self, config: Config, pool: Pool, gateway: Gateway, load_config: ConfigLoader | None) -> None:
        self._config, self._pool, self._gateway, self._reread = config, pool, gateway, load_config
        self._busy = False
        self._following: asyncio.Task[None] | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}

    @property
    def config(self) -> Config:
        return self._config

    def describe(self, model: str) -> dict[str, Any]:
        settings = self._config.models[model]
        return {
            "backend": settings.backend or "",
            "enabled": bool(settings.enabled),
            "aliases": settings.aliases,
            "description": settings.description,
            "in_library": model in self._config.library_models,  # and not in a file: it can be removed with its files
            "overrides": override_schemas(self._config, model),
            "definition": public_settings(settings),
        }

    def names_files(self, model: str, overrides: Mapping[str, Any]) -> bool:
        return names_files(self._config.models[model], overrides)

    def routes(self) -> list[dict[str, Any]]:
        """The rules that decide where a model name leads, in their order. `index`: the place in the configuration."""
        return [
            {
                "kind": rule.kind,
                "index": rule.number,
                "match": list(rule.route.match),
                "endpoint": rule.route.endpoint,
                "override": rule.route.override,
                "model": rule.route.target.model,
                "cache": rule.route.target.cache,
                "fallback": [each.cache for each in rule.route.target.fallbacks],
                "allow_remote": rule.route.target.allow_remote,
                "mcp": list(rule.route.target.mcp),
            }
            for rule in self._gateway.lookup.router.rules()
        ]

    async def memory(self) -> MachineMemory:
        return await asyncio.to_thread(read_memory)

    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> MemoryEstimate:
        """In a thread, because it reads files."""

        def work(config: Config) -> MemoryEstimate:
            changed = with_overrides(config, model, overrides)
            found = estimate_memory(changed.router().catalog.models[model], available_memory())
            if found.memory is None:
                raise Unavailable(f"the memory of {model!r} cannot be estimated: {found.note}", code="estimate")
            return found.memory

        return await asyncio.to_thread(work, self._config)

    def follow(self, edition: int) -> None:
        """Another gateway reloaded the configuration, and the scheduler has applied it; this gateway follows."""
        log.info("following reload %d of the configuration", edition)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            await self.reload(local_only=True)
        except ModelyardError as error:
            log.warning("%s", error.message)

    # --- tokenizers that only workers have ----------------------------------------------------------------------------

    def fetch_tokenizer(self, model: str) -> None:
        """Call it when an engine of the model is open: its worker has the tokenizer that is missing here."""
        held = self._gateway.lookup.models.get(model)
        absent = held is not None and held.fault is not None and held.fault.code in _FILES_ELSEWHERE
        if absent and model not in self._fetching and not self._config.models[model].tokenizer_path:
            self._fetching[model] = asyncio.get_running_loop().create_task(self._fetch(model))

    def fetch_tokenizers(self) -> None:
        """For all models whose engines are open."""
        for name in self._gateway.lookup.models:
            if isinstance(self._pool, RemotePool) and self._pool.engines(name):
                self.fetch_tokenizer(name)

    async def _fetch(self, model: str) -> None:
        try:
            await self._fetch_and_define(model, self._config)
        except (ModelyardError, OSError) as error:
            log.warning("the tokenizer of %s could not be fetched from its worker: %s", model, error)
        finally:
            del self._fetching[model]

    async def _fetch_and_define(self, model: str, config: Config) -> None:
        if not isinstance(self._pool, RemotePool):
            return
        folder = cache_dir() / "tokenizers"
        found = await self._pool.fetch_tokenizer(model, await asyncio.to_thread(cached_tokenizers, folder))
        if found is None:
            return
        place = await asyncio.to_thread(store_tokenizer, folder, found.tokenizer, found.files)
        entry = config.router().catalog.models[model]
        settings = entry.settings.model_copy(update={"tokenizer_path": str(place)})
        defined = await asyncio.to_thread(define_model, replace(entry, settings=settings))
        if self._config is config:  # otherwise the configuration was reloaded meanwhile
            self._gateway.lookup.models = {**self._gateway.lookup.models, model: defined}
            log.info("fetched the tokenizer of %s from its worker", model)

    async def close(self) -> None:
        tasks = [*self._fetching.values(), *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- a new configuration ------------------------------------------------------------------------------------------

    async def reload(self, *, local_only: bool = False, keep_unchanged: bool = False) -> ReloadResult:
        """All or nothing: a file with errors, or one that would break a model in use, changes nothing. A scheduler in
        another process reloads first, unless `local_only`. `keep_unchanged`: models whose settings stay the same do not
        read their files again."""
        if self._reread is None:
            raise Conflict("this server's configuration does not come from a file", code="no_file")
        if self._busy:
            raise Conflict("a reload is already running", code="reload_running")
        self._busy = True
        try:
            loaded = await asyncio.to_thread(reread_config, self._reread, self._config)
            pool = self._pool if isinstance(self._pool, RemotePool) else None
            if pool is not None:
                if named_only(loaded.config) and not local_only:
                    await pool.reload()
                    local_only = True
                loaded.config = await with_scheduler_models(loaded.config, pool)
            else:  # otherwise the engines are set up where they run
                progress = ProgressReporter(write_line=logging.getLogger("modelyard.library").info)
                await asyncio.to_thread(prepare_engines, loaded.config, progress, self._config)
            kept = _unchanged(self._config, loaded.config, self._gateway.lookup.models) if keep_unchanged else {}
            defined = kept | await asyncio.to_thread(define_models, loaded.config, kept)
            models = {name: defined[name] for name in loaded.config.models}
            self._check_models_in_use(await asyncio.to_thread(new_faults, self._gateway.lookup.models, models))
            if pool is not None and not local_only:
                await pool.reload()
            unrunnable = set() if pool is not None else await asyncio.to_thread(unrunnable_models, loaded.config)
            return self._replace(loaded, models, unrunnable)
        finally:
            self._busy = False

    async def scheduler_log(self, since: float, level: int, request: str, limit: int) -> list[dict[str, Any]]:
        """The newest log lines of a scheduler in another process; none if it does not answer."""
        if not isinstance(self._pool, RemotePool):
            return []
        try:
            async with asyncio.timeout(_LOG_WAIT_S):
                return await self._pool.log_lines(since, level, request, limit)
        except (ModelyardError, TimeoutError):
            return []

    async def reload_library(self, *, has_peers: bool = False) -> None:
        """A model was pulled, added or removed. `has_peers`: other gateways behind this port, each with its own
        engines."""
        done = await self.reload(keep_unchanged=True)
        for word, names in (("added", done.added), ("removed", done.removed), ("changed", done.changed)):
            if names:
                log.info("library: %s %s", word, ", ".join(names))
        for name in done.added:
            if (model := self._config.library_models.get(name)) is not None:
                log.info("%s: %s", name, model.reason)
        if has_peers and done.added:
            log.warning("until the server is restarted, each of its gateways loads its own copy of a new model")

    def _check_models_in_use(self, faults: Mapping[str, ModelyardError]) -> None:
        """A model that serves requests keeps its working definition. Files that only its worker has are no fault."""
        remote, status = isinstance(self._pool, RemotePool), self._gateway.leases.status()
        broken = [
            f"models.{name}: {fault.message}"
            for name, fault in faults.items()
            if name in status and status[name].state in _IN_USE and not (remote and fault.code in _FILES_ELSEWHERE)
        ]
        if broken:
            raise config_refused("; ".join(broken))

    def _replace(self, loaded: LoadedConfig, models: Mapping[str, Model], unrunnable: Collection[str]) -> ReloadResult:
        """Without await: every request sees either the old configuration or the new one."""
        before, config = self._config, loaded.config
        router, keys = config.router(), read_keys(config.keys)
        configure_pool(self._pool, config, {name: model.fault for name, model in models.items()}, unrunnable)
        self._gateway.lookup.router, self._gateway.lookup.models = router, models
        self._gateway.accounts.configure(keys, config.prices(), config.accounts.currency)
        self._reconfigure_mcp(config.mcp)
        self._config = config
        add_secrets(config_secrets(config, os.environ))
        add_paths(config_paths(config))
        self.fetch_tokenizers()
        return config_difference(before, config, tuple(str(problem) for problem in loaded.problems))

    def _reconfigure_mcp(self, settings: McpSettings) -> None:
        if self._gateway.preparer.mcp is not None:
            self._gateway.preparer.mcp.reconfigure(settings)
        elif settings.is_on:
            self._gateway.preparer.mcp = McpServers(settings)


def reread_config(load_config: ConfigLoader, before: Config) -> LoadedConfig:
    """The configuration as it is now. Raises InvalidRequest if it has errors, or if its file has lost all models:
    a file that is being written is empty for a moment, and the built-in model would replace those that run."""
    try:
        loaded = load_config()
    except ConfigError as error:
        raise config_refused("; ".join(str(problem) for problem in error.problems)) from None
    if loaded.config.is_embedded and not before.is_embedded:
        raise config_refused("no model is defined any more. To serve the built-in model instead, restart the server")
    return loaded


def config_refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"the configuration has errors, the old one stays: {why}", code="config")


def _unchanged(before: Config, after: Config, models: Mapping[str, Model]) -> dict[str, Model]:
    """The models with the same settings and, in the library, the same files."""
    old, new = before.router().catalog.models, after.router().catalog.models
    return {
        name: models[name]
        for name, entry in new.items()
        if name in models
        and old.get(name) == entry
        and before.library_models.get(name) == after.library_models.get(name)
    }


def new_faults(before: Mapping[str, Model], after: Mapping[str, Model]) -> dict[str, ModelyardError]:
    """Why models that work now could not be defined any more, or could not render a message."""
    working = [name for name, model in before.items() if name in after and _fault(model) is None]
    return {name: fault for name in working if (fault := _fault(after[name])) is not None}


def _fault(model: Model) -> ModelyardError | None:
    return model.fault or trial_fault(model)


def define_models(config: Config, skip: Collection[str] = ()) -> dict[str, Model]:
    """All but `skip`. Models of the library are defined at their first request: there may be many."""
    return {
        name: define_later(entry, held)
        if (held := config.library_models.get(name)) is not None
        else define_model(entry)
        for name, entry in config.router().catalog.models.items()
        if name not in skip
    }


def config_difference(before: Config, after: Config, warnings: tuple[str, ...] = ()) -> ReloadResult:
    old, new = before.models, after.models
    changed = [name for name in _NEEDS_RESTART if getattr(before, name) != getattr(after, name)]
    restart = (f"{', '.join(changed)}: changed; restart the server to apply it",) if changed else ()
    return ReloadResult(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and new[name] != old[name]),
        warnings=(*restart, *warnings),
    )
