"""Makes the router from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard.router.catalog import CacheEntry, Catalog, ModelEntry
from modelyard.router.routes import Route, Router, Target, target_of
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

DEFAULT_WINDOW = 4096
DEFAULT_TYPE = "f16"
DEFAULT_SAMPLING = Sampling(temperature=0.7, top_p=0.9)


def build(
    models: Mapping[str, ModelSettings],
    caches: Mapping[str, CacheSettings],
    routes: Sequence[RouteSettings] = (),
    default_model: str | None = None,
    decoding: DecodingSettings | None = None,
) -> Router:
    """Settings that passed the configuration's checks always build; others raise InvalidRequest."""
    general = decoding or DecodingSettings()
    catalog = Catalog.of([_model(name, model, caches, general) for name, model in models.items()])
    default = _find(catalog, default_model, None, "default_model") if default_model else None
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
    target = _find(catalog, route.model, route.cache, f"routes[{number}]", allow_remote=route.allow_remote)
    return Route.of(route.match, route.endpoint, target)


def _find(catalog: Catalog, model: str | None, cache: str | None, what: str, *, allow_remote: bool = False) -> Target:
    name = cache if cache is not None else model or ""
    found = catalog.caches.get(name) if cache is not None else catalog.find(name)
    if found is None:
        raise InvalidRequest(f"{what}: there is no {'cache' if cache is not None else 'model'} {name!r}", param=what)
    return target_of(found, allow_remote=allow_remote)
