"""Every surface says the same about which model answers to a name, and what answers is that model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from modelyard.cli.config import route_rows
from modelyard.config.load import load_config
from tests.http.app_client import app_client, make_app

HEADERS = ("x-modelyard-model", "x-modelyard-route")


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"backend": "fake", "token_delay": 0, "script": [{"steps": [{"text": text}]}], **more}


CONFIG: dict[str, Any] = {
    "models": {"first": says("I am first"), "second": says("I am second", aliases=["zweites"])},
    "caches": {"main": {"model": "first", "n_ctx": 4096}, "fast": {"model": "first", "n_ctx": 1024}},
    "routes": [
        {"match": "*haiku*", "cache": "fast"},
        {"match": "gpt-4o", "model": "second"},
        {"match": "first", "endpoint": "/v1/messages*", "cache": "fast"},
        {"match": "*", "model": "first"},
    ],
}
ANSWERS = {
    "first": ("first", None),
    "FIRST:latest": ("first", None),
    "second": ("second", None),
    "zweites": ("second", None),
    "fast": ("first", None),
    "claude-haiku": ("first", "*haiku*"),
    "gpt-4o": ("second", "gpt-4o"),
    "claude-opus": ("first", "*"),
}


async def chat(client: httpx.AsyncClient, model: str, stream: bool = False) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "stream": stream}
    return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_that_was_named_answers_and_headers_name_the_rule_for_other_names(stream: bool) -> None:
    async with app_client(CONFIG, loaded=True) as client:
        for name, (model, route) in ANSWERS.items():
            reply = await chat(client, name, stream)
            assert (model in reply.text, reply.status_code) == (True, 200), name
            expected = (None, None) if route is None else (model, route)
            assert tuple(map(reply.headers.get, HEADERS)) == expected, name


async def test_cards_the_admin_api_and_the_lists_agree_with_the_answers() -> None:
    async with app_client(CONFIG, loaded=True, is_owner=True) as client:
        for name, (model, _) in ANSWERS.items():
            card = (await client.get(f"/v1/models/{name}")).json()
            route = (await client.get("/v1/admin/route", params={"model": name})).json()
            counted = await client.post("/tokenize", json={"model": name, "content": "x"})
            assert {card["root"], route["model"]} == {model}, name
            assert card.get("route") == counted.headers.get(HEADERS[1]), name
        listed = (await client.get("/v1/models")).json()["data"]
        assert {card["id"]: card["root"] for card in listed} == {
            "first": "first",
            "second": "second",
            "zweites": "second",
        }
        tags = (await client.get("/api/tags")).json()["models"]
        assert [each["model"].removesuffix(":latest") for each in tags] == ["first", "second", "zweites"]


async def test_the_rules_of_the_admin_api_are_those_of_check() -> None:
    shown = route_rows(load_config(env={}, overrides=CONFIG).config.router())
    async with app_client(CONFIG, is_owner=True) as client:
        rules = (await client.get("/v1/admin/routes")).json()["data"]
    assert [row[2:4] for row in shown] == [(rule["model"], rule["cache"]) for rule in rules]
    assert [(rule["kind"], rule["index"]) for rule in rules][:2] == [("route", 1), ("route", 2)]


async def test_the_endpoint_chooses_a_cache_of_the_model_that_was_named() -> None:
    router = make_app(CONFIG).gateway.lookup.router
    assert [router.resolve("first", path).cache for path in ("/v1/messages", "/v1/responses")] == ["fast", "main"]


async def test_a_header_can_carry_any_name() -> None:
    config = CONFIG | {"models": {"größe 1": says("I am größe")}, "caches": {}, "routes": []}
    async with app_client(config | {"default_model": "größe 1"}, loaded=True) as client:
        reply = await chat(client, "unknown")
        assert [reply.headers[name] for name in HEADERS] == ["gr%C3%B6%C3%9Fe 1", "default_model"]
