"""Builds the pool's model specs from the configuration: how an engine is created, and what one load may override."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace
from pydantic import AliasChoices, BaseModel, TypeAdapter, ValidationError

from modelyard import plugins
from modelyard.config.problems import validation_message
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.pool import Override, Overrides, Pool
from modelyard.library.progress import ProgressReporter
from modelyard.router.router import ModelEntry
from modelyard.router.settings import ModelSettings
from modelyard.workers.process_engine import create_process_engine

# Settings for one load of a model: which fields an engine lets an administrator change, and the changed definition.


def _other_names(settings: type[BaseModel]) -> dict[str, str]:
    return {
        str(alias): name
        for name, info in settings.model_fields.items()
        if isinstance(info.validation_alias, AliasChoices)
        for alias in info.validation_alias.choices
    }


# Engines may have other names for fields of all models.
_CANONICAL = _other_names(ModelSettings)


def allowed_overrides(settings: ModelSettings) -> Mapping[str, Any]:
    """Field → type with range; empty for an engine without such fields or one that is not installed."""
    if settings.backend not in plugins.names("engines"):
        return {}
    return plugins.engine(settings.backend).live_overrides


def override_schemas(config: Config, name: str) -> dict[str, Any]:
    """What a load of this model may override, as JSON Schemas with descriptions, for forms."""
    settings, schemas = config.models[name], {}
    windows_are_fixed = has_own_caches(config, name)
    for field in allowed_overrides(settings):
        options: type[BaseModel] = plugins.engine(settings.backend or "").Options
        canonical = {**_CANONICAL, **_other_names(options)}.get(field, field)
        if canonical == "n_ctx" and windows_are_fixed:
            continue
        described = options.model_fields.get(canonical) or ModelSettings.model_fields.get(canonical)
        description = described.description if described is not None else None
        schemas[field] = _schema(settings.backend or "", field) | ({"description": description} if description else {})
    return schemas


@cache
def _schema(backend: str, field: str) -> dict[str, Any]:
    schema: dict[str, Any] = TypeAdapter(plugins.engine(backend).live_overrides[field]).json_schema()
    return schema


def has_own_caches(config: Config, name: str) -> bool:
    """Whether caches of the configuration set the windows of this model."""
    return any(cache.model == name for cache in config.caches.values())


def with_overrides(config: Config, name: str, overrides: Mapping[str, Any]) -> Config:
    """The configuration with one model changed, for one load."""
    settings, fields = config.models[name], allowed_overrides(config.models[name])
    names = _names_of_overrides(settings, fields)
    checked: dict[str, Any] = {}
    for field, value in overrides.items():
        canonical = _CANONICAL.get(field) or names.get(field, field)
        if canonical in checked:
            raise InvalidRequest(f"{field} is given twice, with another name too", param=field)
        checked[canonical] = _checked(field, value, fields, names.get(field, field), name)
    if "n_ctx" in checked and has_own_caches(config, name):
        sent = next(field for field in overrides if _CANONICAL.get(field) == "n_ctx")
        raise InvalidRequest(f"the windows of {name!r} are set by its caches, not by a load", param=sent)
    kept = settings.model_dump(exclude_unset=True)
    kept["options"] = {k: v for k, v in settings.options.items() if names.get(k, k) not in checked}  # also other names
    changed = ModelSettings.model_validate(kept | checked)
    return config.model_copy(update={"models": {**config.models, name: changed}})


def _names_of_overrides(settings: ModelSettings, fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Each name that the configuration knows for an allowed override → the override."""
    if not fields:
        return {}
    canonical = {**_CANONICAL, **_other_names(plugins.engine(settings.backend or "").Options)}
    allowed = {canonical.get(field, field): field for field in fields}
    return {alias: allowed[name] for alias, name in canonical.items() if name in allowed}


def names_files(settings: ModelSettings, overrides: Mapping[str, Any]) -> bool:
    """Whether one of these overrides of a load names a file: a draft model, for example."""
    names = _names_of_overrides(settings, allowed_overrides(settings))
    local = plugins.engine(settings.backend or "").local_options if names else ()
    return any(names.get(field, field) in local for field in overrides)


def _checked(field: str, value: Any, fields: Mapping[str, Any], override: str, name: str) -> Any:
    if override not in fields:
        known = f"allowed are {', '.join(fields)}" if fields else "its engine allows no overrides"
        raise InvalidRequest(
            f"{field} cannot be set for one load of {name!r}; {known}", code="override_not_allowed", param=field
        )
    try:
        return TypeAdapter(fields[override]).validate_python(value)
    except ValidationError as error:
        raise InvalidRequest(f"{field}: {error.errors()[0]['msg']}, got {value!r}", param=field) from None


