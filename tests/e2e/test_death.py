"""An engine that dies: its streams end in an error, those it had not answered yet start again, and it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.helpers import config, wait_for_running, wait_until_idle
from tests.e2e.protocols import PROTOCOLS, Protocol, event_names, parse_events
from tests.live_server import LiveServer, live_server

MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()


@pytest.fixture(scope="module")
def mortal() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


def kill(served: LiveServer, wire: Protocol = CHAT) -> httpx.Response:
    return httpx.post(served.url + wire.path, json=wire.body("death during", stream=True))


def test_a_stream_ends_in_its_protocols_error(mortal: LiveServer) -> None:
    error = {"type": "overloaded_error", "message": "segmentation fault", "code": "engine_unavailable"}
    reply = kill(mortal, MESSAGES)
    last = parse_events(reply.text)[-1]
    assert last.event == "error"
    assert last.data == {"type": "error", "error": error, "request_id": reply.headers["request-id"]}

    error = {"message": "segmentation fault", "type": "server_error", "param": None, "code": "engine_unavailable"}
    assert parse_events(kill(mortal, CHAT).text)[-1].data == {"error": error}

    failed = parse_events(kill(mortal, RESPONSES).text)[-1]
    assert failed.event == "response.failed"
    assert failed.data["response"]["error"] == {"code": "server_error", "message": "segmentation fault"}


def test_a_whole_reply_is_refused_with_when_to_come_back(mortal: LiveServer, wire: Protocol) -> None:
    reply = httpx.post(mortal.url + wire.path, json=wire.body("death during"))
    assert reply.status_code == (529 if wire is MESSAGES else 503)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["message"] == "segmentation fault"


def test_the_next_request_is_answered_by_the_engine_that_came_back(
    mortal: LiveServer, wire: Protocol, stream: bool
) -> None:
    kill(mortal)
    reply = httpx.post(mortal.url + wire.path, json=wire.body("text", stream=stream))
    seen = wire.streamed(parse_events(reply.text)) if stream else wire.whole(reply.json())
    assert seen.text == "Hello there, friend."
    wait_until_idle(mortal)


def test_a_request_that_had_no_word_yet_starts_again_unseen(mortal: LiveServer, wire: Protocol, stream: bool) -> None:
    with ThreadPoolExecutor(1) as others:
        body = wire.body("slow prefill", stream=stream)
        reading = others.submit(httpx.post, mortal.url + wire.path, json=body, timeout=60)
        wait_for_running(mortal, 1)
        kill(mortal)
        reply = reading.result()
    assert reply.status_code == 200
    if stream:
        got = parse_events(reply.text)
        assert wire.streamed(got).text == "done"
        assert len([name for name in event_names(got) if name in ("message_start", "response.created")]) == (
            wire is not CHAT
        )
    else:
        assert wire.whole(reply.json()).text == "done"
    wait_until_idle(mortal)
