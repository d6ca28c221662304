from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import NotFound
from modelyard.router.catalog import CacheEntry, Catalog, ModelEntry
from modelyard.router.routes import Route, Router, Target, target_of

MESSAGES = "/v1/messages"


def model(name: str, *caches: tuple[str, int], aliases: tuple[str, ...] = ()) -> ModelEntry:
    entries = {cache: CacheEntry(cache, name, CacheInfo(window)) for cache, window in caches}
    return ModelEntry(name=name, backend="toy", aliases=aliases, caches=entries, default_cache=caches[0][0])


CATALOG = Catalog.of(
    [model("Big", ("main", 100), ("fast", 50), aliases=("opus", "fast-one")), model("small", ("small", 10))]
)


def route(match: str, cache: str, endpoint: str | None = None, *, allow_remote: bool = False) -> Route:
    return Route.of([match], endpoint, target_of(CATALOG.caches[cache], allow_remote=allow_remote))


def test_the_first_fitting_route_wins() -> None:
    router = Router(CATALOG, [route("*haiku*", "fast"), route("*", "main")])
    assert router.resolve("claude-3-5-haiku", MESSAGES) == Target("Big", "fast", 50)
    assert router.resolve("claude-sonnet-4", MESSAGES) == Target("Big", "main", 100)


def test_case_of_the_asked_name_does_not_count_for_routes() -> None:
    router = Router(CATALOG, [route("*Haiku*", "fast")])
    assert router.resolve("CLAUDE-HAIKU", MESSAGES).cache == "fast"


def test_a_route_may_hold_for_some_endpoints_only() -> None:
    router = Router(CATALOG, [route("*", "fast", "/v1/messages*"), route("*", "main")])
    assert router.resolve("x", "/v1/messages").cache == "fast"
    assert router.resolve("x", "/v1/messages/count_tokens").cache == "fast"
    assert router.resolve("x", "/v1/chat/completions").cache == "main"


def test_routes_go_before_ids_and_aliases() -> None:
    router = Router(CATALOG, [route("*", "small")])
    assert router.resolve("Big", MESSAGES).model == router.resolve("opus", MESSAGES).model == "small"


@pytest.mark.parametrize(("name", "cache"), [("Big", "main"), ("opus", "main"), ("fast", "fast"), ("small", "small")])
def test_without_a_route_ids_aliases_and_caches_are_names(name: str, cache: str) -> None:
    assert Router(CATALOG).resolve(name, MESSAGES).cache == cache


def test_the_default_takes_what_nobody_knows() -> None:
    router = Router(CATALOG, default=Target("small", "small", 10))
    assert router.resolve("whatever", MESSAGES).model == "small"
    assert router.resolve("opus", MESSAGES).model == "Big"


def test_an_unknown_model_is_told_what_exists() -> None:
    with pytest.raises(NotFound) as error:
        Router(CATALOG).resolve("gpt-9", MESSAGES)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert error.value.message == "The model 'gpt-9' does not exist here. Models: Big, opus, fast-one, small."


def test_a_long_name_and_a_long_list_stay_short_in_the_message() -> None:
    many = Catalog.of([model(f"m{number}", (f"c{number}", 1)) for number in range(50)])
    with pytest.raises(NotFound) as error:
        Router(many).resolve("x" * 1_000_000, MESSAGES)
    assert error.value.message.endswith("and 30 more.")
    assert len(error.value.message) < 1000


def test_consent_to_remote_comes_with_the_route_only() -> None:
    router = Router(CATALOG, [route("out", "main", allow_remote=True)])
    assert router.resolve("out", MESSAGES).allow_remote
    assert not router.resolve("Big", MESSAGES).allow_remote


def test_what_is_remembered_is_bounded() -> None:
    router = Router(CATALOG, [route("*", "main")])
    for number in range(3000):
        router.resolve(f"name-{number}", MESSAGES)
    router.resolve("x" * 1000, MESSAGES)
    assert len(router._remembered) <= 1024
    assert ("x" * 1000, MESSAGES) not in router._remembered


@given(st.lists(st.text(max_size=8), max_size=20))
@settings(deadline=None, max_examples=50)
def test_memory_never_changes_an_answer(names: list[str]) -> None:
    routes = [route("*a*", "fast"), route("*", "main", "/v1/*")]
    used = Router(CATALOG, routes)
    for name in [*names, *names]:
        assert used.resolve(name, MESSAGES) == Router(CATALOG, routes).resolve(name, MESSAGES)


def test_public_names_are_ids_and_aliases_but_no_caches() -> None:
    router = Router(CATALOG)
    assert router.names() == ("Big", "opus", "fast-one", "small")
    assert repr(router) == "<Router [2 models, 0 routes]>"
