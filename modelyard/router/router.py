"""The router: resolves a requested model name and path to a model, a cache and a window. Pure.

The first match wins:

    1. the configured routes: `match` on the requested name (ignoring case) and `endpoint` on the path
    2. the id of a model, in its default cache
    3. an alias of a model, in its default cache
    4. the name of a cache
    5. an id or alias, ignoring case and the tag `:latest`, which Ollama's clients append
    6. the default model
    7. NotFound, with the names that exist

The catalog holds all models with their names, caches and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.core.request import Sampling
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

# Clients choose the names: bound the cache of resolved ones in number and length.
_MAX_RESOLVED = 1024
_MAX_NAME = 256
_MAX_LISTED = 20
DEFAULT_WINDOW = 4096
LATEST = ":latest"
DEFAULT_TYPE = "f16"
DEFAULT_SAMPLING = Sampling(temperature=0.7, top_p=0.9)


def with_default_sampling(sampling: Sampling) -> Sampling:
    """The built-in defaults where nothing is set. The two belong together: whoever sets a temperature gets no hidden
    `top_p`."""
    return sampling.over(DEFAULT_SAMPLING if sampling.temperature is None else Sampling())


class CacheEntry(Struct, frozen=True):
    """A named KV context of one model. `strict` refuses a request whose max_tokens do not fit instead of clamping.
    `share_across_keys`: API keys reuse each other's KV."""

    name: str
    model: str
    info: CacheInfo
    strict: bool = False
    share_across_keys: bool = False


class ModelEntry(Struct, frozen=True, kw_only=True):
    """A model's settings with everything resolved that depends on other sections: its caches and defaults."""

    name: str
    settings: ModelSettings
    caches: Mapping[str, CacheEntry]  # the first is its default
    sampling: Sampling = Sampling()  # its own over the general defaults, without the built-in ones
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    has_window: bool = True  # the settings set its window; the default says nothing about a remote model

    @property
    def backend(self) -> str:
        return self.settings.backend or ""

    @property
    def enabled(self) -> bool:
        return self.settings.enabled is not False

    @property
    def default_cache(self) -> CacheEntry:
        return next(iter(self.caches.values()))

    @property
    def cache_infos(self) -> dict[str, CacheInfo]:
        return {name: cache.info for name, cache in self.caches.items()}


class Catalog(Struct, frozen=True):
    models: Mapping[str, ModelEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, CacheEntry] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)  # names by their lower-case form

    @classmethod
    def of(cls, entries: list[ModelEntry]) -> Catalog:
        return cls(
            {entry.name: entry for entry in entries},
            {alias: entry.name for entry in entries for alias in entry.settings.aliases},
            {name: cache for entry in entries for name, cache in entry.caches.items()},
            {name.lower(): name for entry in reversed(entries) for name in (*entry.settings.aliases, entry.name)},
        )

    def find(self, name: str) -> CacheEntry | None:
        """By model id, by alias (both in the model's default cache), or by the name of a cache; last in any case."""
        model = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        if model is None and (cache := self.caches.get(name)) is not None:
            return cache
        if model is None:
            folded = name.lower()
            known = self.folded.get(folded) or self.folded.get(folded.removesuffix(LATEST), "")
            model = self.models.get(known) or self.models.get(self.aliases.get(known, ""))
        return model.default_cache if model else None

    def names(self) -> tuple[str, ...]:
        """The public names: ids, each followed by its aliases."""
        return tuple(name for entry in self.models.values() for name in (entry.name, *entry.settings.aliases))


def build_catalog(
    models: Mapping[str, ModelSettings], caches: Mapping[str, CacheSettings], decoding: DecodingSettings
) -> Catalog:
    return Catalog.of([model_entry(name, model, caches, decoding) for name, model in models.items()])


def model_entry(
    name: str, model: ModelSettings, caches: Mapping[str, CacheSettings], general: DecodingSettings
) -> ModelEntry:
    configured = {key: _cache_entry(key, cache, model) for key, cache in caches.items() if cache.model == name}
    return ModelEntry(
        name=name,
        settings=model,
        caches=configured or {name: _default_cache(name, model)},
        sampling=model.decoding.sampling().over(general.sampling()),
        max_tokens=model.decoding.max_tokens or general.max_tokens,
        stop=tuple(model.decoding.stop or general.stop),
        has_window=bool(configured) or model.n_ctx is not None,
    )


def _cache_entry(name: str, cache: CacheSettings, model: ModelSettings) -> CacheEntry:
    info = CacheInfo(
        cache.n_ctx,
        1 if cache.parallel == "auto" else cache.parallel,  # replaced by a number when the configuration is loaded
        cache.type_k or model.type_k or DEFAULT_TYPE,
        cache.type_v or model.type_v or DEFAULT_TYPE,
        cache.description,
        cache.n_batch,
        cache.n_ubatch,
        cache.n_threads,
        cache.flash_attn,
    )
    shared = model.share_across_keys if cache.share_across_keys is None else cache.share_across_keys
    return CacheEntry(name, cache.model, info, cache.overflow == "strict", shared)


def _default_cache(name: str, model: ModelSettings) -> CacheEntry:
    """The only cache of a model without [caches]."""
    types = model.type_k or DEFAULT_TYPE, model.type_v or DEFAULT_TYPE
    parallel = model.parallel or model.target_inflight or 1
    info = CacheInfo(model.n_ctx or DEFAULT_WINDOW, 1 if parallel == "auto" else parallel, *types)
    return CacheEntry(name, name, info, share_across_keys=model.share_across_keys)


# --- routes ---------------------------------------------------------------------------------------------------------


