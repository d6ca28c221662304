"""Keys over the admin API: created, changed and revoked while the server runs, and their usage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.accounts.keys import read_keys
from modelyard.accounts.settings import KeySettings
from modelyard.core.events import Usage
from modelyard.server.app import ServerApp
from tests.http.app_client import URL, load_all, make_app
from tests.live_server import demo_config, owner_headers

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
BOSS = {"authorization": "Bearer boss-secret"}


def config(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {**demo_config(), "accounts": {"path": str(tmp_path / "accounts.sqlite")}, **more}


def with_boss(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return config(tmp_path, keys=[{"name": "boss", "key": "boss-secret", "admin": True}], **more)


def client_of(app: ServerApp, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=URL, headers=headers)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[ServerApp]:
    made = make_app(with_boss(tmp_path))
    await load_all(made)
    yield made
    await made.stop()
    await made.gateway.close()
    await made.accounts.close()


@pytest.fixture
async def boss(app: ServerApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app, **BOSS) as client:
        yield client


async def create(boss: httpx.AsyncClient, **body: Any) -> Any:
    reply = await boss.post("/v1/admin/keys", json={"name": "team", **body})
    assert reply.status_code == 201, reply.text
    return reply.json()


async def chat(app: ServerApp, secret: str, **body: Any) -> httpx.Response:
    async with client_of(app, authorization=f"Bearer {secret}") as client:
        return await client.post("/v1/chat/completions", json={**CHAT, **body})


# --- create, change, revoke -------------------------------------------------------------------------------------------


async def test_a_created_key_works_and_its_secret_is_shown_once(app: ServerApp, boss: httpx.AsyncClient) -> None:
    made = await create(boss, models=["demo"], requests_per_minute=100)
    assert (made["source"], made["state"], made["models"]) == ("created", "active", ["demo"])
    assert made["secret"].startswith("my-")
    assert made["secret"].endswith(made["hint"][1:])
    assert (await chat(app, made["secret"])).status_code == 200
    listed = await boss.get("/v1/admin/keys")
    assert [key["name"] for key in listed.json()["data"]] == ["boss", "team"]
    assert made["secret"] not in listed.text
    assert "digest" not in listed.text
    assert listed.headers["cache-control"] == "no-store"


async def test_the_secret_is_neither_in_the_file_nor_in_the_log(
    app: ServerApp, boss: httpx.AsyncClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        secret = (await create(boss))["secret"]
        await chat(app, secret)
        await chat(app, secret[:-1])
    await app.accounts.sync()
    assert secret not in caplog.text
    files = list(tmp_path.glob("accounts.sqlite*"))  # noqa: ASYNC240
    assert files
    assert all(secret.encode() not in file.read_bytes() for file in files)


async def test_a_revoked_key_is_refused_at_once_and_its_name_is_not_given_again(
    app: ServerApp, boss: httpx.AsyncClient
) -> None:
    made = await create(boss)
    revoked = await boss.delete(f"/v1/admin/keys/{made['id']}")
    assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert (await chat(app, made["secret"])).status_code == 401
    names = [key["name"] for key in (await boss.get("/v1/admin/keys")).json()["data"]]
    assert names == ["boss"]
    names = [key["name"] for key in (await boss.get("/v1/admin/keys?revoked=true")).json()["data"]]
    assert names == ["boss", "team"]
    again = await boss.post("/v1/admin/keys", json={"name": "team"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "key_exists")
    assert (await boss.delete(f"/v1/admin/keys/{made['id']}")).status_code == 404


async def test_a_running_request_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    more = demo_config([{"steps": [{"text": "so far"}, {"hang": True}]}])
    app = make_app({**with_boss(tmp_path), "models": more["models"]})
    await load_all(app)
    async with client_of(app, **BOSS) as boss:
        made = await create(boss)

        async def revoke() -> None:
            while not app.gateway.running.by_trace():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await boss.delete(f"/v1/admin/keys/{made['id']}")

        revoking = asyncio.create_task(revoke())
        reply = await chat(app, made["secret"])
        await revoking
    assert reply.status_code >= 400
    assert "revoked" in reply.text
    await app.stop()
    await app.accounts.close()


async def test_keys_survive_a_restart_and_so_does_their_revocation(app: ServerApp, tmp_path: Path) -> None:
    async with client_of(app, **BOSS) as boss:
        kept = await create(boss)
        gone = await create(boss, name="gone")
        await boss.delete(f"/v1/admin/keys/{gone['id']}")
    second = make_app(with_boss(tmp_path))
    await load_all(second)
    assert (await chat(second, kept["secret"])).status_code == 200
    assert (await chat(second, gone["secret"])).status_code == 401
    await second.stop()
    await second.accounts.close()


async def test_another_process_learns_of_a_change_when_it_exchanges_with_the_file(
    app: ServerApp, tmp_path: Path
) -> None:
    second = make_app(with_boss(tmp_path))
    await load_all(second)
    async with client_of(app, **BOSS) as boss:
        made = await create(boss)
        await second.accounts.sync()
        assert (await chat(second, made["secret"])).status_code == 200
        await boss.delete(f"/v1/admin/keys/{made['id']}")
    async with client_of(second, **BOSS) as other:
        await other.get("/v1/admin/keys?own=true")  # what the first process asks of the others
    assert (await chat(second, made["secret"])).status_code == 401
    await second.stop()
    await second.accounts.close()


async def test_a_change_takes_effect_at_once(app: ServerApp, boss: httpx.AsyncClient) -> None:
    made = await create(boss)
    path = f"/v1/admin/keys/{made['id']}"
    changed = (await boss.patch(path, json={"models": ["other"], "max_concurrent": 3})).json()
    assert (changed["models"], changed["max_concurrent"]) == (["other"], 3)
    refused = await chat(app, made["secret"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    await boss.patch(path, json={"models": []})
    assert (await chat(app, made["secret"])).status_code == 200
    await boss.patch(path, json={"expires": "2020-01-01"})
    assert (await chat(app, made["secret"])).json()["error"]["code"] == "key_expired"


async def test_rate_limits_of_a_created_key_hold(app: ServerApp, boss: httpx.AsyncClient) -> None:
    made = await create(boss, requests_per_minute=1)
    assert (await chat(app, made["secret"])).status_code == 200
    limited = await chat(app, made["secret"])
    assert limited.status_code == 429
    assert "1 requests a minute" in limited.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a", "secret": "mine"}, "secret"),
        ({"name": "a", "requests_per_minute": 0}, "requests_per_minute"),
        ({"name": "a", "expires": "tomorrow"}, "expires"),
        ({"name": "a", "budget_period": "week"}, "budget_period"),
        ({"name": "a", "models": [""]}, "models"),
    ],
)
async def test_a_bad_key_is_refused_with_the_field(boss: httpx.AsyncClient, body: Any, param: str) -> None:
    reply = await boss.post("/v1/admin/keys", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_key_of_the_configuration_is_read_only(boss: httpx.AsyncClient) -> None:
    for reply in (
        await boss.delete("/v1/admin/keys/config:boss"),
        await boss.patch("/v1/admin/keys/config:boss", json={"admin": False}),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "key_is_configured")
    taken = await boss.post("/v1/admin/keys", json={"name": "boss"})
    assert taken.status_code == 409


async def test_only_an_admin_key_manages_keys(app: ServerApp, boss: httpx.AsyncClient) -> None:
    made = await create(boss)
    async with client_of(app, authorization=f"Bearer {made['secret']}") as client:
        assert [key["name"] for key in (await client.get("/v1/admin/keys")).json()["data"]] == ["team"]
        assert (await client.post("/v1/admin/keys", json={"name": "mine", "admin": True})).status_code == 403


# --- roles -----------------------------------------------------------------------------------------------------------


async def test_a_role_is_given_by_those_who_have_it(app: ServerApp, boss: httpx.AsyncClient) -> None:
    assert (await create(boss, name="second", admin=True))["role"] == "operator"
    refused = await boss.post("/v1/admin/keys", json={"name": "me", "role": "owner"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "owner_required")
    async with client_of(app, **owner_headers(app)) as owner:
        made = await create(owner, name="me", role="owner")
    assert (made["role"], made["admin"]) == ("owner", True)
    for refused in (
        await boss.delete(f"/v1/admin/keys/{made['id']}"),
        await boss.patch(f"/v1/admin/keys/{made['id']}", json={"max_concurrent": 1}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "owner_required")
    async with client_of(app, authorization=f"Bearer {made['secret']}") as me:
        changed = await me.patch(f"/v1/admin/keys/{made['id']}", json={"max_concurrent": 2})
        assert (changed.json()["role"], changed.json()["max_concurrent"]) == ("owner", 2)
        assert (await me.get("/v1/admin/role")).json() == {"role": "owner", "key": "me", "mcp_servers": []}
        member = await me.patch(f"/v1/admin/keys/{made['id']}", json={"role": "member"})
        assert (member.json()["role"], member.json()["admin"]) == ("member", False)


async def test_admin_and_a_role_that_contradict_each_other_are_refused(boss: httpx.AsyncClient) -> None:
    refused = await boss.post("/v1/admin/keys", json={"name": "x", "admin": True, "role": "member"})
    assert (refused.status_code, "admin contradicts the role member" in refused.text) == (400, True)


# --- the first key and the last one -----------------------------------------------------------------------------------


async def test_a_server_without_keys_gets_an_admin_key_first(tmp_path: Path) -> None:
    app = make_app(config(tmp_path))
    async with client_of(app) as anyone, client_of(app, **owner_headers(app)) as owner:
        refused = await anyone.post("/v1/admin/keys", json={"name": "team", "admin": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "owner_required")
        refused = await owner.post("/v1/admin/keys", json={"name": "team"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "first_key_not_admin")
        made = await create(owner, admin=True)
        assert (await anyone.get("/v1/admin/models")).status_code == 401
        assert (await owner.get("/v1/admin/models")).status_code == 200
    async with client_of(app, authorization=f"Bearer {made['secret']}") as admin:
        other = await create(admin, name="other")
        for reply in (
            await admin.delete(f"/v1/admin/keys/{made['id']}"),
            await admin.patch(f"/v1/admin/keys/{made['id']}", json={"admin": False}),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "last_admin_key")
        await admin.delete(f"/v1/admin/keys/{other['id']}")
        assert (await admin.delete(f"/v1/admin/keys/{made['id']}")).status_code == 200
    async with client_of(app) as client:
        assert (await client.get("/v1/admin/models")).status_code == 200, "a loopback server without keys is open again"
    await app.stop()
    await app.accounts.close()


# --- usage and budgets ------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "demo", "max_tokens": 99, "messages": MESSAGES},
    "/v1/responses": {"model": "demo", "input": "hi"},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
    "/api/chat": {"model": "demo", "messages": MESSAGES, "stream": False},
    "/v1beta/models/demo:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


@pytest.fixture
async def priced(tmp_path: Path) -> AsyncIterator[ServerApp]:
    settings = with_boss(tmp_path, accounts={"path": str(tmp_path / "accounts.sqlite"), "currency": "EUR"})
    settings["models"]["demo"]["price"] = {"input": 1_000_000, "cached_input": 500_000, "output": 2_000_000}
    made = make_app(settings)
    await load_all(made)
    yield made
    await made.stop()
    await made.accounts.close()


async def test_every_protocol_is_counted_with_its_cost(priced: ServerApp) -> None:
    async with client_of(priced, **BOSS) as boss:
        for number, (path, body) in enumerate(REQUESTS.items(), start=1):
            assert (await boss.post(path, json=body)).status_code == 200
            usage = (await boss.get("/v1/admin/usage", params={"by": "key,model"})).json()
            (row,) = usage["data"]
            assert (row["key"], row["model"], row["requests"]) == ("boss", "demo", number)
        expected = (row["prompt"] - row["cached"]) + row["cached"] / 2 + 2 * row["output"]
        assert row["cost"] == pytest.approx(expected)
        assert row["output"] == number * 4, "the answer has four tokens"
        assert usage["currency"] == "EUR"
        assert {"key": "boss", "model": "demo", **usage["total"]} == row
        (record, *_) = (await boss.get("/v1/admin/requests")).json()["ended"]
        assert record["cost"] > 0
        metrics = (await boss.get("/metrics")).text
        assert f'modelyard_usage_tokens_total{{key="boss",kind="output",model="demo"}} {row["output"]}.0' in metrics
        assert 'modelyard_usage_cost_total{currency="EUR",key="boss",model="demo"}' in metrics


async def test_usage_is_grouped_by_day_and_bounded_by_dates(priced: ServerApp) -> None:
    await priced.accounts.sync()
    priced.accounts.ledger.add("boss", "demo", Usage(10, 0, 1), 86_400.0 * 20_000)
    async with client_of(priced, **BOSS) as boss:
        found = (await boss.get("/v1/admin/usage?by=day&from=2024-10-01&to=2024-10-31")).json()
        assert [(row["day"], row["prompt"]) for row in found["data"]] == [("2024-10-04", 10)]
        assert (await boss.get("/v1/admin/usage?by=day&from=2024-10-05&to=2024-10-31")).json()["data"] == []
        for query in ("by=hour", "from=yesterday", "from=2024-10-05&to=2024-10-01"):
            assert (await boss.get(f"/v1/admin/usage?{query}")).status_code == 400


async def test_usage_survives_a_restart(priced: ServerApp, tmp_path: Path) -> None:
    async with client_of(priced, **BOSS) as boss:
        await boss.post("/v1/chat/completions", json=CHAT)
    await priced.accounts.close()
    second = make_app(with_boss(tmp_path))
    async with client_of(second, **BOSS) as boss:
        (row,) = (await boss.get("/v1/admin/usage")).json()["data"]
        assert row["requests"] == 1
        (key,) = (await boss.get("/v1/admin/keys")).json()["data"]
        assert key["usage"]["output"] == 4
        assert key["last_used"] is not None
    await second.stop()
    await second.accounts.close()


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_key_without_budget_is_told_so_in_its_protocol(
    app: ServerApp, boss: httpx.AsyncClient, path: str
) -> None:
    made = await create(boss, token_budget=100, budget_period="day")
    async with client_of(app, authorization=f"Bearer {made['secret']}") as client:
        replies = [await client.post(path, json=REQUESTS[path]) for _ in range(40)]
    refused = replies[-1]
    assert (replies[0].status_code, refused.status_code) == (200, 429)
    assert "budget of 100 tokens a day" in refused.text
    assert "resets at" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 86_400
    assert refused.headers["x-should-retry"] == "false"
    (_, key) = (await boss.get("/v1/admin/keys")).json()["data"]
    assert 0 <= key["budget"]["tokens_left"] < 100
    assert key["budget"]["resets"] > key["created"]


async def test_a_budget_counts_what_was_used_before_a_restart(app: ServerApp, tmp_path: Path) -> None:
    async with client_of(app, **BOSS) as boss:
        made = await create(boss, token_budget=30, budget_period="total")
    while (await chat(app, made["secret"])).status_code == 200:
        pass
    await app.accounts.sync()
    second = make_app(with_boss(tmp_path))
    await load_all(second)
    refused = await chat(second, made["secret"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    await second.stop()
    await second.accounts.close()


async def test_a_key_sees_the_models_that_it_may_use(tmp_path: Path) -> None:
    settings = with_boss(tmp_path, routes=[{"match": "fast-*", "model": "second"}])
    settings["models"]["second"] = {**settings["models"]["demo"], "aliases": ["other"]}
    app = make_app(settings)
    await load_all(app)
    async with client_of(app, **BOSS) as boss:
        assert [one["id"] for one in (await boss.get("/v1/models")).json()["data"]] == ["demo", "second", "other"]
        second = await create(boss, models=["sec*"])
        route = await create(boss, name="by-route", models=["fast-*"])
    async with client_of(app, authorization=f"Bearer {second['secret']}") as client:
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["second", "other"]
        assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == [
            "second:latest",
            "other:latest",
        ]
        assert (await client.get("/v1/models/demo")).status_code == 403
    for secret, model, status in (
        (second["secret"], "other", 200),
        (second["secret"], "demo", 403),
        (route["secret"], "fast-1", 200),
        (route["secret"], "second", 403),
    ):
        assert (await chat(app, secret, model=model)).status_code == status
    await app.stop()
    await app.accounts.close()


# --- a browser, and what a member sees --------------------------------------------------------------------------------


async def test_a_login_outlives_the_server_and_ends_with_its_key(tmp_path: Path) -> None:
    first = make_app(with_boss(tmp_path))
    async with client_of(first, **BOSS) as boss:
        team = await create(boss)
        login = (await boss.post("/v1/admin/login", headers={"authorization": f"Bearer {team['secret']}"})).json()
        assert login["secret"] not in (tmp_path / "accounts.sqlite").read_bytes().decode("latin-1")
    await first.stop()
    await first.accounts.close()
    again = make_app(with_boss(tmp_path))
    cookie = {"authorization": f"Bearer {login['secret']}"}
    async with client_of(again) as client:
        role = (await client.get("/v1/admin/role", headers=cookie)).json()
        assert (role["role"], role["key"]) == ("member", "team")
        renewed = await client.post("/v1/admin/login", headers=cookie)
        assert renewed.status_code == 401, "a cookie makes no other one"
        assert (await client.delete(f"/v1/admin/keys/{team['id']}", headers=BOSS)).status_code == 200
        assert (await client.get("/v1/admin/role", headers=cookie)).status_code == 401
    await again.stop()
    await again.accounts.close()


async def test_a_login_ends_when_its_key_gets_another_secret_or_logs_out(tmp_path: Path) -> None:
    app = make_app(with_boss(tmp_path))
    async with client_of(app) as client:
        login = (await client.post("/v1/admin/login", headers=BOSS)).json()
        cookie = {"authorization": f"Bearer {login['secret']}"}
        assert (await client.get("/v1/admin/role", headers=cookie)).json()["role"] == "operator"
        app.accounts.ring.configure(read_keys([KeySettings(name="boss", key="another-secret", admin=True)]))
        assert (await client.get("/v1/admin/role", headers=cookie)).status_code == 401
        other = {"authorization": "Bearer another-secret"}
        login = (await client.post("/v1/admin/login", headers=other)).json()
        cookie = {"authorization": f"Bearer {login['secret']}"}
        assert (await client.delete("/v1/admin/login", headers=cookie)).status_code == 200
        assert (await client.get("/v1/admin/role", headers=cookie)).status_code == 401
        assert (await client.get("/v1/admin/role", headers=other)).status_code == 200
    await app.stop()
    await app.accounts.close()


async def test_a_member_sees_its_own_key_usage_and_chats_only(app: ServerApp, boss: httpx.AsyncClient) -> None:
    team, other = await create(boss, token_budget=10_000), await create(boss, name="other")
    await chat(app, team["secret"])
    await chat(app, other["secret"])
    stored = {"id": "c1", "title": "Mine"}
    async with client_of(app, authorization=f"Bearer {team['secret']}") as member:
        (key,) = (await member.get("/v1/admin/keys?revoked=true")).json()["data"]
        assert (key["name"], key["budget"]["tokens_left"] < 10_000) == ("team", True)
        for query in ("", "?by=key&key=other"):
            usage = (await member.get(f"/v1/admin/usage{query}")).json()
            assert [row["key"] for row in usage["data"]] == ["team"]
        assert (await member.put("/v1/admin/chats/c1", json=stored)).status_code == 200
        assert [one["id"] for one in (await member.get("/v1/admin/chats")).json()["data"]] == ["c1"]
        assert (await member.post("/v1/admin/keys", json={"name": "x"})).status_code == 403
    async with client_of(app, authorization=f"Bearer {other['secret']}") as stranger:
        assert (await stranger.get("/v1/admin/chats")).json()["data"] == []
        assert (await stranger.get("/v1/admin/chats/c1")).status_code == 404
    assert len((await boss.get("/v1/admin/usage")).json()["data"]) == 2
