"""Models that come and go, replicas and limits, as clients see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from modelyard.core.errors import Unavailable
from modelyard.core.pool import RequestSnapshot
from tests.e2e.helpers import (
    config,
    raw_request,
    single_slot_config,
    wait_for_queued,
    wait_for_running,
    wait_until,
    wait_until_idle,
)
from tests.e2e.protocols import PROTOCOLS, Protocol, parse_events
from tests.live_server import LiveServer, live_server

MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()


def order(served: LiveServer, what: Callable[[], Any]) -> None:
    """Given on the server's own loop, and waited for."""

    async def carried_out() -> None:
        await what()

    asyncio.run_coroutine_threadsafe(carried_out(), served.loop).result(60)


def running(served: LiveServer) -> list[RequestSnapshot]:
    """Looked up on the server's own loop: between two of its steps."""

    async def look() -> list[RequestSnapshot]:
        return [one for one in served.app.scheduler.requests() if one.state == "running"]

    return asyncio.run_coroutine_threadsafe(look(), served.loop).result(60)


def test_unloading_by_force_ends_a_stream_in_its_protocols_error(wire: Protocol) -> None:
    with live_server(config()) as served, ThreadPoolExecutor(1) as others:
        scheduler = served.app.scheduler
        body = wire.body("endless stream", stream=True)
        reading = others.submit(httpx.post, served.url + wire.path, json=body, timeout=60)
        wait_for_running(served, 1)
        order(served, lambda: scheduler.unload("demo", force=True))
        last = (
            parse_events(reading.result().text)[-1].data
            if wire is not RESPONSES
            else parse_events(reading.result().text)[-1]
        )
        assert "the model 'demo' was unloaded" in str(last)
        refused = httpx.post(served.url + wire.path, json=wire.body("text"))
        assert "POST /v1/admin/models/demo/load" in refused.text
        order(served, lambda: scheduler.load("demo"))
        assert wire.whole(httpx.post(served.url + wire.path, json=wire.body("text")).json()).text
        wait_until_idle(served)


def test_a_model_is_loaded_by_the_first_request_for_it() -> None:
    asked = config()
    asked["models"]["demo"] |= {"enabled": False, "autoload": True}
    with live_server(asked) as served:
        assert served.status("demo").state == "stopped"
        assert httpx.get(served.url + "/health/ready").status_code == 200
        reply = httpx.post(served.url + CHAT.path, json=CHAT.body("text"))
        assert CHAT.whole(reply.json()).text == "Hello there, friend."
        assert 'model_loads_total{model="demo"} 1.0' in httpx.get(served.url + "/metrics").text


def test_a_key_over_its_limit_is_told_when_to_come_back(wire: Protocol) -> None:
    asked = config(keys=[{"name": "ann", "key": "secret", "requests_per_minute": 1}])
    with live_server(asked, ready=False) as served:
        wait_until(lambda: served.status("demo").state == "ready", "the model is ready")
        client = httpx.Client(base_url=served.url, headers={"authorization": "Bearer secret"})
        with client:
            assert client.post(wire.path, json=wire.body("text")).status_code == 200
            refused = client.post(wire.path, json=wire.body("text"))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "1 requests a minute" in refused.json()["error"]["message"]


def test_each_replica_has_places_of_its_own() -> None:
    asked = single_slot_config()
    asked["models"]["demo"] |= {"replicas": 2}
    with live_server(asked) as served:
        wait_until(lambda: len(served.app.scheduler.engines("demo")) == 2, "both replicas are ready")
        endless = CHAT.body("endless stream", stream=True)
        with (
            raw_request(served, CHAT.path, endless) as first,
            raw_request(served, CHAT.path, endless) as second,
            raw_request(served, CHAT.path, endless) as third,
        ):
            first.reads(b"so far")
            second.reads(b"so far")
            wait_for_queued(served, 1)
            first.leaves()
            third.reads(b"so far")
        wait_until(lambda: served.status("demo").running == 0, "all places free")


def test_a_request_whose_replica_dies_before_its_first_word_goes_to_the_other() -> None:
    asked = single_slot_config()
    asked["models"]["demo"] |= {"replicas": 2}
    with live_server(asked) as served:
        scheduler = served.app.scheduler
        wait_until(lambda: len(scheduler.engines("demo")) == 2, "both replicas are ready")
        with raw_request(served, CHAT.path, CHAT.body("endless prefill")):
            wait_for_running(served, 1)
            (before,) = running(served)
            wait_until(lambda: sum(engine.stats().running for engine in scheduler.engines("demo")) == 1, "it has begun")
            (busy,) = [engine for engine in scheduler.engines("demo") if engine.stats().running]
            served.loop.call_soon_threadsafe(busy.die, Unavailable("killed"))
            wait_until(lambda: [one.replica for one in running(served)] not in ([before.replica], []), "it has moved")
            assert [one.trace for one in running(served)] == [before.trace]
        wait_until(lambda: served.status("demo").running == 0, "all places free")
