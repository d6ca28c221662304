"""Resolves a requested model name and path to a model, a cache and a window. Pure.

The first match wins:

    1. the configured routes: `match` on the requested name (ignoring case) and `endpoint` on the path
    2. the id of a model, in its default cache
    3. an alias of a model, in its default cache
    4. the name of a cache
    5. the default model
    6. NotFound, with the names that exist
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.router.catalog import CacheEntry, Catalog, build_catalog
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

# Clients choose the names: bound the cache of resolved ones in number and length.
_MAX_RESOLVED = 1024
_MAX_NAME = 256
_MAX_LISTED = 20


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
    """Where a request goes. `allow_remote` is the route's consent; a key or a request may give it as well."""

    model: str
    cache: str
    window: int
    strict: bool = False
    allow_remote: bool = False


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

    def __init__(self, catalog: Catalog, routes: Sequence[Route] = (), default: Target | None = None) -> None:
        self.catalog = catalog
        self._routes = tuple(routes)
        self._default = default
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
        names = self.names()
        listed = ", ".join(names[:_MAX_LISTED]) or "none"
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        shown = model if len(model) <= _MAX_NAME else model[:_MAX_NAME] + "…"
        raise NotFound(
            f"The model {shown!r} does not exist here. Models: {listed}{more}.", code="model_not_found", param="model"
        )


def target_of(cache: CacheEntry, *, allow_remote: bool = False) -> Target:
    return Target(cache.model, cache.name, cache.info.window, cache.strict, allow_remote)


def build_router(
    models: Mapping[str, ModelSettings],
    caches: Mapping[str, CacheSettings],
    routes: Sequence[RouteSettings] = (),
    default_model: str | None = None,
    decoding: DecodingSettings | None = None,
) -> Router:
    """Raises InvalidRequest for unknown names; settings that passed the configuration's checks have none."""
    catalog = build_catalog(models, caches, decoding or DecodingSettings())

    def find(model: str | None, cache: str | None, setting: str, *, allow_remote: bool = False) -> Target:
        name = cache if cache is not None else model or ""
        found = catalog.caches.get(name) if cache is not None else catalog.find(name)
        if found is None:
            kind = "cache" if cache is not None else "model"
            raise InvalidRequest(f"{setting}: there is no {kind} {name!r}", param=setting)
        return target_of(found, allow_remote=allow_remote)

    default = find(default_model, None, "default_model") if default_model else None
    rules = [
        Route.of(
            route.match,
            route.endpoint,
            find(route.model, route.cache, f"routes[{number}]", allow_remote=route.allow_remote),
        )
        for number, route in enumerate(routes)
    ]
    return Router(catalog, rules, default)
