"""The model that is optimized: its knobs on this machine, its baselines, and settings as configurations."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from msgspec.structs import replace
from pydantic import AliasChoices

from modelyard import plugins
from modelyard.config.problems import ConfigPath
from modelyard.config.settings import Config, engine_spec
from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.router.settings import CacheSettings, ModelSettings
from modelyard_optimize.search import SearchSpace, is_numeric_scale

PARALLEL = "parallel"  # how many conversations a cache holds is the user's choice: no default replaces it


class TunedModel:
    def __init__(self, config: Config, name: str, goal: Goal, machine: AvailableMemory) -> None:
        self.config, self.name, self.goal, self._machine = config, name, goal, machine
        self.backend = config.models[name].backend or ""
        plugins.engine(self.backend).verify()
        module = _engine_module(self.backend, "knobs")
        if module is None:
            raise InvalidRequest(f"{self.backend} has no settings that could be optimized", code="no_knobs")
        self._module: ModuleType = module
        self.has_quality_check = _has_engine_module(self.backend, "loss")
        bench = _engine_module(self.backend, "bench")
        self.has_engine_bench = bench is not None and bench.program(self._spec(config).options) is not None
        self.left_out: list[str] = []  # knobs that are not tried, each with the reason
        self.changes = functools.cache(self._minimal_changes)  # a setting is tried several times
        self.trial_config = functools.cache(self._trial_config)
        self.knobs = {knob.name: knob for knob in self._find_knobs()}
        if not self.knobs:
            raise InvalidRequest(f"{name!r} has nothing to optimize on this machine", code="no_knobs")

    def _find_knobs(self) -> Iterator[Knob]:
        """Each knob with the current value and the default among its values."""
        current = self._values(self.config)
        for knob in self._module.knobs(self._spec(self.config), self._machine, self.goal):
            default = self._values(without_knobs(self.config, self.name, {knob.name: knob}))
            if knob.lossy and not self.has_quality_check:
                self.left_out.append(f"{knob.name}: its quality loss cannot be measured with {self.backend}")
            elif not knob_paths(self.config, self.name, knob):
                self.left_out.append(f"{knob.name}: it belongs in a cache's section, and the model has none")
            else:
                values = tuple(dict.fromkeys([*knob.values, current[knob.name], default[knob.name]]))
                if is_numeric_scale(knob.ordered, values):
                    values = tuple(sorted(values, key=float))
                if knob.name == PARALLEL:  # no conversation loses its slot for speed
                    values = tuple(value for value in values if float(value) >= float(current[PARALLEL]))
                yield replace(knob, values=values)

    @functools.cached_property
    def space(self) -> SearchSpace:
        return SearchSpace(list(self.knobs.values()), self._module.forbids)

    # --- baselines ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def current(self) -> Setting:
        return self._setting(self.config)

    @functools.cached_property
    def default(self) -> Setting:
        """What the engine does with none of the knobs set."""
        return self._setting(without_knobs(self.config, self.name, self.knobs))

    @functools.cached_property
    def fitted(self) -> Setting | None:
        """What llama.cpp's own program would set: it fits layers to GPUs. None without GPUs or without the program."""
        can_fit = self._machine.gpus and plugins.engine(self.backend).has_fitted
        found: dict[str, Value] | None = self._module.fitted(self._spec(self.config)) if can_fit else None
        return None if found is None or not found.keys() & self.knobs.keys() else self.default.but(found)

    @property
    def baselines(self) -> dict[str, Setting]:
        named = {"current": self.current, "engine default": self.default}
        return named if self.fitted is None else named | {"llama.cpp's fit": self.fitted}

    def _setting(self, config: Config) -> Setting:
        values = self._values(config)
        return Setting.of({knob.name: values[knob.name] for knob in self.space.knobs})

    def _values(self, config: Config) -> dict[str, Value]:
        entry = config.router().catalog.models[self.name]
        values: dict[str, Value] = self._module.current(self._spec(config), entry.default_cache.name)
        return values

    def _spec(self, config: Config) -> EngineSpec:
        return engine_spec(config.router().catalog.models[self.name])

    # --- settings as configurations -------------------------------------------------------------------------------

    def _minimal_changes(self, setting: Setting) -> dict[ConfigPath, Value]:
        """What must be written for a setting, and nothing else. A value that is not set may follow from another: it
        is written only where the derived value would be wrong."""
        wanted = setting.changes(self.current)
        wanted |= setting.changes(self._setting(self._config_with(wanted)))
        for name in reversed(list(wanted)):
            fewer = {other: value for other, value in wanted.items() if other != name}
            wanted = fewer if self._setting(self._config_with(fewer)) == setting else wanted
        return config_changes(self.config, self.name, self.knobs, wanted)

    def _config_with(self, values: dict[str, Value]) -> Config:
        return with_changes(self.config, config_changes(self.config, self.name, self.knobs, values))

    def _trial_config(self, setting: Setting) -> dict[str, Any]:
        return single_model_config(with_changes(self.config, self.changes(setting)), self.name)

    def exact_config(self) -> dict[str, Any]:
        """With exact numbers for every lossy knob: the reference of quality checks."""
        exact = {
            name: next((value for value in ("float32", "f16", "auto") if value in knob.values), self.default[name])
            for name, knob in self.knobs.items()
            if knob.lossy
        }
        return single_model_config(self._config_with(exact), self.name)


