"""A full queue refuses at once: in each protocol's own words, with when to come back and how long the queue is."""

from __future__ import annotations

import httpx

from tests.e2e.helpers import raw_request, single_slot_config, wait_for_queued, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, RESPONSES, Protocol
from tests.live_server import LiveServer, live_server


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
