"""What is optimized: one model of a configuration, its knobs on this machine, and what it is compared with."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from modelyard import plugins
from modelyard.config.engine_options import engine_spec
from modelyard.config.problems import ConfigPath
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Goal, Knob, Setting, Value
from modelyard.tune.places import PLACES, alone, changes, places, turned, unset
from modelyard.tune.space import Space, is_scale


class Subject:
    def __init__(self, config: Config, model: str, goal: Goal, here: AvailableMemory) -> None:
        self.config, self.model, self.goal, self._here = config, model, goal, here
        self.backend = config.models[model].backend or ""
        plugins.verify(plugins.load("engines", self.backend))
        self._module = _own_module(self.backend, "knobs")
        if self._module is None:
            raise InvalidRequest(f"{self.backend} has no settings that could be optimized", code="no_knobs")
        self.judges = _has_module(self.backend, "loss")
        bench = _own_module(self.backend, "bench")
        self.benches = bench is not None and bench.program(self._spec(config).options) is not None
        self.left_out: list[str] = []
        self.knobs = {knob.name: knob for knob in self._knobs(self._module)}
        if not self.knobs:
            raise InvalidRequest(f"nothing of {model!r} could be optimized on this machine", code="no_knobs")

    def _knobs(self, module: ModuleType) -> Iterator[Knob]:
        """Each with its current value and the default among its values, in order."""
        held = self._held(self.config)
        for knob in module.knobs(self._spec(self.config), self._here, self.goal):
            default = self._held(unset(self.config, self.model, {knob.name: knob}))
            if knob.lossy and not self.judges:
                self.left_out.append(f"{knob.name}: nobody can say here what it costs in quality")
            elif not places(self.config, self.model, knob):
                self.left_out.append(f"{knob.name}: it stands in a cache's section, and the model has none")
            else:
                values = _with(knob, held[knob.name], default[knob.name])
                yield replace(knob, values=_at_least(held[PLACES], values) if knob.name == PLACES else values)

    @cached_property
    def space(self) -> Space:
        assert self._module is not None  # noqa: S101  it was looked for when this was made
        return Space(list(self.knobs.values()), self._module.forbids)

    # --- what it is compared with -------------------------------------------------------------------------------------

    @cached_property
    def current(self) -> Setting:
        return self._setting(self.config)

    @cached_property
    def default(self) -> Setting:
        """What the engine does where nobody turned anything."""
        return self._setting(unset(self.config, self.model, self.knobs))

    @cached_property
    def fitted(self) -> Setting | None:
        """What llama.cpp's own program would take: it fits layers to GPUs. None where there is nothing to fit."""
        fit = getattr(self._module, "fitted", None) if self._here.gpus else None
        found: dict[str, Value] | None = fit(self._spec(self.config)) if fit is not None else None
        return None if found is None or not found.keys() & self.knobs.keys() else self.default.but(found)

    @property
    def baselines(self) -> dict[str, Setting]:
        named = {"current": self.current, "engine default": self.default}
        return named if self.fitted is None else named | {"llama.cpp's fit": self.fitted}

    def _setting(self, config: Config) -> Setting:
        held = self._held(config)
        return Setting.of({knob.name: held[knob.name] for knob in self.space.knobs})

    def _held(self, config: Config) -> dict[str, Value]:
        assert self._module is not None  # noqa: S101
        entry = config.router().catalog.models[self.model]
        values: dict[str, Value] = self._module.current(self._spec(config), entry.default_cache)
        return values

    def _spec(self, config: Config) -> EngineSpec:
        return engine_spec(config.router().catalog.models[self.model], config.models[self.model])

    # --- settings as configurations -----------------------------------------------------------------------------------

    def changes(self, setting: Setting) -> dict[ConfigPath, Value]:
        """What would have to be written for it, and nothing that holds already. What is not set may follow from
        another value, so what the rest comes to is looked at: it is said where it would be wrong, and only there."""
        wanted = setting.changes(self.current)
        wanted |= setting.changes(self._setting(self._with(wanted)))
        for name in reversed(list(wanted)):
            fewer = {other: value for other, value in wanted.items() if other != name}
            wanted = fewer if self._setting(self._with(fewer)) == setting else wanted
        return changes(self.config, self.model, self.knobs, wanted)

    def _with(self, values: dict[str, Value]) -> Config:
        return turned(self.config, changes(self.config, self.model, self.knobs, values))

    def order(self, setting: Setting) -> dict[str, Any]:
        return alone(turned(self.config, self.changes(setting)), self.model)

    def exact(self) -> dict[str, Any]:
        """With every number that may be rounded as the engine has it by itself: what a loss is held against."""
        exact = {name: _exact(knob, self.default[name]) for name, knob in self.knobs.items() if knob.lossy}
        return alone(self._with(exact), self.model)


def _exact(knob: Knob, default: Value) -> Value:
    return next((value for value in ("float32", "f16", "auto") if value in knob.values), default)


def _with(knob: Knob, *more: Value) -> tuple[Value, ...]:
    """Numbers in order; words in the order in which they were named."""
    every = tuple(dict.fromkeys([*knob.values, *more]))
    return tuple(sorted(every, key=float)) if is_scale(knob.ordered, every) else every


def _at_least(held: Value, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Nobody's conversation loses its place for speed: one stream whose words are guessed well may beat many."""
    return tuple(value for value in values if float(value) >= float(held))


def _own_module(backend: str, name: str) -> ModuleType | None:
    return importlib.import_module(f"modelyard.engines.{backend}.{name}") if _has_module(backend, name) else None


def _has_module(backend: str, name: str) -> bool:
    """Without importing it: it may bring a native library along, which belongs into a trial's process."""
    return importlib.util.find_spec(f"modelyard.engines.{backend}.{name}") is not None
