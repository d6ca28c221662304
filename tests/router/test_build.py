from __future__ import annotations

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard.router.routes import Target, build_router
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings


def test_a_model_without_caches_has_one_of_its_own_name() -> None:
    router = build_router({"a": ModelSettings(backend="toy"), "b": ModelSettings(n_ctx=64, parallel=3)}, {})
    assert router.catalog.models["a"].cache_infos == {"a": CacheInfo(4096, 1)}
    assert router.catalog.models["b"].cache_infos == {"b": CacheInfo(64, 3)}
    assert router.resolve("b", "/") == Target("b", "b", 64)
    assert [router.catalog.models[name].sized for name in ("a", "b")] == [False, True]


def test_a_model_without_caches_has_as_many_places_as_may_be_in_flight() -> None:
    models = {"a": ModelSettings(target_inflight=5), "b": ModelSettings(target_inflight=5, parallel=2)}
    catalog = build_router(models, {}).catalog
    assert [catalog.models[name].cache_infos[name].parallel for name in models] == [5, 2]


def test_the_first_cache_of_a_model_is_its_default() -> None:
    caches = {
        "other": CacheSettings(model="n", n_ctx=1),
        "slow": CacheSettings(model="m", n_ctx=2, overflow="strict", type_k="q8_0", description="d"),
        "fast": CacheSettings(model="m", n_ctx=3),
    }
    router = build_router({"m": ModelSettings(), "n": ModelSettings()}, caches, [RouteSettings(match=["x"], model="m")])
    assert router.resolve("x", "/") == router.resolve("m", "/") == Target("m", "slow", 2, strict=True)
    assert router.catalog.caches["slow"].info == CacheInfo(2, 1, "q8_0", "f16", "d")


def test_a_caches_own_settings_reach_the_engine_and_its_types_go_over_the_models() -> None:
    model = ModelSettings(type_k="q8_0", type_v="q8_0")
    own = CacheSettings(model="m", n_ctx=2, type_v="q4_0", n_batch=64, n_ubatch=32, n_threads=1, flash_attn=True)
    router = build_router({"m": model, "n": model}, {"own": own})
    assert router.catalog.caches["own"].info == CacheInfo(2, 1, "q8_0", "q4_0", "", 64, 32, 1, True)
    assert router.catalog.caches["n"].info == CacheInfo(4096, 1, "q8_0", "q8_0")


def test_a_route_names_a_cache_or_a_model_by_any_of_its_names() -> None:
    models = {"m": ModelSettings(aliases=["big"])}
    caches = {"one": CacheSettings(model="m", n_ctx=1), "two": CacheSettings(model="m", n_ctx=2)}
    routes = [RouteSettings(match=["a"], cache="two"), RouteSettings(match=["b"], model="big", allow_remote=True)]
    router = build_router(models, caches, routes, "big")
    assert router.resolve("a", "/") == Target("m", "two", 2)
    assert router.resolve("b", "/") == Target("m", "one", 1, allow_remote=True)
    assert router.resolve("unheard of", "/") == Target("m", "one", 1)


def test_sampling_defaults_are_laid_over_each_other() -> None:
    models = {"m": ModelSettings(decoding=DecodingSettings(top_k=5, stop=["END"])), "n": ModelSettings()}
    general = DecodingSettings(top_k=9, temperature=0.1, max_tokens=64)
    catalog = build_router(models, {}, decoding=general).catalog
    assert catalog.models["m"].sampling == Sampling(temperature=0.1, top_p=0.9, top_k=5)
    assert catalog.models["m"].chosen == Sampling(temperature=0.1, top_k=5)
    assert (catalog.models["m"].max_tokens, catalog.models["m"].stop) == (64, ("END",))
    assert build_router({"n": ModelSettings()}, {}).catalog.models["n"].sampling == Sampling(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("routes", "default", "message"),
    [
        ([RouteSettings(cache="x")], None, r"routes\[0\]: there is no cache 'x'"),
        ([RouteSettings(model="x")], None, r"routes\[0\]: there is no model 'x'"),
        ([], "x", "default_model: there is no model 'x'"),
    ],
)
def test_names_that_lead_nowhere_are_refused(routes: list[RouteSettings], default: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build_router({"m": ModelSettings()}, {}, routes, default)
