"""Health endpoints for every combination of model states."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from modelyard.core.pool import ModelStatus
from modelyard.http.health import health_status
from modelyard.scheduler.scheduler import Scheduler
from tests.http.app_client import URL, app_client, load_all, make_app
from tests.live_server import demo_config


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ([], "unhealthy"),
        (["ready"], "healthy"),
        (["ready", "ready"], "healthy"),
        (["ready", "stopped"], "healthy"),
        (["stopped"], "healthy"),
        (["ready", "loading"], "degraded"),
        (["ready", "failed"], "degraded"),
        (["loading"], "degraded"),
        (["loading", "failed"], "degraded"),
        (["draining"], "degraded"),
        (["failed"], "unhealthy"),
        (["failed", "failed"], "unhealthy"),
        (["failed", "stopped"], "unhealthy"),
    ],
)
def test_overall_status_of_several_models(states: list[Any], verdict: str) -> None:
    assert (
        health_status({str(number): ModelStatus(name="m", state=state) for number, state in enumerate(states)})
        == verdict
    )


async def test_a_healthy_server_reports_every_field() -> None:
    async with app_client(loaded=True) as client:
        reply = await client.get("/health")
        assert reply.status_code == 200
        body = reply.json()
        assert body.pop("version")
        assert body == {
            "status": "healthy",
            "scheduler_connected": True,
            "tokenizer_loaded": True,
            "active_requests": 0,
            "models": {"demo": {"state": "ready", "running": 0, "waiting": 0}},
        }
        assert (await client.get("/health/live")).json() == {"status": "alive"}
        assert (await client.get("/health/ready")).status_code == 200


async def test_a_server_without_a_ready_model_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """Probes ask all the time, so their answer is no warning in the log."""
    broken = demo_config(tokenizer_path="/nowhere/at/all")
    async with app_client(broken, loaded=True) as client:
        reply = await client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "unhealthy")
        assert reply.json()["tokenizer_loaded"] is False
        assert "/nowhere/at/all" in reply.json()["models"]["demo"]["reason"]
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
    assert not [each for each in caplog.records if each.msg == "request" and each.levelno >= logging.WARNING]


async def test_a_gateway_whose_tokenizer_has_not_arrived_is_unhealthy() -> None:
    """The model is up in another process, and its tokenizer is still on its way here."""
    app = make_app()
    await load_all(app)
    app.gateway.lookup.models = {name: replace(model, text=None) for name, model in app.gateway.lookup.models.items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url=URL) as client:
        reply = await client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "unhealthy")
        assert reply.json()["tokenizer_loaded"] is False
        assert (await client.get("/health/ready")).status_code == 503
    await app.stop()
    await app.gateway.close()


async def test_a_gateway_that_has_lost_its_scheduler_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with app_client(loaded=True) as client:
        monkeypatch.setattr(Scheduler, "is_connected", False)
        reply = await client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "unhealthy")
        assert reply.json()["scheduler_connected"] is False
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200


async def test_unauthenticated_clients_see_only_the_status() -> None:
    async with app_client(demo_config() | {"keys": [{"name": "ann", "key": "hush"}]}, loaded=True) as client:
        assert "models" not in (await client.get("/health")).json()
        assert "models" in (await client.get("/health", headers={"x-api-key": "hush"})).json()


async def test_health_supports_head_requests() -> None:
    async with app_client(loaded=True) as client:
        for path in ("/", "/health", "/health/live", "/health/ready"):
            reply = await client.head(path)
            assert (reply.status_code, reply.content) == (200, b"")


async def test_a_key_for_some_models_sees_no_other_names() -> None:
    config = demo_config()
    config["models"]["hidden"] = config["models"]["demo"] | {"aliases": ["also-hidden"]}
    config["routes"] = []
    config["keys"] = [
        {"name": "some", "key": "some-secret-0123456789", "models": ["demo"]},
        {"name": "all", "key": "every-secret-0123456789"},
    ]

    async def seen(path: str, key: str) -> tuple[int, str]:
        reply = await client.get(path, headers={"x-api-key": f"{key}-secret-0123456789"})
        return reply.status_code, reply.text

    async with app_client(config, loaded=True) as client:
        for path in ("/health", "/api/ps", "/api/tags", "/v1/models", "/metrics", "/api/v0/models", "/v1beta/models"):
            status, text = await seen(path, "some")
            assert "hidden" not in text
            assert ("demo" in text) is (status == 200)
            status, text = await seen(path, "every")
            assert (status, "hidden" in text) == (200, True), path
        assert (await seen("/metrics", "some"))[0] == 403