def _engine_module(backend: str, name: str) -> ModuleType | None:
    has = _has_engine_module(backend, name)
    return importlib.import_module(f"{plugins.engine(backend).tuning}.{name}") if has else None


def _has_engine_module(backend: str, name: str) -> bool:
    """Without importing it: it may load a native library, which belongs in the process of a trial."""
    package = plugins.engine(backend).tuning
    return package is not None and importlib.util.find_spec(f"{package}.{name}") is not None


# --- where a knob is set in a configuration ---------------------------------------------------------------------------


def knob_paths(config: Config, model: str, knob: Knob) -> list[ConfigPath]:
    """The model's section, or those of its caches that set the knob themselves; empty if there is no place for it."""
    caches = {name: cache for name, cache in config.caches.items() if cache.model == model}
    if knob.place == "cache":
        if caches:
            return [("caches", next(iter(caches)), knob.name)]
        return [("models", model, knob.name)] if knob.name in ModelSettings.model_fields else []
    own = [
        name
        for name, cache in caches.items()
        if knob.name in CacheSettings.model_fields and getattr(cache, knob.name) is not None
    ]
    paths: list[ConfigPath] = [("caches", name, knob.name) for name in own]
    return paths if caches and len(own) == len(caches) else [("models", model, knob.name), *paths]


def config_changes(
    config: Config, model: str, knobs: Mapping[str, Knob], setting: Mapping[str, Value]
) -> dict[ConfigPath, Value]:
    """Each path with its value. A cache's flash attention is a boolean, a model's a word."""
    return {
        path: value == "on" if path[0] == "caches" and path[-1] == "flash_attn" else value
        for name, value in setting.items()
        for path in knob_paths(config, model, knobs[name])
    }


def with_changes(config: Config, changes: Mapping[ConfigPath, Value]) -> Config:
    """The configuration as if its file had these values."""
    models: dict[str, Any] = dict(config.models)
    caches: dict[str, Any] = dict(config.caches)
    for (section, name, key), value in changes.items():
        table, kind = (models, ModelSettings) if section == "models" else (caches, CacheSettings)
        fields = table[str(name)].model_dump(exclude_unset=True)
        if fields.get("options"):
            aliases = option_aliases(table[str(name)].backend, str(key))
            fields["options"] = {other: v for other, v in fields["options"].items() if other not in aliases}
        table[str(name)] = kind.model_validate(fields | {str(key): value})
    return config.model_copy(update={"models": models, "caches": caches})


def option_aliases(backend: str | None, key: str) -> set[str]:
    """The names that a file may use for an engine's option."""
    info = plugins.engine(backend or "").Options.model_fields.get(key)
    alias = info.validation_alias if info is not None else None
    return {key, *map(str, alias.choices)} if isinstance(alias, AliasChoices) else {key}


def without_knobs(config: Config, model: str, knobs: Mapping[str, Knob]) -> Config:
    """The configuration with none of these knobs set."""
    models, caches = dict(config.models), dict(config.caches)
    fields = models[model].model_dump(exclude_unset=True)
    aliases = {alias for name in knobs for alias in option_aliases(models[model].backend, name)}
    fields["options"] = {key: value for key, value in fields.get("options", {}).items() if key not in aliases}
    models[model] = ModelSettings.model_validate(_without(fields, knobs))
    for name, cache in config.caches.items():
        if cache.model == model:
            caches[name] = CacheSettings.model_validate(_without(cache.model_dump(exclude_unset=True), knobs))
    return config.model_copy(update={"models": models, "caches": caches})


def _without(fields: dict[str, Any], knobs: Mapping[str, Knob]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in knobs or key == PARALLEL}


def single_model_config(config: Config, model: str) -> dict[str, Any]:
    """What a trial's process needs, as JSON values: one model and its caches, without keys, routes and other models."""
    caches = {name: cache for name, cache in config.caches.items() if cache.model == model}
    part = Config(models={model: config.models[model]}, caches=caches, decoding=config.decoding)
    return part.model_dump(mode="json", exclude_unset=True)
