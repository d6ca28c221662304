"""The router: which model and which of its caches answer to a name, and why. Pure; nothing else decides it.

The first match wins. Names and patterns ignore case and the tag `:latest`, which Ollama's clients append; `endpoint`,
if a route has one, must match the path as well.

    1. a route that has exactly this name in `match`
    2. a pattern of a route. For the id or alias of a model it only chooses among that model's caches, and the name of a
       cache it leaves alone, unless the route has `override`
    3. the id or an alias of a model, in its default cache
    4. the name of a cache
    5. the default model
    6. NotFound, with the names that exist; InvalidRequest if the request names none

So a name that is listed is never answered by another model, unless a route says so. The catalog holds all models with
their names, caches and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.core.request import DEFAULT_MODEL, Sampling
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

# Clients choose the names: bound the cache of resolved ones in number and length.
_MAX_RESOLVED = 1024
_MAX_NAME = 256
_MAX_LISTED = 20
DEFAULT_WINDOW = 4096
LATEST = ":latest"
Reason = Literal["id", "alias", "cache", "route", "default", "unnamed"]  # why a model answers to a name
DEFAULT_TYPE = "f16"
DEFAULT_REPEATED_TOKENS = 512
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
    max_repeated_tokens: int = DEFAULT_REPEATED_TOKENS  # 0: no limit
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
        return found[0] if (found := self.look_up(name)) is not None else None

    def look_up(self, name: str) -> tuple[CacheEntry, Reason] | None:
        """As `find`, with what the name is."""
        if name not in self.models and name not in self.aliases:
            if (cache := self.caches.get(name)) is not None:
                return cache, "cache"
            folded = name.lower()
            name = self.folded.get(folded) or self.folded.get(folded.removesuffix(LATEST), "")
        reason: Reason = "id" if name in self.models else "alias"
        model = self.models.get(self.aliases.get(name, name))
        return (model.default_cache, reason) if model is not None else None

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
        max_repeated_tokens=_repeated_tokens(model.decoding, general),
        stop=tuple(model.decoding.stop or general.stop),
        has_window=bool(configured) or model.n_ctx is not None,
    )


def _repeated_tokens(own: DecodingSettings, general: DecodingSettings) -> int:
    given = (each.max_repeated_tokens for each in (own, general))
    return next((value for value in given if value is not None), DEFAULT_REPEATED_TOKENS)


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
        cache.kv_unified,
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
    """Where a request goes, and `why`. `allow_remote` is the route's consent; a key or a request may give it as well.
    `route` is the `match` of the route that led here, if one did."""

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
    auto_compact: bool = False  # the oldest turns are summarised where the conversation does not fit
    why: Reason = "id"

    @property
    def rule(self) -> str:
        """The rule that chose this model for a name that is not its own; empty if the client named it."""
        return " | ".join(self.route) if self.why == "route" else "default_model" if self.why == "default" else ""


def is_pattern(text: str) -> bool:
    return not set("*?[").isdisjoint(text)


class Route(Struct, frozen=True):
    """A compiled rule. `match` are its globs in lower case; those without wildcards are also in `exact`, the others in
    `pattern`. `paths` is None if it applies to every path."""

    match: tuple[str, ...]
    endpoint: str | None
    target: Target
    override: bool
    exact: frozenset[str]
    pattern: re.Pattern[str] | None
    paths: re.Pattern[str] | None

    @classmethod
    def of(cls, match: Sequence[str], endpoint: str | None, target: Target, *, override: bool = False) -> Route:
        names = tuple(name.lower() for name in match)
        exact, patterns = frozenset(n for n in names if not is_pattern(n)), [n for n in names if is_pattern(n)]
        pattern, paths = compile_globs(patterns) if patterns else None, compile_globs([endpoint]) if endpoint else None
        return cls(names, endpoint, target, override, exact, pattern, paths)

    def names(self, name: str) -> bool:
        return name in self.exact or name.removesuffix(LATEST) in self.exact

    def matches(self, name: str) -> bool:
        return self.pattern is not None and bool(self.pattern.match(name))

    def replaces(self, target: Target) -> bool:
        """Whether its patterns apply to a name that is already of this target: they may choose another cache of a model
        that was named, but not of a cache that was named."""
        own = self.target
        return self.override or (own.model == target.model and (target.why != "cache" or own.cache == target.cache))


class Router:
    """Immutable apart from a cache of resolved names. A changed configuration needs a new Router."""

    def __init__(
        self,
        catalog: Catalog,
        routes: Sequence[Route] = (),
        default: Target | None = None,
        unnamed: Target | None = None,
    ) -> None:
        self.catalog, self.routes = catalog, tuple(routes)
        self.default, self._unnamed = default, unnamed
        self._resolved: dict[tuple[str, str], Target] = {}

    def __repr__(self) -> str:
        return f"<Router [{len(self.catalog.models)} models, {len(self.routes)} routes]>"

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
        name, known = model.lower(), self.catalog.look_up(model)
        own = None if known is None else target_of(*known)
        routes = [route for route in self.routes if route.paths is None or route.paths.match(endpoint)]
        exact = (route for route in routes if route.names(name))
        patterns = (route for route in routes if route.matches(name) and (own is None or route.replaces(own)))
        if (route := next(exact, None) or next(patterns, None)) is not None:
            if own is not None and own.model == route.target.model:
                return replace(route.target, why=own.why)  # only its cache is the route's choice
            return route.target
        if own is not None:
            return own
        if self.default is not None:
            return self.default
        if model == DEFAULT_MODEL and self._unnamed is not None:
            return self._unnamed
        names = self.names()
        listed = ", ".join(names[:_MAX_LISTED]) or "none"
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        shown = model if len(model) <= _MAX_NAME else model[:_MAX_NAME] + "…"
        if model == DEFAULT_MODEL:
            raise InvalidRequest(
                f"model is required: send the name of one. Models: {listed}{more}.",
                code="missing_required_parameter",
                param="model",
            )
        raise NotFound(
            f"The model {shown!r} does not exist here. Models: {listed}{more}.", code="model_not_found", param="model"
        )

    # --- the rules, for people ----------------------------------------------------------------------------------------

    def rules(self) -> Iterator[Rule]:
        """What decides where a name leads, in this order: exact routes, names of models, patterns, the default."""
        routes = [(bool(route.exact), Rule("route", route, number)) for number, route in enumerate(self.routes)]
        yield from (rule for is_exact, rule in routes if is_exact)
        for name in self.names():
            target, own = self.resolve(name, ""), self.catalog.look_up(name)
            if own is not None and own[0].model == target.model:
                yield Rule(own[1], Route.of([name], None, target))
        yield from (rule for is_exact, rule in routes if not is_exact)
        if self.default is not None:
            yield Rule("default", Route.of(["*"], None, self.default))

    def shadowed(self, number: int) -> Iterator[tuple[str, CacheEntry, bool]]:
        """The names of other models that a route matches, with what they name, and whether the route takes them."""
        route = self.routes[number]
        for name in dict.fromkeys((*self.names(), *self.catalog.caches)):
            found, folded = self.catalog.look_up(name), name.lower()
            if found is None or found[0].model == route.target.model:
                continue
            if route.names(folded) or route.matches(folded):
                yield name, found[0], route.names(folded) or route.override


class Rule(Struct, frozen=True):
    """One line of what decides where names lead. `number` is the route's place in the configuration."""

    kind: Reason
    route: Route
    number: int | None = None


