"""A model's blueprint made from its settings: how the pool makes its engine, what it takes, and how it is run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from pydantic import ValidationError

from modelyard import plugins
from modelyard.config.engine_options import engine_spec
from modelyard.config.problems import validation_message
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory, Engine, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.pool import ModelSpec, Overrides
from modelyard.router.catalog import ModelEntry
from modelyard.router.settings import ModelSettings
from modelyard.server.load_overrides import altered
from modelyard.workers.process_engine import create_process_engine

# (backend, spec, identity, machine) → the engine, wherever it may run
Placing = Callable[[str, EngineSpec, str, str], Engine]


def blueprint(
    config: Config, entry: ModelEntry, fault: ModelyardError | None = None, place: Placing | None = None
) -> ModelSpec:
    """`fault` is why the model could not be defined: it fails when it is loaded, with that reason, and alone. `place`
    is asked for the engine where it is not made in this process or a child of it."""
    settings = config.models[entry.name]
    identity = _identity(entry, settings)

    def make(site: str = "") -> Engine:
        if fault is not None:
            raise fault
        module, spec = plugins.load("engines", entry.backend), engine_spec(entry, settings)
        if place is not None:
            return place(entry.backend, spec, identity, site)
        if is_apart(settings):
            return create_process_engine(entry.backend, spec, module.kind(spec.options))
        engine: Engine = module.create(spec)
        return engine

    def estimate(here: AvailableMemory) -> MemoryEstimate:
        taken: MemoryEstimate = plugins.load("engines", entry.backend).estimate(engine_spec(entry, settings), here)
        return taken

    ttl = settings.idle_ttl_s if settings.idle_ttl_s is not None else config.scheduler.idle_ttl_s
    return ModelSpec(
        name=entry.name,
        caches=entry.cache_infos,
        make=make,
        make_at=make,
        estimate=estimate,
        altered=lambda overrides: _altered(config, entry.name, fault, place, overrides),
        identity=identity,
        replicas=settings.replicas,
        replica_max=settings.replica_max,
        target_inflight=settings.target_inflight,
        autoload=settings.autoload,
        enabled=bool(settings.enabled),
        idle_ttl_s=ttl or None,
    )


def is_apart(settings: ModelSettings) -> bool:
    """Whether the engine gets a process of its own: where that is asked for, where it has an interpreter of its own, or
    where its module says that it should."""
    if settings.placement != "auto":
        return settings.placement == "process"
    if settings.python is not None:
        return True
    module = plugins.load("engines", settings.backend or "")
    if hasattr(module, "own_process"):
        return bool(module.own_process(settings.options))
    return bool(getattr(module, "OWN_PROCESS", False))


def _altered(
    config: Config, name: str, fault: ModelyardError | None, place: Placing | None, overrides: Overrides
) -> ModelSpec:
    """As if the overrides stood in the model's section; the file is left as it is."""
    changed = altered(config, name, overrides)
    entry = changed.router().catalog.models[name]
    try:
        engine_spec(entry, changed.models[name])
    except ValidationError as error:  # each value may be, but not together with the others
        raise InvalidRequest(validation_message(error.errors()[0]), code="bad_override") from None
    return replace(blueprint(changed, entry, fault, place), altered=None)


def blueprints(
    config: Config, faults: Mapping[str, ModelyardError | None], place: Placing | None = None
) -> dict[str, ModelSpec]:
    entries = config.router().catalog.models
    return {name: blueprint(config, entry, faults.get(name), place) for name, entry in entries.items()}


def _identity(entry: ModelEntry, settings: ModelSettings) -> str:
    """Of two models that make the same engine it is the same."""
    try:
        spec = engine_spec(entry, settings)
    except (ModelyardError, ValidationError):  # it cannot be loaded anyway; a corrected one is another
        return f"{entry.name}:{hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]}"
    told = _told(entry.backend, spec) + f"\n{is_apart(settings)}"
    return f"{entry.name}:{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _told(backend: str, spec: EngineSpec) -> str:
    caches = sorted((name, repr(info)) for name, info in spec.caches.items())
    return "\n".join((backend, spec.options.model_dump_json(), repr(caches), repr(spec.modalities), repr(spec.python)))
