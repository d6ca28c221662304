"""The HTTP server as a whole: open and protected paths, CORS, host names and TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.app_client import app_client
from tests.live_server import demo_config, live_server

SECRET = "a-very-secret-key"
KEYED = demo_config() | {"keys": [{"name": "ann", "key": SECRET}, {"name": "boss", "env": "BOSS_KEY", "admin": True}]}
ENV = {"BOSS_KEY": "the-boss-key"}
PAGE = "https://chat.example"
SELF_SIGNED = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1"
)

OPEN = ["/", "/health", "/health/live", "/health/ready", "/docs", "/docs/swagger-ui.css", "/openapi.json"]
CLOSED = [
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/v1/models/demo"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/infill"),
    ("POST", "/completion"),
    ("POST", "/completions"),
    ("POST", "/embedding"),
    ("POST", "/v1/score"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("GET", "/lora-adapters"),
    ("POST", "/v1/fim/completions"),
    ("POST", "/tokenize"),
    ("GET", "/v1/admin/models"),
    ("GET", "/nonsense"),
    ("GET", "/healthy"),
    ("GET", "/health/live/x"),
    ("OPTIONS", "/v1/messages"),
]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*OPEN, "/health/", "/health/live/"])
async def test_open_paths_need_no_key(path: str) -> None:
    async with app_client(KEYED, ENV, loaded=True) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_all_other_paths_need_a_key(method: str, path: str) -> None:
    async with app_client(KEYED, ENV) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            reply = await client.request(method, path, headers=headers)
            assert reply.status_code == 401, path
            assert "API key" in reply.json()["error"]["message"]
        entered = await client.request(method, path, headers={"x-api-key": ENV["BOSS_KEY"]})
        assert entered.status_code != 401


async def test_a_user_key_is_not_an_admin_key() -> None:
    async with app_client(KEYED, ENV) as client:
        user = await client.get("/v1/admin/models", headers={"authorization": f"Bearer {SECRET}"})
        boss = await client.get("/v1/admin/models", headers={"authorization": "Bearer the-boss-key"})
        assert (user.status_code, user.json()["error"]["code"]) == (403, "admin_key_required")
        assert boss.status_code != 403


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/nonsense"])
async def test_no_key_appears_in_logs_or_errors(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = ["a-wrong-guess", SECRET]
    async with app_client(KEYED, ENV) as client:
        replies = [
            await client.post(path, headers={name: form.format(secret)}, content=b"not json")
            for secret in shown
            for name, form in (("x-api-key", "{}"), ("authorization", "Bearer {}"))
        ]
    logged = "".join(repr(record.__dict__) for record in caplog.records if record.name.startswith("modelyard"))
    replied = "".join(reply.text + repr(reply.headers) for reply in replies)
    assert logged
    assert not any(secret in logged + replied for secret in shown)


# --- pages of elsewhere -----------------------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def with_cors(*origins: str) -> dict[str, Any]:
    return KEYED | {"http": {"cors_enabled": True, "cors_origins": list(origins)}}


async def test_cors_is_off_by_default() -> None:
    async with app_client(loaded=True) as client:
        for reply in (
            await client.options("/v1/messages", headers=PREFLIGHT),
            await client.get("/health", headers={"origin": PAGE}),
            await client.post("/v1/messages", headers={"origin": PAGE}, json={}),
        ):
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == "origin_not_allowed"
            assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("origins", [(), (PAGE,), ("*",)])
async def test_a_permitted_preflight_needs_no_key(origins: tuple[str, ...]) -> None:
    async with app_client(with_cors(*origins), ENV) as client:
        reply = await client.options("/v1/messages", headers=PREFLIGHT)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()
        assert "POST" in reply.headers["access-control-allow-methods"]


async def test_an_allowed_origin_reads_replies_and_errors() -> None:
    async with app_client(with_cors(PAGE), ENV) as client:
        good = await client.get("/v1/models", headers={"origin": PAGE, "x-api-key": SECRET})
        bad = await client.get("/v1/models", headers={"origin": PAGE})
        assert (good.status_code, bad.status_code) == (200, 401)
        for reply in (good, bad):
            assert reply.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in bad.headers["access-control-expose-headers"]


async def test_an_unlisted_origin_gets_no_cors_headers() -> None:
    async with app_client(with_cors("https://other.example"), ENV) as client:
        preflight = await client.options("/v1/messages", headers=PREFLIGHT)
        request = await client.get("/v1/models", headers={"origin": PAGE, "x-api-key": SECRET})
        assert preflight.status_code == 400
        assert request.status_code == 403
        for reply in (preflight, request):
            assert "access-control-allow-origin" not in reply.headers


# --- the rest ---------------------------------------------------------------------------------------------------------


async def test_a_foreign_host_name_is_refused_even_on_open_paths() -> None:
    async with app_client() as client:
        for path in (*OPEN, "/v1/models"):
            reply = await client.get(path, headers={"host": "rebound.example:8000"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["[", "[::1", ":", "a b", "localhost:port"])
async def test_an_invalid_host_name_never_breaks_the_server(host: str) -> None:
    async with app_client() as client:
        for path in ("/nonsense", "/health/", "/v1/models"):
            reply = await client.get(path, headers={"host": host})
            assert reply.status_code < 500


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/messages", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("DELETE", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
    ],
)
async def test_a_wrong_method_gets_the_allowed_ones(method: str, path: str, allowed: str) -> None:
    async with app_client() as client:
        reply = await client.request(method, path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
        assert allowed in reply.headers["allow"]


async def test_the_first_admin_requests_may_come_at_once() -> None:
    """The app that answers them is made once, and a client that leaves does not end that."""
    async with app_client() as client:
        leaving = asyncio.create_task(client.get("/v1/admin/models"))
        await asyncio.sleep(0)
        others = asyncio.gather(*(client.get(path) for path in ("/v1/admin/models", "/openapi.json", "/docs")))
        leaving.cancel()
        assert [reply.status_code for reply in await others] == [200, 200, 200]


async def test_a_trailing_slash_is_ignored() -> None:
    async with app_client(loaded=True) as client:
        body = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        for path in ("/v1/messages/", "/v1/chat/completions/"):
            assert (await client.post(path, json=body)).status_code == 200


async def test_an_internal_error_is_reported_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("the secret plan")

    monkeypatch.setattr("modelyard.http.models.ModelEndpoints._statuses", broken)
    async with app_client() as client:
        reply = await client.get("/v1/models", headers={"anthropic-version": "1"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in reply.text
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["unexpected error"]


def test_https_with_a_self_signed_certificate(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [*SELF_SIGNED.split(), "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    with live_server(demo_config() | {"http": {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}}) as served:
        assert served.url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.head(served.url + "/").status_code == 200
            body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            with client.stream("POST", served.url + "/v1/chat/completions", json=body) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(served.url + "/")
