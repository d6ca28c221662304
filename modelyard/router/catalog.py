"""The catalog: all models with their names, caches and defaults, built from the settings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from modelyard.core.engine import CacheInfo
from modelyard.core.request import Sampling
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings

DEFAULT_WINDOW = 4096
DEFAULT_TYPE = "f16"
DEFAULT_SAMPLING = Sampling(temperature=0.7, top_p=0.9)


class CacheEntry(Struct, frozen=True):
    """A named KV context of one model. `strict` refuses a request whose max_tokens do not fit instead of clamping."""

    name: str
    model: str
    info: CacheInfo
    strict: bool = False


class ModelEntry(Struct, frozen=True, kw_only=True):
    """A model, loaded or not. `sampling` includes all layers of defaults."""

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
    has_window: bool = True  # the settings set its window; the default says nothing about a remote model
    configured_sampling: Sampling = Sampling()  # `sampling` without the built-in defaults
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def cache_infos(self) -> dict[str, CacheInfo]:
        return {name: cache.info for name, cache in self.caches.items()}


class Catalog(Struct, frozen=True):
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
        """By model id, by alias (both in the model's default cache), or by the name of a cache."""
        model = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return model.caches[model.default_cache] if model else self.caches.get(name)

    def names(self) -> tuple[str, ...]:
        """The public names: ids, each followed by its aliases."""
        return tuple(name for entry in self.models.values() for name in (entry.name, *entry.aliases))


def build_catalog(
    models: Mapping[str, ModelSettings], caches: Mapping[str, CacheSettings], decoding: DecodingSettings
) -> Catalog:
    return Catalog.of([_model_entry(name, model, caches, decoding) for name, model in models.items()])


def _model_entry(
    name: str, model: ModelSettings, caches: Mapping[str, CacheSettings], general: DecodingSettings
) -> ModelEntry:
    configured = {key: _cache_entry(key, cache, model) for key, cache in caches.items() if cache.model == name}
    own = configured or {name: _default_cache(name, model)}
    sampling = model.decoding.sampling().over(general.sampling())
    return ModelEntry(
        name=name,
        backend=model.backend or "",
        aliases=tuple(model.aliases),
        caches=own,
        default_cache=next(iter(own)),
        modalities=tuple(model.modalities),
        enabled=model.enabled is not False,
        autoload=model.autoload,
        description=model.description,
        enable_thinking=model.enable_thinking,
        show_thinking=model.show_thinking,
        tool_stream=model.tool_stream,
        constrain_calls=model.constrain_calls,
        sampling=sampling.over(DEFAULT_SAMPLING),
        has_window=bool(configured) or model.n_ctx is not None,
        configured_sampling=sampling,
        max_tokens=model.decoding.max_tokens or general.max_tokens,
        stop=tuple(model.decoding.stop or general.stop),
    )


def _cache_entry(name: str, cache: CacheSettings, model: ModelSettings) -> CacheEntry:
    info = CacheInfo(
        cache.n_ctx,
        cache.parallel,
        cache.type_k or model.type_k or DEFAULT_TYPE,
        cache.type_v or model.type_v or DEFAULT_TYPE,
        cache.description,
        cache.n_batch,
        cache.n_ubatch,
        cache.n_threads,
        cache.flash_attn,
    )
    return CacheEntry(name, cache.model, info, strict=cache.overflow == "strict")


def _default_cache(name: str, model: ModelSettings) -> CacheEntry:
    """The only cache of a model without [caches]."""
    types = model.type_k or DEFAULT_TYPE, model.type_v or DEFAULT_TYPE
    parallel = model.parallel or model.target_inflight or 1
    return CacheEntry(name, name, CacheInfo(model.n_ctx or DEFAULT_WINDOW, parallel, *types))
