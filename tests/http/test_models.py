"""The list of models in both formats, and a card for every name that a request can use."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.http.app_client import URL, app_client, make_app
from tests.live_server import demo_config

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def config() -> dict[str, Any]:
    made = demo_config()
    made["models"] = {
        "org/big-model": made["models"]["demo"] | {"aliases": ["big", "claude-x"]},
        "small": made["models"]["demo"] | {"n_ctx": 512},
    }
    made["caches"] = {"main": {"model": "org/big-model", "n_ctx": 4096, "parallel": 4}}
    made["routes"] = [{"match": "gpt-*", "cache": "main"}, {"match": "*haiku*", "model": "small"}]
    return made


async def test_the_openai_list_has_ids_aliases_windows_and_states() -> None:
    async with app_client(config(), loaded=True) as client:
        body = (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["org/big-model", "big", "claude-x", "small"]
        assert {card["object"] for card in body["data"]} == {"model"}
        assert [card["context_length"] for card in body["data"]] == [4096, 4096, 4096, 512]
        assert all(card["owned_by"] and card["created"] for card in body["data"])
        assert all({"completion", "tools"} <= set(card["capabilities"]) for card in body["data"])


async def test_the_version_header_selects_the_anthropic_format() -> None:
    async with app_client(config(), loaded=True) as client:
        body = (await client.get("/v1/models", headers=ANTHROPIC)).json()
        assert [card["id"] for card in body["data"]] == ["org/big-model", "big", "claude-x", "small"]
        assert {card["type"] for card in body["data"]} == {"model"}
        assert (body["first_id"], body["last_id"], body["has_more"]) == ("org/big-model", "small", False)


async def test_the_anthropic_list_is_paginated() -> None:
    async with app_client(config(), loaded=True) as client:
        first = (await client.get("/v1/models?limit=3", headers=ANTHROPIC)).json()
        assert ([card["id"] for card in first["data"]], first["has_more"]) == (
            ["org/big-model", "big", "claude-x"],
            True,
        )
        rest = (await client.get(f"/v1/models?limit=3&after_id={first['last_id']}", headers=ANTHROPIC)).json()
        assert ([card["id"] for card in rest["data"]], rest["has_more"]) == (["small"], False)


@pytest.mark.parametrize("limit", ["0", "-1", "abc", "1.5", "", "²", "9" * 5000])
async def test_an_invalid_limit_is_refused(limit: str) -> None:
    async with app_client(config()) as client:
        reply = await client.get("/v1/models", params={"limit": limit}, headers=ANTHROPIC)
        assert reply.status_code == 400
        body = reply.json()["error"]
        assert (body["type"], body["param"]) == ("invalid_request_error", "limit")
        assert len(body["message"]) < 200


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "/models/"])
async def test_other_spellings_of_the_path_are_the_same_list(path: str) -> None:
    async with app_client(config()) as client:
        assert (await client.get(path)).json() == (await client.get("/v1/models")).json()


async def test_the_list_can_be_limited_to_loaded_models() -> None:
    async with app_client(config()) as client:
        assert (await client.get("/v1/models?loaded=true")).json()["data"] == []
    async with app_client(config(), loaded=True) as client:
        assert len((await client.get("/v1/models?loaded=true")).json()["data"]) == 4


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_only_what_can_answer_is_listed(headers: dict[str, str]) -> None:
    demo = demo_config()["models"]["demo"] | {"enabled": False}
    absent = {"backend": "llama_cpp", "path": "/nowhere/m.gguf"}
    models = {
        "by-hand": demo | {"aliases": ["hand"]},
        "on-request": demo | {"autoload": True, "aliases": ["soon"]},
        "absent": absent | {"autoload": True, "enabled": False},
        "failed": absent,
        "ready": demo,
        "draining": demo,
    }
    app = make_app({"models": models})
    for name in ("failed", "ready", "draining"):
        await asyncio.wait([app.scheduler.load(name)], timeout=60)
    app.scheduler.drain("draining")
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["on-request", "soon", "ready"]
        assert (await client.get("/v1/models/by-hand")).status_code == 200  # by name it is found as before
        app.scheduler.load("by-hand")
        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["by-hand", "hand", "on-request", "soon", "ready"]
    await app.stop()
    await app.gateway.close()


@pytest.mark.parametrize(
    ("name", "window"),
    [("org/big-model", 4096), ("org%2Fbig-model", 4096), ("claude-x", 4096), ("small", 512), ("gpt-7/turbo", 4096)],
)
@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_every_name_has_a_card(name: str, window: int, headers: dict[str, str]) -> None:
    async with app_client(config()) as client:
        for base in ("/v1/models/", "/models/"):
            reply = await client.get(base + name, headers=headers)
            assert reply.status_code == 200
            card = reply.json()
            assert card["id"] == name.replace("%2F", "/")
            assert window in card.values()
            assert ("type" in card) == bool(headers)


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
async def test_an_unknown_name_is_a_404_in_the_format_of_the_protocol(headers: dict[str, str]) -> None:
    async with app_client(config()) as client:
        reply = await client.get("/v1/models/no/such", headers=headers)
        assert reply.status_code == 404
        assert (reply.json().get("type") == "error") == bool(headers)
        assert "org/big-model" in reply.json()["error"]["message"]


async def test_the_window_of_a_remote_model_comes_from_its_settings() -> None:
    remote = {"backend": "openai_remote", "remote_base_url": "https://a.example", "remote_model": "m", "autoload": True}
    async with app_client({"models": {"told": remote | {"n_ctx": 200_000}, "untold": remote}}) as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert cards["told"]["context_length"] == 200_000
        assert cards["untold"].get("context_length") is None


async def test_a_card_has_the_window_of_the_routed_cache() -> None:
    """Agents size themselves by it: the model's own default cache may be larger."""
    made = demo_config()
    made["routes"] = [{"match": "*", "cache": "fast"}]
    async with app_client(made, loaded=True) as client:
        assert (await client.get("/v1/models/demo")).json()["context_length"] == 2048
        assert [card["context_length"] for card in (await client.get("/v1/models")).json()["data"]] == [2048]


async def test_the_sdks_of_mistral_get_a_type_and_an_object_of_capabilities() -> None:
    """Their list of models refuses cards without both."""
    async with app_client(config(), loaded=True) as client:
        headers = {"user-agent": "mistral-client-python/3.7.0"}
        (big, *_, small) = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert (big["type"], big["max_context_length"], small["max_context_length"]) == ("base", 4096, 512)
        assert (big["capabilities"]["completion_chat"], big["capabilities"]["function_calling"]) == (True, True)
        assert set(big["capabilities"].values()) == {True, False}
        assert (await client.get("/v1/models/small", headers=headers)).json() == small
        assert "type" not in (await client.get("/v1/models/small")).json()
