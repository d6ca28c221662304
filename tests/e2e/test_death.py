"""An engine that dies: its streams end in an error, those it had not answered yet start again, and it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.helpers import config, wait_for_running, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, RESPONSES, Protocol, event_names, parse_events
from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def crashing_server() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


def crash_engine(server: LiveServer, protocol: Protocol = CHAT) -> httpx.Response:
    return httpx.post(server.url + protocol.path, json=protocol.body("death during", stream=True))


def test_a_crash_ends_streams_with_the_error_of_the_protocol(crashing_server: LiveServer) -> None:
    error = {"type": "overloaded_error", "message": "segmentation fault", "code": "engine_unavailable"}
    reply = crash_engine(crashing_server, MESSAGES)
    last = parse_events(reply.text)[-1]
    assert last.event == "error"
    assert last.data == {"type": "error", "error": error, "request_id": reply.headers["request-id"]}

    error = {"message": "segmentation fault", "type": "server_error", "param": None, "code": "engine_unavailable"}
    assert parse_events(crash_engine(crashing_server, CHAT).text)[-1].data == {"error": error}

    failed = parse_events(crash_engine(crashing_server, RESPONSES).text)[-1]
    assert failed.event == "response.failed"
    assert failed.data["response"]["error"] == {"code": "server_error", "message": "segmentation fault"}


def test_a_crash_fails_unstreamed_replies_with_retry_after(crashing_server: LiveServer, protocol: Protocol) -> None:
    reply = httpx.post(crashing_server.url + protocol.path, json=protocol.body("death during"))
    assert reply.status_code == (529 if protocol is MESSAGES else 503)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["message"] == "segmentation fault"


def test_the_engine_is_reloaded_for_the_next_request(
    crashing_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    crash_engine(crashing_server)
    reply = httpx.post(crashing_server.url + protocol.path, json=protocol.body("text", stream=stream))
    parsed = protocol.parse_stream(parse_events(reply.text)) if stream else protocol.parse_reply(reply.json())
    assert parsed.text == "Hello there, friend."
    wait_until_idle(crashing_server)


def test_a_request_without_output_is_retried_after_a_crash(
    crashing_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    with ThreadPoolExecutor(1) as executor:
        body = protocol.body("slow prefill", stream=stream)
        pending = executor.submit(httpx.post, crashing_server.url + protocol.path, json=body, timeout=60)
        wait_for_running(crashing_server, 1)
        crash_engine(crashing_server)
        reply = pending.result()
    assert reply.status_code == 200
    if stream:
        events = parse_events(reply.text)
        assert protocol.parse_stream(events).text == "done"
        assert len([name for name in event_names(events) if name in ("message_start", "response.created")]) == (
            protocol is not CHAT
        )
    else:
        assert protocol.parse_reply(reply.json()).text == "done"
    wait_until_idle(crashing_server)
