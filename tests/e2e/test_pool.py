"""The model pool over HTTP: unload, autoload, rate limits, replicas and full queues."""

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
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, RESPONSES, Protocol, parse_events
from tests.live_server import LiveServer, live_server


def call_in_loop(server: LiveServer, action: Callable[[], Any]) -> None:
    """Run on the loop of the server and wait."""

    async def run() -> None:
        await action()

    asyncio.run_coroutine_threadsafe(run(), server.loop).result(60)


def running_requests(server: LiveServer) -> list[RequestSnapshot]:
    """Read on the loop of the server, between two of its steps."""

    async def snapshot() -> list[RequestSnapshot]:
        return [request for request in server.app.scheduler.requests() if request.state == "running"]

    return asyncio.run_coroutine_threadsafe(snapshot(), server.loop).result(60)


def test_a_forced_unload_ends_a_stream_with_the_error_of_the_protocol(protocol: Protocol) -> None:
    with live_server(config()) as server, ThreadPoolExecutor(1) as executor:
        scheduler = server.app.scheduler
        body = protocol.body("endless stream", stream=True)
        pending = executor.submit(httpx.post, server.url + protocol.path, json=body, timeout=60)
        wait_for_running(server, 1)
        call_in_loop(server, lambda: scheduler.unload("demo", force=True))
        last = (
            parse_events(pending.result().text)[-1].data
            if protocol is not RESPONSES
            else parse_events(pending.result().text)[-1]
        )
        assert "the model 'demo' was unloaded" in str(last)
        reply = httpx.post(server.url + protocol.path, json=protocol.body("text"))
        assert "POST /v1/admin/models/demo/load" in reply.text
        call_in_loop(server, lambda: scheduler.load("demo"))
        assert protocol.parse_reply(httpx.post(server.url + protocol.path, json=protocol.body("text")).json()).text
        wait_until_idle(server)


def test_autoload_loads_a_model_for_its_first_request() -> None:
    settings = config()
    settings["models"]["demo"] |= {"enabled": False, "autoload": True}
    with live_server(settings) as server:
        assert server.status("demo").state == "stopped"
        assert httpx.get(server.url + "/health/ready").status_code == 200
        reply = httpx.post(server.url + CHAT.path, json=CHAT.body("text"))
        assert CHAT.parse_reply(reply.json()).text == "Hello there, friend."
        assert 'model_loads_total{model="demo"} 1.0' in httpx.get(server.url + "/metrics").text


def test_a_key_over_its_rate_limit_gets_retry_after(protocol: Protocol) -> None:
    settings = config(keys=[{"name": "ann", "key": "secret", "requests_per_minute": 1}])
    with live_server(settings, ready=False) as server:
        wait_until(lambda: server.status("demo").state == "ready", "the model is ready")
        client = httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"})
        with client:
            assert client.post(protocol.path, json=protocol.body("text")).status_code == 200
            reply = client.post(protocol.path, json=protocol.body("text"))
        assert reply.status_code == 429
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert "1 requests a minute" in reply.json()["error"]["message"]


def test_each_replica_has_its_own_slots() -> None:
    settings = single_slot_config()
    settings["models"]["demo"] |= {"replicas": 2}
    with live_server(settings) as server:
        wait_until(lambda: len(server.app.scheduler.engines("demo")) == 2, "both replicas are ready")
        endless = CHAT.body("endless stream", stream=True)
        with (
            raw_request(server, CHAT.path, endless) as first,
            raw_request(server, CHAT.path, endless) as second,
            raw_request(server, CHAT.path, endless) as third,
        ):
            first.read_until(b"so far")
            second.read_until(b"so far")
            wait_for_queued(server, 1)
            first.close()
            third.read_until(b"so far")
        wait_until(lambda: server.status("demo").running == 0, "all slots free")


def test_a_request_moves_to_the_other_replica_if_its_replica_dies_before_output() -> None:
    settings = single_slot_config()
    settings["models"]["demo"] |= {"replicas": 2}
    with live_server(settings) as server:
        scheduler = server.app.scheduler
        wait_until(lambda: len(scheduler.engines("demo")) == 2, "both replicas are ready")
        with raw_request(server, CHAT.path, CHAT.body("endless prefill")):
            wait_for_running(server, 1)
            (before,) = running_requests(server)
            wait_until(
                lambda: sum(engine.stats().running for engine in scheduler.engines("demo")) == 1, "the generation runs"
            )
            (busy,) = [engine for engine in scheduler.engines("demo") if engine.stats().running]
            server.loop.call_soon_threadsafe(busy.die, Unavailable("killed"))
            wait_until(
                lambda: [request.replica for request in running_requests(server)] not in ([before.replica], []),
                "the request has moved",
            )
            assert [request.trace for request in running_requests(server)] == [before.trace]
        wait_until(lambda: server.status("demo").running == 0, "all slots free")


# --- full queues ------------------------------------------------------------------------------------------------------


def expect_queue_full(server: LiveServer, protocol: Protocol, stream: bool, position: int) -> None:
    reply = httpx.post(server.url + protocol.path, json=protocol.body("text", stream=stream))
    assert (reply.headers["content-type"], reply.headers["x-queue-position"]) == ("application/json", str(position))
    assert int(reply.headers["retry-after"]) >= 1
    error = reply.json()["error"]
    if protocol is MESSAGES:
        assert (reply.status_code, error["type"]) == (529, "overloaded_error")
        assert reply.json()["type"] == "error"
    else:
        assert (reply.status_code, error["type"], error["code"]) == (503, "server_error", "server_is_overloaded")
        assert error["queue_position"] == position
    assert "queue is full" in error["message"]


def test_max_waiting_zero_refuses_a_second_request() -> None:
    with live_server(single_slot_config(scheduler={"max_waiting": 0})) as server:
        with raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as running:
            running.read_until(b"so far")
            for protocol in PROTOCOLS.values():
                expect_queue_full(server, protocol, stream=False, position=1)
                expect_queue_full(server, protocol, stream=True, position=1)
        wait_until_idle(server)


def test_requests_beyond_max_waiting_are_refused() -> None:
    with live_server(single_slot_config(scheduler={"max_waiting": 1})) as server:
        for protocol in PROTOCOLS.values():
            with (
                raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as running,
                raw_request(server, protocol.path, protocol.body("text")) as queued,
            ):
                wait_for_queued(server, 1)
                expect_queue_full(server, protocol, stream=False, position=2)
                expect_queue_full(server, protocol, stream=True, position=2)
                running.close()
                queued.read_until(b"Hello there, friend.")
            wait_until_idle(server)


def test_max_waiting_tokens_limits_queued_prompts() -> None:
    with live_server(single_slot_config(scheduler={"max_waiting_tokens": 20})) as server:
        with raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as running:
            running.read_until(b"so far")
            reply = httpx.post(server.url + CHAT.path, json=CHAT.body("text " * 50))
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_is_overloaded")
            with raw_request(server, CHAT.path, CHAT.body("text")):
                wait_for_queued(server, 1)
        wait_until_idle(server)


def test_counting_does_not_queue() -> None:
    with live_server(single_slot_config(scheduler={"max_waiting": 0})) as server:
        with raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as running:
            running.read_until(b"so far")
            for path, protocol in (
                ("/v1/messages/count_tokens", MESSAGES),
                ("/v1/responses/input_tokens", RESPONSES),
            ):
                assert httpx.post(server.url + path, json=protocol.body("text")).json()["input_tokens"] > 0
        wait_until_idle(server)