def compile_globs(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for all patterns. To ignore case, match it against lower-cased text."""
    return re.compile("|".join(translate(p) for p in patterns))


def glob_covers(wide: str, narrow: str) -> bool:
    """Whether `wide` certainly matches everything that `narrow` matches. False if undecided."""
    if wide in ("*", narrow):
        return True
    if set("?[") & set(wide) or "[" in narrow:
        return False
    # `*` is the only wildcard in `wide`. It treats the wildcards of `narrow` as ordinary characters: only a `*` can
    # match them, and it also matches whatever they match.
    return fnmatchcase(narrow, wide)


class Target(Struct, frozen=True):
    """Where a request goes. `allow_remote` is the route's consent; a key or a request may give it as well. `route` is
    the `match` of the route that led here, if one did."""

    model: str
    cache: str
    window: int
    strict: bool = False
    allow_remote: bool = False
    share_across_keys: bool = False
    route: tuple[str, ...] = ()
    mcp: tuple[str, ...] = ()  # servers whose tools the model is offered
    fallbacks: tuple[Target, ...] = ()  # tried in this order if this one cannot answer
    fallback_wait_s: float | None = None  # until the next one is tried


class Route(Struct, frozen=True):
    """A compiled rule. `endpoint` is None if it applies to every path."""

    match: re.Pattern[str]
    endpoint: re.Pattern[str] | None
    target: Target

    @classmethod
    def of(cls, match: Sequence[str], endpoint: str | None, target: Target) -> Route:
        names = compile_globs(pattern.lower() for pattern in match)
        return cls(names, compile_globs([endpoint]) if endpoint else None, target)

    def matches(self, model: str, endpoint: str) -> bool:
        return bool(self.match.match(model)) and (self.endpoint is None or bool(self.endpoint.match(endpoint)))


class Router:
    """Immutable apart from a cache of resolved names. A changed configuration needs a new Router."""

    def __init__(
        self,
        catalog: Catalog,
        routes: Sequence[Route] = (),
        default: Target | None = None,
        unnamed: Target | None = None,
    ) -> None:
        self.catalog = catalog
        self._routes = tuple(routes)
        self._default, self._unnamed = default, unnamed
        self._resolved: dict[tuple[str, str], Target] = {}

    def __repr__(self) -> str:
        return f"<Router [{len(self.catalog.models)} models, {len(self._routes)} routes]>"

    def resolve(self, model: str, endpoint: str) -> Target:
        target = self._resolved.get((model, endpoint))
        if target is not None:
            return target
        target = self._find(model, endpoint)
        if len(model) + len(endpoint) <= _MAX_NAME:
            if len(self._resolved) >= _MAX_RESOLVED:
                del self._resolved[next(iter(self._resolved))]
            self._resolved[(model, endpoint)] = target
        return target

    def names(self) -> tuple[str, ...]:
        return self.catalog.names()

    def _find(self, model: str, endpoint: str) -> Target:
        name = model.lower()
        for route in self._routes:
            if route.matches(name, endpoint):
                return route.target
        if (cache := self.catalog.find(model)) is not None:
            return target_of(cache)
        if self._default is not None:
            return self._default
        if model == DEFAULT_MODEL and self._unnamed is not None:
            return self._unnamed
        names = self.names()
        listed = ", ".join(names[:_MAX_LISTED]) or "none"
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        shown = model if len(model) <= _MAX_NAME else model[:_MAX_NAME] + "…"
        raise NotFound(
            f"The model {shown!r} does not exist here. Models: {listed}{more}.", code="model_not_found", param="model"
        )


def target_of(
    cache: CacheEntry, *, allow_remote: bool = False, route: Sequence[str] = (), mcp: Sequence[str] = ()
) -> Target:
    window, shared = cache.info.window, cache.share_across_keys
    return Target(cache.model, cache.name, window, cache.strict, allow_remote, shared, tuple(route), tuple(mcp))


def build_router(
    models: Mapping[str, ModelSettings],
    caches: Mapping[str, CacheSettings],
    routes: Sequence[RouteSettings] = (),
    default_model: str | None = None,
    decoding: DecodingSettings | None = None,
    unnamed_model: str | None = None,
) -> Router:
    """Raises InvalidRequest for unknown names; settings that passed the configuration's checks have none.
    `unnamed_model` answers requests that name none, as those of llama-server's clients, if there is no default."""
    catalog = build_catalog(models, caches, decoding or DecodingSettings())

    def find(
        model: str | None,
        cache: str | None,
        setting: str,
        *,
        allow_remote: bool = False,
        route: Sequence[str] = (),
        mcp: Sequence[str] = (),
    ) -> Target:
        name = cache if cache is not None else model or ""
        found = catalog.caches.get(name) if cache is not None else catalog.find(name)
        if found is None:
            kind = "cache" if cache is not None else "model"
            raise InvalidRequest(f"{setting}: there is no {kind} {name!r}", param=setting)
        return target_of(found, allow_remote=allow_remote, route=route, mcp=mcp)

    def route_target(number: int, route: RouteSettings) -> Target:
        setting = f"routes[{number}]"
        common: Any = {"allow_remote": route.allow_remote, "route": route.match, "mcp": route.mcp}
        first = find(route.model, route.cache, setting, **common)
        if not route.fallback:
            return first
        others = tuple(find(name, None, f"{setting}.fallback", **common) for name in route.fallback)
        return replace(first, fallbacks=others, fallback_wait_s=route.fallback_wait_s)

    default = find(default_model, None, "default_model") if default_model else None
    unnamed = target_of(cache) if unnamed_model and (cache := catalog.find(unnamed_model)) is not None else None
    rules = [Route.of(route.match, route.endpoint, route_target(number, route)) for number, route in enumerate(routes)]
    return Router(catalog, rules, default, unnamed)
