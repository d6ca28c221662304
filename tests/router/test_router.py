from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.core.request import Sampling
from modelyard.router.router import (
    CacheEntry,
    Catalog,
    ModelEntry,
    Route,
    Router,
    Target,
    build_router,
    compile_globs,
    glob_covers,
    target_of,
    with_default_sampling,
)
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings, RouteSettings

GLOBS = st.text(alphabet="ab*?[]!", max_size=6)
TEXTS = st.text(alphabet="ab[]!", max_size=6)


def test_several_globs_are_compiled_into_one() -> None:
    globs = compile_globs(["*haiku*", "gpt-?"])
    assert [bool(globs.match(name)) for name in ("claude-haiku-4", "gpt-5", "gpt-55", "", "x\nhaiku")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_glob_covers_compares_wildcards() -> None:
    assert glob_covers("*", "anything*")
    assert glob_covers("*haiku*", "claude-*-haiku*")
    assert glob_covers("claude-*", "claude-?")
    assert not glob_covers("claude-*", "*claude-x")
    assert not glob_covers("?", "*")
    assert not glob_covers("*haiku*", "[haiku]x")


@given(GLOBS, GLOBS, TEXTS)
@settings(deadline=None, max_examples=200)
def test_a_covered_glob_matches_nothing_that_the_covering_one_does_not(wide: str, narrow: str, text: str) -> None:
    if glob_covers(wide, narrow) and compile_globs([narrow]).match(text):
        assert compile_globs([wide]).match(text)


MESSAGES = "/v1/messages"


def model(name: str, *caches: tuple[str, int], aliases: tuple[str, ...] = ()) -> ModelEntry:
    entries = {cache: CacheEntry(cache, name, CacheInfo(window)) for cache, window in caches}
    return ModelEntry(name=name, settings=ModelSettings(backend="toy", aliases=list(aliases)), caches=entries)


CATALOG = Catalog.of(
    [model("Big", ("main", 100), ("fast", 50), aliases=("opus", "fast-one")), model("small", ("small", 10))]
)


def route(
    match: str, cache: str, endpoint: str | None = None, *, allow_remote: bool = False, override: bool = False
) -> Route:
    target = target_of(CATALOG.caches[cache], "route", route=(match,), allow_remote=allow_remote)
    return Route.of([match], endpoint, target, override=override)


def test_the_first_matching_route_wins() -> None:
    router = Router(CATALOG, [route("*haiku*", "fast"), route("*", "main")])
    assert router.resolve("claude-3-5-haiku", MESSAGES) == Target("Big", "fast", 50, route=("*haiku*",), why="route")
    assert router.resolve("claude-sonnet-4", MESSAGES) == Target("Big", "main", 100, route=("*",), why="route")


def test_routes_ignore_the_case_of_the_requested_name() -> None:
    router = Router(CATALOG, [route("*Haiku*", "fast")])
    assert router.resolve("CLAUDE-HAIKU", MESSAGES).cache == "fast"


def test_a_route_can_be_limited_to_endpoints() -> None:
    router = Router(CATALOG, [route("*", "fast", "/v1/messages*"), route("*", "main")])
    assert router.resolve("x", "/v1/messages").cache == "fast"
    assert router.resolve("x", "/v1/messages/count_tokens").cache == "fast"
    assert router.resolve("x", "/v1/chat/completions").cache == "main"


NAMES = ("Big", "big:latest", "opus", "OPUS", "fast-one", "main", "fast", "small", "Small:latest")


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_leaves_the_names_of_other_models_alone(name: str) -> None:
    named = Router(CATALOG).resolve(name, MESSAGES)
    for cache in ("main", "small"):
        router = Router(CATALOG, [route("*", cache)])
        assert router.resolve(name, MESSAGES).model == named.model
        assert router.resolve("unknown", MESSAGES).cache == cache


def test_a_pattern_takes_the_names_of_other_models_only_if_the_route_says_so() -> None:
    router = Router(CATALOG, [route("*", "small", override=True)])
    assert {router.resolve(name, MESSAGES).model for name in NAMES} == {"small"}


@pytest.mark.parametrize("name", ["Big", "opus", "big:latest"])
def test_a_pattern_chooses_among_the_caches_of_the_model_that_was_named(name: str) -> None:
    router = Router(CATALOG, [route("*", "small"), route("*", "fast", "/v1/messages*")])
    assert router.resolve(name, MESSAGES).cache == "fast"
    assert router.resolve(name, "/v1/chat/completions").cache == "main"


def test_a_pattern_leaves_the_name_of_a_cache_alone() -> None:
    router = Router(CATALOG, [route("*", "main")])
    assert (router.resolve("fast", MESSAGES).cache, router.resolve("fast", MESSAGES).why) == ("fast", "cache")
    assert router.resolve("main", MESSAGES).route == ("*",)


def test_a_route_without_wildcards_comes_before_patterns_and_names() -> None:
    router = Router(CATALOG, [route("*", "main", override=True), route("claude", "fast"), route("OPUS", "small")])
    assert router.resolve("Claude:latest", MESSAGES).cache == "fast"
    assert router.resolve("opus", MESSAGES).model == "small"


@pytest.mark.parametrize(
    ("name", "cache", "why"),
    [("Big", "main", "id"), ("opus", "main", "alias"), ("fast", "fast", "cache"), ("small", "small", "id")],
)
def test_ids_aliases_and_caches_resolve_without_a_route(name: str, cache: str, why: str) -> None:
    target = Router(CATALOG).resolve(name, MESSAGES)
    assert (target.cache, target.why, target.rule) == (cache, why, "")


ROUTES = st.builds(
    route,
    st.sampled_from(["*", "*a*", "b*", "big", "fast", "opus", "[a-s]*", "?mall", "x"]),
    st.sampled_from(["main", "fast", "small"]),
    st.sampled_from([None, "/v1/messages*", "/v1/*"]),
)


@given(st.lists(ROUTES, max_size=5), st.sampled_from(NAMES), st.sampled_from([MESSAGES, "/v1/chat/completions", ""]))
@settings(deadline=None, max_examples=300)
def test_no_pattern_makes_another_model_answer_to_a_known_name(routes: list[Route], name: str, path: str) -> None:
    target, named = Router(CATALOG, routes).resolve(name, path), Router(CATALOG).resolve(name, path)
    is_exact = any(each.names(name.lower()) for each in routes)
    assert is_exact or target.model == named.model


def test_the_rules_are_listed_in_the_order_in_which_they_apply() -> None:
    router = Router(
        CATALOG, [route("*", "fast"), route("opus", "small")], target_of(CATALOG.caches["small"], "default")
    )
    rows = [(rule.kind, rule.route.match, rule.route.target.cache, rule.number) for rule in router.rules()]
    assert rows == [
        ("route", ("opus",), "small", 1),
        ("id", ("big",), "fast", None),
        ("alias", ("fast-one",), "fast", None),
        ("id", ("small",), "small", None),
        ("route", ("*",), "fast", 0),
        ("default", ("*",), "small", None),
    ]


def test_unknown_names_go_to_the_default_model() -> None:
    router = Router(CATALOG, default=Target("small", "small", 10))
    assert router.resolve("whatever", MESSAGES).model == "small"
    assert router.resolve("opus", MESSAGES).model == "Big"


def test_an_unknown_model_is_an_error_that_lists_the_models() -> None:
    with pytest.raises(NotFound) as error:
        Router(CATALOG).resolve("gpt-9", MESSAGES)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert error.value.message == "The model 'gpt-9' does not exist here. Models: Big, opus, fast-one, small."


def test_long_names_and_lists_are_shortened_in_the_message() -> None:
    many = Catalog.of([model(f"m{number}", (f"c{number}", 1)) for number in range(50)])
    with pytest.raises(NotFound) as error:
        Router(many).resolve("x" * 1_000_000, MESSAGES)
    assert error.value.message.endswith("and 30 more.")
    assert len(error.value.message) < 1000


def test_only_a_route_allows_remote_models() -> None:
    router = Router(CATALOG, [route("out", "main", allow_remote=True)])
    assert router.resolve("out", MESSAGES).allow_remote
    assert not router.resolve("Big", MESSAGES).allow_remote


def test_the_cache_of_resolved_names_is_bounded() -> None:
    router = Router(CATALOG, [route("*", "main")])
    for number in range(3000):
        router.resolve(f"name-{number}", MESSAGES)
    router.resolve("x" * 1000, MESSAGES)
    assert len(router._resolved) <= 1024
    assert ("x" * 1000, MESSAGES) not in router._resolved


@given(st.lists(st.text(max_size=8), max_size=20))
@settings(deadline=None, max_examples=50)
def test_cached_and_new_resolutions_are_equal(names: list[str]) -> None:
    routes = [route("*a*", "fast"), route("*", "main", "/v1/*")]
    used = Router(CATALOG, routes)
    for name in [*names, *names]:
        assert used.resolve(name, MESSAGES) == Router(CATALOG, routes).resolve(name, MESSAGES)


def test_public_names_are_ids_and_aliases_without_caches() -> None:
    router = Router(CATALOG)
    assert router.names() == ("Big", "opus", "fast-one", "small")
    assert repr(router) == "<Router [2 models, 0 routes]>"


def test_a_model_without_caches_gets_one_with_its_name() -> None:
    router = build_router({"a": ModelSettings(backend="toy"), "b": ModelSettings(n_ctx=64, parallel=3)}, {})
    assert router.catalog.models["a"].cache_infos == {"a": CacheInfo(4096, 1)}
    assert router.catalog.models["b"].cache_infos == {"b": CacheInfo(64, 3)}
    assert router.resolve("b", "/") == Target("b", "b", 64)
    assert [router.catalog.models[name].has_window for name in ("a", "b")] == [False, True]


def test_target_inflight_sets_the_parallelism_of_a_model_without_caches() -> None:
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
    assert router.resolve("m", "/") == Target("m", "slow", 2, strict=True)
    assert router.resolve("x", "/") == Target("m", "slow", 2, strict=True, route=("x",), why="route")
    assert router.catalog.caches["slow"].info == CacheInfo(2, 1, "q8_0", "f16", "d")


def test_cache_settings_reach_the_engine_and_override_the_types_of_the_model() -> None:
    model = ModelSettings(type_k="q8_0", type_v="q8_0")
    own = CacheSettings(model="m", n_ctx=2, type_v="q4_0", n_batch=64, n_ubatch=32, n_threads=1, flash_attn=True)
    router = build_router({"m": model, "n": model}, {"own": own})
    assert router.catalog.caches["own"].info == CacheInfo(2, 1, "q8_0", "q4_0", "", 64, 32, 1, True)
    assert router.catalog.caches["n"].info == CacheInfo(4096, 1, "q8_0", "q8_0")


def test_a_route_refers_to_a_cache_or_to_any_name_of_a_model() -> None:
    models = {"m": ModelSettings(aliases=["big"])}
    caches = {"one": CacheSettings(model="m", n_ctx=1), "two": CacheSettings(model="m", n_ctx=2)}
    routes = [RouteSettings(match=["a"], cache="two"), RouteSettings(match=["b"], model="big", allow_remote=True)]
    router = build_router(models, caches, routes, "big")
    assert router.resolve("a", "/") == Target("m", "two", 2, route=("a",), why="route")
    assert router.resolve("b", "/") == Target("m", "one", 1, allow_remote=True, route=("b",), why="route")
    assert router.resolve("unheard of", "/") == Target("m", "one", 1, why="default")


def test_a_request_that_names_no_model_is_answered_by_the_one_for_it() -> None:
    models = {"m": ModelSettings(), "n": ModelSettings(n_ctx=9)}
    router = build_router(models, {}, unnamed_model="n")
    assert router.resolve("default", "/completion") == Target("n", "n", 9, why="unnamed")
    with pytest.raises(NotFound):
        router.resolve("unheard of", "/")
    assert build_router(models, {}, default_model="m", unnamed_model="n").resolve("default", "/").model == "m"


def test_sampling_defaults_are_layered() -> None:
    models = {"m": ModelSettings(decoding=DecodingSettings(top_k=5, stop=["END"])), "n": ModelSettings()}
    general = DecodingSettings(top_k=9, temperature=0.1, max_tokens=64)
    catalog = build_router(models, {}, decoding=general).catalog
    assert catalog.models["m"].sampling == Sampling(temperature=0.1, top_k=5)
    assert (catalog.models["m"].max_tokens, catalog.models["m"].stop) == (64, ("END",))
    assert with_default_sampling(Sampling()) == Sampling(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("routes", "default", "message"),
    [
        ([RouteSettings(cache="x")], None, r"routes\[0\]: there is no cache 'x'"),
        ([RouteSettings(model="x")], None, r"routes\[0\]: there is no model 'x'"),
        ([], "x", "default_model: there is no model 'x'"),
    ],
)
def test_unknown_names_in_routes_are_refused(routes: list[RouteSettings], default: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build_router({"m": ModelSettings()}, {}, routes, default)


@pytest.mark.parametrize(
    ("model", "cache", "shared"), [(False, None, False), (True, None, True), (True, False, False), (False, True, True)]
)
def test_a_cache_is_shared_between_keys_by_its_own_setting_or_the_models(
    model: bool, cache: bool | None, shared: bool
) -> None:
    models = {"m": ModelSettings(backend="fake", share_across_keys=model)}
    caches = {"c": CacheSettings(model="m", n_ctx=1, share_across_keys=cache)}
    assert build_router(models, caches).resolve("c", "/").share_across_keys is shared
    assert build_router(models, {}).resolve("m", "/").share_across_keys is model


def test_a_route_with_several_models_keeps_their_order_and_its_own_settings() -> None:
    models = {"a": ModelSettings(), "b": ModelSettings(aliases=["bee"]), "c": ModelSettings()}
    caches = {"one": CacheSettings(model="c", n_ctx=1), "two": CacheSettings(model="c", n_ctx=2)}
    route = RouteSettings(
        match=["x"], model="a", fallback=["bee", "two"], fallback_wait_s=5, allow_remote=True, mcp=["tools"]
    )
    target = build_router(models, caches, [route]).resolve("x", "/")
    assert [each.cache for each in (target, *target.fallbacks)] == ["a", "b", "two"]
    assert target.fallback_wait_s == 5
    for each in target.fallbacks:
        assert (each.allow_remote, each.route, each.mcp, each.fallbacks) == (True, ("x",), ("tools",), ())


def test_a_route_may_name_its_one_fallback_as_text() -> None:
    assert RouteSettings.model_validate({"model": "a", "fallback": "b"}).fallback == ["b"]


def test_an_unknown_fallback_is_refused_with_its_route() -> None:
    with pytest.raises(InvalidRequest, match=r"routes\[0\]\.fallback"):
        build_router({"a": ModelSettings()}, {}, [RouteSettings(model="a", fallback=["z"])])