def target_of(cache: CacheEntry, why: Reason, **more: Any) -> Target:
    shared = cache.share_across_keys
    return Target(cache.model, cache.name, cache.info.window, cache.strict, share_across_keys=shared, why=why, **more)


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

    def find(model: str | None, cache: str | None, setting: str, why: Reason, **more: Any) -> Target:
        name = cache if cache is not None else model or ""
        found = catalog.caches.get(name) if cache is not None else catalog.find(name)
        if found is None:
            kind = "cache" if cache is not None else "model"
            raise InvalidRequest(f"{setting}: there is no {kind} {name!r}", param=setting)
        return target_of(found, why, **more)

    def compiled(number: int, route: RouteSettings) -> Route:
        setting = f"routes[{number}]"
        common = {"allow_remote": route.allow_remote, "route": tuple(route.match), "mcp": tuple(route.mcp)}
        common["auto_compact"] = route.auto_compact
        target = find(route.model, route.cache, setting, "route", **common)
        if route.fallback:
            others = tuple(find(name, None, f"{setting}.fallback", "route", **common) for name in route.fallback)
            target = replace(target, fallbacks=others, fallback_wait_s=route.fallback_wait_s)
        return Route.of(route.match, route.endpoint, target, override=route.override)

    default = find(default_model, None, "default_model", "default") if default_model else None
    unnamed = find(unnamed_model, None, "unnamed_model", "unnamed") if unnamed_model else None
    return Router(catalog, [compiled(number, route) for number, route in enumerate(routes)], default, unnamed)
