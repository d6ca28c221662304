"""Resolves the name that a client asks for to a model, a cache and a window.

The order, first hit wins:

    1. the routes, as configured: `match` on the asked name (case does not count) and `endpoint` on the path
    2. the id of a model, in its default cache
    3. an alias of a model, in its default cache
    4. the name of a cache
    5. the default model
    6. NotFound, which names what exists
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate

from msgspec import Struct

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.core.request import Sampling
from modelyard.router.catalog import CacheEntry, Catalog, ModelEntry
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

# Globs on names and paths: matching them, and telling when one leaves nothing for another.

_SPECIAL = frozenset("?[")


def compile_globs(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for all of them; match it against lower-cased text where case shall not count."""
    return re.compile("|".join(translate(p) for p in patterns))


def glob_covers(wide: str, narrow: str) -> bool:
    """Whether everything that `narrow` matches is certain to match `wide`. False where it is hard to tell."""
    if wide in ("*", narrow):
        return True
    if _SPECIAL & set(wide) or "[" in narrow:
        return False
    # With `*` as its only magic, `wide` may read the wildcards of `narrow` as ordinary letters: only its own `*` can
    # take them in, and that takes in whatever they stand for.
    return fnmatchcase(narrow, wide)


# Clients choose the names, so what is remembered of them must be bounded in number and in length.
_REMEMBERED = 1024
_LONGEST_REMEMBERED = 256
_LISTED = 20


class Target(Struct, frozen=True):
    """Where a request goes. `allow_remote` is the route's consent; a key or a request may give it as well."""

    model: str
    cache: str
    window: int
    strict: bool = False
    allow_remote: bool = False


class Route(Struct, frozen=True):
    """One rule, ready to match. `endpoint` is None where the rule holds on every path."""

    match: re.Pattern[str]
    endpoint: re.Pattern[str] | None
    target: Target

    @classmethod
    def of(cls, match: Sequence[str], endpoint: str | None, target: Target) -> Route:
        names = compile_globs(pattern.lower() for pattern in match)
        return cls(names, compile_globs([endpoint]) if endpoint else None, target)

    def fits(self, model: str, endpoint: str) -> bool:
        return bool(self.match.match(model)) and (self.endpoint is None or bool(self.endpoint.match(endpoint)))


class Router:
    """Pure: the same question always has the same answer. A changed configuration makes a new Router."""

    def __init__(self, catalog: Catalog, routes: Sequence[Route] = (), default: Target | None = None) -> None:
        self.catalog = catalog
        self._routes = tuple(routes)
        self._default = default
        self._remembered: dict[tuple[str, str], Target] = {}

    def __repr__(self) -> str:
        return f"<Router [{len(self.catalog.models)} models, {len(self._routes)} routes]>"

    def resolve(self, model: str, endpoint: str) -> Target:
        known = self._remembered.get((model, endpoint))
        if known is not None:
            return known
        target = self._decide(model, endpoint)
        self._remember(model, endpoint, target)
        return target

    def names(self) -> tuple[str, ...]:
        return self.catalog.names()

    def _decide(self, model: str, endpoint: str) -> Target:
        asked = model.lower()
        for route in self._routes:
            if route.fits(asked, endpoint):
                return route.target
        if (cache := self.catalog.find(model)) is not None:
            return target_of(cache)
        if self._default is not None:
            return self._default
        raise self._unknown(model)

    def _remember(self, model: str, endpoint: str, target: Target) -> None:
        if len(model) + len(endpoint) > _LONGEST_REMEMBERED:
            return
        if len(self._remembered) >= _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[(model, endpoint)] = target

    def _unknown(self, model: str) -> NotFound:
        names = self.names()
        listed = ", ".join(names[:_LISTED]) or "none"
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        asked = model if len(model) <= _LONGEST_REMEMBERED else model[:_LONGEST_REMEMBERED] + "…"
        return NotFound(
            f"The model {asked!r} does not exist here. Models: {listed}{more}.", code="model_not_found", param="model"
        )


def target_of(cache: CacheEntry, *, allow_remote: bool = False) -> Target:
    return Target(cache.model, cache.name, cache.info.window, cache.strict, allow_remote)


# Makes the router from its settings.

DEFAULT_WINDOW = 4096
DEFAULT_TYPE = "f16"
DEFAULT_SAMPLING = Sampling(temperature=0.7, top_p=0.9)


def build_router(
    models: Mapping[str, ModelSettings],
    caches: Mapping[str, CacheSettings],
    routes: Sequence[RouteSettings] = (),
    default_model: str | None = None,
    decoding: DecodingSettings | None = None,
) -> Router:
    """Settings that passed the configuration's checks always build; others raise InvalidRequest."""
    general = decoding or DecodingSettings()
    catalog = Catalog.of([_model(name, model, caches, general) for name, model in models.items()])
    default = _find_target(catalog, default_model, None, "default_model") if default_model else None
    return Router(catalog, [_route(catalog, number, route) for number, route in enumerate(routes)], default)


def _model(
    name: str, model: ModelSettings, caches: Mapping[str, CacheSettings], general: DecodingSettings
) -> ModelEntry:
    named = {key: _cache(key, cache, model) for key, cache in caches.items() if cache.model == name}
    own = named or _only_cache(name, model)
    decoding = model.decoding
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
        sampling=decoding.sampling().over(general.sampling().over(DEFAULT_SAMPLING)),
        sized=bool(named) or model.n_ctx is not None,
        chosen=decoding.sampling().over(general.sampling()),
        max_tokens=decoding.max_tokens or general.max_tokens,
        stop=tuple(decoding.stop or general.stop),
    )


def _cache(name: str, cache: CacheSettings, model: ModelSettings) -> CacheEntry:
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


def _only_cache(name: str, model: ModelSettings) -> dict[str, CacheEntry]:
    types = model.type_k or DEFAULT_TYPE, model.type_v or DEFAULT_TYPE
    places = model.parallel or model.target_inflight or 1
    info = CacheInfo(model.n_ctx or DEFAULT_WINDOW, places, *types)
    return {name: CacheEntry(name, name, info)}


def _route(catalog: Catalog, number: int, route: RouteSettings) -> Route:
    target = _find_target(catalog, route.model, route.cache, f"routes[{number}]", allow_remote=route.allow_remote)
    return Route.of(route.match, route.endpoint, target)


def _find_target(
    catalog: Catalog, model: str | None, cache: str | None, what: str, *, allow_remote: bool = False
) -> Target:
    name = cache if cache is not None else model or ""
    found = catalog.caches.get(name) if cache is not None else catalog.find(name)
    if found is None:
        raise InvalidRequest(f"{what}: there is no {'cache' if cache is not None else 'model'} {name!r}", param=what)
    return target_of(found, allow_remote=allow_remote)
