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
from collections.abc import Sequence

from msgspec import Struct

from modelyard.core.errors import NotFound
from modelyard.router.catalog import CacheEntry, Catalog
from modelyard.router.globs import compile_globs

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
