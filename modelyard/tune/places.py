"""Where in a configuration a knob is turned: a model's section, or its caches' where they say it themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices

from modelyard import plugins
from modelyard.config.problems import ConfigPath
from modelyard.config.settings import Config
from modelyard.core.knobs import Knob, Value
from modelyard.router.settings import CacheSettings, ModelSettings

PLACES = "parallel"  # how many conversations fit is what a cache is for: nobody's default takes its place


def places(config: Config, model: str, knob: Knob) -> list[ConfigPath]:
    """None: this configuration has nowhere to put it."""
    caches = {name: cache for name, cache in config.caches.items() if cache.model == model}
    if knob.place == "cache":
        if caches:
            return [("caches", next(iter(caches)), knob.name)]
        return [("models", model, knob.name)] if knob.name in ModelSettings.model_fields else []
    own = [name for name, cache in caches.items() if _speaks(cache, knob.name)]
    locs: list[ConfigPath] = [("caches", name, knob.name) for name in own]
    return locs if caches and len(own) == len(caches) else [("models", model, knob.name), *locs]


def _speaks(cache: CacheSettings, name: str) -> bool:
    return name in CacheSettings.model_fields and getattr(cache, name) is not None


def written(loc: ConfigPath, value: Value) -> Value:
    """A cache's flash attention is yes or no, a model's a word."""
    is_switch = loc[0] == "caches" and loc[-1] == "flash_attn"
    return value == "on" if is_switch else value


def changes(
    config: Config, model: str, knobs: Mapping[str, Knob], setting: Mapping[str, Value]
) -> dict[ConfigPath, Value]:
    """Each place with what is to stand there."""
    return {loc: written(loc, value) for name, value in setting.items() for loc in places(config, model, knobs[name])}


def turned(config: Config, changed: Mapping[ConfigPath, Value]) -> Config:
    """The configuration as if these stood in its file."""
    models: dict[str, Any] = dict(config.models)
    caches: dict[str, Any] = dict(config.caches)
    for (section, name, key), value in changed.items():
        table, kind = (models, ModelSettings) if section == "models" else (caches, CacheSettings)
        said = table[str(name)].model_dump(exclude_unset=True)
        if said.get("options"):
            others = aliases(table[str(name)].backend, str(key))
            said["options"] = {other: v for other, v in said["options"].items() if other not in others}
        table[str(name)] = kind.model_validate(said | {str(key): value})
    return config.model_copy(update={"models": models, "caches": caches})


def aliases(backend: str | None, key: str) -> set[str]:
    """The names under which an engine's own field may stand in a file."""
    info = plugins.load("engines", backend or "").Options.model_fields.get(key)
    known = info.validation_alias if info is not None else None
    return {key, *map(str, known.choices)} if isinstance(known, AliasChoices) else {key}


def unset(config: Config, model: str, knobs: Mapping[str, Knob]) -> Config:
    """The configuration in which nobody turned any of these knobs: what the engine does by itself."""
    models: dict[str, Any] = dict(config.models)
    said = models[model].model_dump(exclude_unset=True)
    known = {alias for name in knobs for alias in aliases(models[model].backend, name)}
    said["options"] = {key: value for key, value in said.get("options", {}).items() if key not in known}
    kept = {key: value for key, value in said.items() if key not in knobs or key == PLACES}
    models[model] = ModelSettings.model_validate(kept)
    return config.model_copy(update={"models": models, "caches": _plain(config.caches, model, knobs)})


def _plain(caches: Mapping[str, CacheSettings], model: str, knobs: Mapping[str, Knob]) -> dict[str, CacheSettings]:
    plain = {}
    for name, cache in caches.items():
        said = cache.model_dump(exclude_unset=True)
        kept = {key: value for key, value in said.items() if key not in knobs or key == PLACES}
        plain[name] = CacheSettings.model_validate(kept) if cache.model == model else cache
    return plain


def alone(config: Config, model: str) -> dict[str, Any]:
    """What another process has to know of one model, as JSON holds it: without keys, routes and other models."""
    caches = {name: cache for name, cache in config.caches.items() if cache.model == model}
    part = Config(models={model: config.models[model]}, caches=caches, decoding=config.decoding)
    return part.model_dump(mode="json", exclude_unset=True)
