"""What can be asked for: models with their names, caches and defaults, as values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from modelyard.core.engine import CacheInfo
from modelyard.core.request import Sampling


class CacheEntry(Struct, frozen=True):
    """A named KV context of one model. `strict` refuses a request whose max_tokens do not fit instead of clamping."""

    name: str
    model: str
    info: CacheInfo
    strict: bool = False


class ModelEntry(Struct, frozen=True, kw_only=True):
    """A model as the gateway knows it, loaded or not. `sampling` has every layer of defaults already in it."""

    name: str
    backend: str
    aliases: tuple[str, ...] = ()
    caches: Mapping[str, CacheEntry]
    default_cache: str
    modalities: tuple[str, ...] = ("text",)
    enabled: bool = True
    autoload: bool = False
    description: str = ""
    enable_thinking: bool | None = None
    show_thinking: bool = True
    tool_stream: bool = True
    constrain_calls: bool = False
    sampling: Sampling = Sampling()
    sized: bool = True  # the settings name its window; else it is the default, which says nothing of a remote model
    chosen: Sampling = Sampling()  # the same without the built-in defaults: what the settings themselves say
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def cache_infos(self) -> dict[str, CacheInfo]:
        """The caches in the form that an engine is made from."""
        return {name: cache.info for name, cache in self.caches.items()}


class Catalog(Struct, frozen=True):
    """All models by id, and the other names that lead to one."""

    models: Mapping[str, ModelEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, CacheEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: list[ModelEntry]) -> Catalog:
        return cls(
            {entry.name: entry for entry in entries},
            {alias: entry.name for entry in entries for alias in entry.aliases},
            {name: cache for entry in entries for name, cache in entry.caches.items()},
        )

    def find(self, name: str) -> CacheEntry | None:
        """By model id, then by alias (both in the model's default cache), then by the name of a cache."""
        model = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return model.caches[model.default_cache] if model else self.caches.get(name)

    def names(self) -> tuple[str, ...]:
        """The public names: ids, each followed by its aliases."""
        return tuple(name for entry in self.models.values() for name in (entry.name, *entry.aliases))