def model_spec(
    config: Config, entry: ModelEntry, fault: ModelyardError | None = None, *, can_run: bool = True
) -> EngineSpec:
    """What the pool runs. `fault`: the model could not be defined; loading it fails with this reason. `can_run`: as far
    as this machine was asked."""
    settings = entry.settings
    try:
        spec = engine_spec(entry)
        own_process = runs_in_own_process(settings, spec)
        described = f"{_describe(spec)}\n{own_process}"
    except (ModelyardError, ValidationError) as error:  # not loadable; a corrected model has another identity
        why = error if isinstance(error, ModelyardError) else InvalidRequest(validation_message(error.errors()[0]))
        spec, fault, own_process = EngineSpec(entry.name, None, entry.cache_infos), fault or why, False
        described = settings.model_dump_json()
    ttl = settings.idle_ttl_s if settings.idle_ttl_s is not None else config.scheduler.idle_ttl_s
    return replace(
        spec,
        identity=f"{entry.name}:{hashlib.sha256(described.encode()).hexdigest()[:16]}",
        own_process=own_process,
        replicas=settings.replicas,
        replica_max=settings.replica_max,
        target_inflight=settings.target_inflight,
        autoload=settings.autoload,
        enabled=bool(settings.enabled),
        idle_ttl_s=ttl or None,
        fault=fault,
        is_faulty=fault is not None or not can_run,
    )


def create_engine(spec: EngineSpec, node: str = "") -> Engine:
    """In this process or a child of it. `node`: the chosen machine; it can only be this one."""
    del node
    if spec.fault is not None:
        raise spec.fault
    if spec.own_process:
        return create_process_engine(spec)
    return plugins.engine(spec.backend).create(spec)


def runs_in_own_process(settings: ModelSettings, spec: EngineSpec) -> bool:
    """Whether the engine gets its own process: by its settings, for another Python interpreter, or by its module,
    which may look at the model's file."""
    if settings.placement != "auto":
        return settings.placement == "process"
    if settings.python is not None:
        return True
    return plugins.engine(spec.backend).own_process(spec.options)


def overriding(config: Config, faults: Mapping[str, ModelyardError | None]) -> Override:
    """The specs of loads as if their overrides were in the model's section of the configuration."""

    def override(name: str, overrides: Overrides) -> EngineSpec:
        changed = with_overrides(config, name, overrides)
        entry = changed.router().catalog.models[name]
        try:
            engine_spec(entry)
        except ValidationError as error:  # each value is valid, but not their combination
            raise InvalidRequest(validation_message(error.errors()[0]), code="bad_override") from None
        return model_spec(changed, entry, faults.get(name))

    return override


def configure_pool(
    pool: Pool,
    config: Config,
    faults: Mapping[str, ModelyardError | None],
    unrunnable: Collection[str] = (),
    leave_out: Callable[[str], bool] = lambda _: False,
) -> None:
    """Give the pool the models of the configuration. `faults`: why some could not be defined; `unrunnable`: the models
    that cannot be loaded on this machine; `leave_out`: engines that run elsewhere."""
    specs = {
        name: model_spec(config, entry, faults.get(name), can_run=name not in unrunnable)
        for name, entry in config.router().catalog.models.items()
        if not leave_out(entry.backend)
    }
    pool.reconfigure(specs, overriding(config, faults))


def _describe(spec: EngineSpec) -> str:
    caches = sorted((name, repr(info)) for name, info in spec.caches.items())
    return "\n".join(
        (spec.backend, spec.options.model_dump_json(), repr(caches), repr(spec.modalities), repr(spec.python))
    )


def prepare_engines(config: Config, progress: ProgressReporter, before: Config | None = None) -> None:
    """At their first use, set up the engines of all models that are loaded at the start or by a request; after a change
    of the configuration, those that `before` had no use for. A failure is an error if all models that are loaded at the
    start need the engine."""
    at_start = {model.backend for model in config.models.values() if model.enabled and model.backend}
    is_start, done, failed = before is None, _loadable_backends(before), set[str]()
    for backend in sorted((_loadable_backends(config) - done) & set(plugins.names("engines"))):
        try:
            if (setup := plugins.engine(backend).prepare) is not None:
                setup(progress)
        except ModelyardError as error:
            failed.add(backend)
            if is_start and at_start and failed >= at_start:
                raise
            logging.getLogger("modelyard.engines").warning("%s cannot be used: %s", backend, error.message)


def _loadable_backends(config: Config | None) -> set[str]:
    models = config.models.values() if config is not None else ()
    return {model.backend for model in models if model.backend and (model.enabled or model.autoload)}
