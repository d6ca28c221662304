"""The running server's own housekeeping: what its models are, what the machine holds, and a new configuration put in
place of the old one while requests go on."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from modelyard.config.problems import ConfigError
from modelyard.config.settings import Config, LoadedConfig
from modelyard.core.engine import MemoryEstimate
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.pool import Pool
from modelyard.gateway import Gateway
from modelyard.http.admin.context import ModelDetails, ReloadResult
from modelyard.library.cache_dir import cache_dir
from modelyard.router.settings import ModelSettings
from modelyard.server.engine_factory import blueprints
from modelyard.server.load_overrides import altered, schemas
from modelyard.server.memory_estimate import footprint, machine
from modelyard.server.model_definition import Definition, define
from modelyard.telemetry.system import MachineMemory, read_memory
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.tokenizer_files import cached_tokenizers, store_tokenizer

log = logging.getLogger(__name__)

_SECRET = re.compile(r"(^|_)(key|token|secret|password|auth)($|_)", re.IGNORECASE)
_ABSENT = ("model_file_missing", "tokenizer_missing")  # what a model's fault is where its files are elsewhere
# Made once, at the start; a change of them waits for the next one.
_AT_START = ("http", "keys", "log", "store", "images", "scheduler")

Reread = Callable[[], LoadedConfig]


class AdminService:
    def __init__(self, config: Config, pool: Pool, gateway: Gateway, reread: Reread | None) -> None:
        self._config, self._pool, self._gateway, self._reread = config, pool, gateway, reread
        self._busy = False
        self._following: asyncio.Task[None] | None = None
        self._learning: dict[str, asyncio.Task[None]] = {}

    def details(self, model: str) -> ModelDetails:
        settings = self._config.models[model]
        return ModelDetails(
            backend=settings.backend or "",
            enabled=bool(settings.enabled),
            aliases=tuple(settings.aliases),
            description=settings.description,
            overrides=schemas(settings),
            definition=public(settings),
        )

    async def memory(self) -> MachineMemory:
        return await asyncio.to_thread(read_memory)

    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> MemoryEstimate:
        """Files are read for it, so it is done in a thread."""

        def work(config: Config) -> MemoryEstimate:
            changed = altered(config, model, overrides)
            found = footprint(changed, changed.router().catalog.models[model], machine())
            if found.memory is None:
                raise Unavailable(f"what {model!r} takes of memory is not known: {found.note}", code="estimate")
            return found.memory

        return await asyncio.to_thread(work, self._config)

    def follow(self, edition: int) -> None:
        """Another gateway has had the configuration read anew, the scheduler has done so, and now it is our turn."""
        log.info("edition %d of the configuration", edition)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        try:
            await self.reload(alone=True)
        except ModelyardError as error:
            log.warning("%s", error.message)

    # --- models whose files only their workers have -------------------------------------------------------------------

    def learn(self, model: str) -> None:
        """An engine of it is up. Where its tokenizer is not here, the worker has it."""
        held = self._gateway.models.get(model)
        absent = held is not None and held.fault is not None and held.fault.code in _ABSENT
        if absent and model not in self._learning and not self._config.models[model].tokenizer_path:
            self._learning[model] = asyncio.get_running_loop().create_task(self._learn(model))

    def learn_all(self) -> None:
        """Of those that are up already."""
        for name in self._gateway.models:
            if isinstance(self._pool, RemotePool) and self._pool.engines(name):
                self.learn(name)

    async def _learn(self, model: str) -> None:
        try:
            await self._learned(model, self._config)
        except (ModelyardError, OSError) as error:
            log.warning("the tokenizer of %s could not be had from its worker: %s", model, error)
        finally:
            del self._learning[model]

    async def _learned(self, model: str, config: Config) -> None:
        if not isinstance(self._pool, RemotePool):
            return
        shelf = cache_dir() / "tokenizers"
        told = await self._pool.tokenizer(model, await asyncio.to_thread(cached_tokenizers, shelf))
        if told is None:
            return
        place = await asyncio.to_thread(store_tokenizer, shelf, told.tokenizer, told.files)
        settings = config.models[model].model_copy(update={"tokenizer_path": str(place)})
        entry = config.router().catalog.models[model]
        found = (await asyncio.to_thread(define, entry, settings)).model
        if self._config is config:  # else it was read anew meanwhile, and this is of the old one
            self._gateway.models = {**self._gateway.models, model: found}
            log.info("the tokenizer of %s came from its worker", model)

    async def close(self) -> None:
        tasks = [*self._learning.values(), *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- a new configuration ------------------------------------------------------------------------------------------

    async def reload(self, *, alone: bool = False) -> ReloadResult:
        """All or nothing: a file that is wrong changes nothing. A pool in another process reads it first, unless we are
        `alone` with the news."""
        if self._reread is None:
            raise Conflict("this server was given its configuration by a program, not by a file", code="no_file")
        if self._busy:
            raise Conflict("the configuration is being read already", code="reload_running")
        self._busy = True
        try:
            loaded = await asyncio.to_thread(self._read, self._reread)
            definitions = await asyncio.to_thread(defined, loaded.config)
            if isinstance(self._pool, RemotePool) and not alone:
                await self._pool.reload()
            return self._replace(loaded, definitions)
        finally:
            self._busy = False

    @staticmethod
    def _read(reread: Reread) -> LoadedConfig:
        try:
            return reread()
        except ConfigError as error:
            told = "; ".join(str(problem) for problem in error.problems)
            raise InvalidRequest(f"the configuration has errors, the old one stays: {told}", code="config") from None

    def _replace(self, loaded: LoadedConfig, definitions: Mapping[str, Definition]) -> ReloadResult:
        """No await in here: a request meets either the old configuration or the new one."""
        before, config = self._config, loaded.config
        router = config.router()
        models = {name: definition.model for name, definition in definitions.items()}
        self._pool.reconfigure(blueprints(config, {name: model.fault for name, model in models.items()}))
        self._gateway.router, self._gateway.models = router, models
        self._config = config
        self.learn_all()
        return difference(before, config, tuple(str(problem) for problem in loaded.problems))


def defined(config: Config) -> dict[str, Definition]:
    return {name: define(entry, config.models[name]) for name, entry in config.router().catalog.models.items()}


def difference(before: Config, after: Config, warnings: tuple[str, ...] = ()) -> ReloadResult:
    old, new = before.models, after.models
    waits = [name for name in _AT_START if getattr(before, name) != getattr(after, name)]
    told = (f"{', '.join(waits)}: changed, but only a restart puts it into effect",) if waits else ()
    return ReloadResult(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and new[name] != old[name]),
        warnings=(*told, *warnings),
    )


# --- what may be shown ------------------------------------------------------------------------------------------------


def public(settings: ModelSettings) -> dict[str, Any]:
    """The definition as it was written, without what could be a secret: keys, and the values of environments."""
    written: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    return {name: _shown(name, value) for name, value in (written | written.pop("options", {})).items()}


def _shown(name: str, value: Any) -> Any:
    if name.endswith("_env") and isinstance(value, dict):
        return dict.fromkeys(value, "***")
    hidden = _SECRET.search(name) and not name.endswith("_env") and isinstance(value, str)
    return "***" if hidden else value
