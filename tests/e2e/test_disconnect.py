"""A disconnect frees the slot at once in every phase of a request; a resend shares the running reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import (
    engine_stats,
    raw_request,
    single_slot_config,
    wait_for_queued,
    wait_for_running,
    wait_until_idle,
)
from tests.e2e.protocols import CHAT, Protocol
from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def single_slot_server() -> Iterator[LiveServer]:
    with live_server(single_slot_config()) as running:
        yield running


@pytest.fixture(autouse=True)
def _server_keeps_working(single_slot_server: LiveServer) -> Iterator[None]:
    """After every test the slot is free and the next request works."""
    yield
    wait_until_idle(single_slot_server)
    reply = httpx.post(single_slot_server.url + CHAT.path, json=CHAT.body("text"))
    assert CHAT.parse_reply(reply.json()).text == "Hello there, friend."


def test_a_disconnect_in_the_queue_removes_the_request(
    single_slot_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    with raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        prompt_tokens = (
            engine_stats(single_slot_server).evaluated_tokens + engine_stats(single_slot_server).reused_tokens
        )
        with raw_request(single_slot_server, protocol.path, protocol.body("text that waits", stream=stream)):
            wait_for_queued(single_slot_server, 1)
        wait_for_queued(single_slot_server, 0)
        wait_for_running(single_slot_server, 1)
    wait_until_idle(single_slot_server)
    # A request that was still queued would have been evaluated by the engine.
    assert (
        engine_stats(single_slot_server).evaluated_tokens + engine_stats(single_slot_server).reused_tokens
        == prompt_tokens
    )


def test_a_disconnect_in_prefill_cancels_the_request(
    single_slot_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    with raw_request(single_slot_server, protocol.path, protocol.body("endless prefill", stream=stream)):
        wait_for_running(single_slot_server, 1)


def test_a_disconnect_in_the_stream_cancels_the_request(single_slot_server: LiveServer, protocol: Protocol) -> None:
    with raw_request(single_slot_server, protocol.path, protocol.body("endless stream", stream=True)) as caller:
        caller.read_until(b"so far")
        assert engine_stats(single_slot_server).running == 1


def test_a_disconnect_before_an_unstreamed_reply_cancels_the_request(
    single_slot_server: LiveServer, protocol: Protocol
) -> None:
    with raw_request(single_slot_server, protocol.path, protocol.body("endless stream")):
        wait_for_running(single_slot_server, 1)


def test_queued_requests_move_up_after_a_disconnect(single_slot_server: LiveServer, protocol: Protocol) -> None:
    with (
        raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder,
        raw_request(single_slot_server, protocol.path, protocol.body("endless prefill")) as first,
        raw_request(single_slot_server, protocol.path, protocol.body("text")) as second,
    ):
        wait_for_queued(single_slot_server, 2)
        first.close()
        wait_for_queued(single_slot_server, 1)
        holder.close()
        second.read_until(b"Hello there, friend.")


@pytest.mark.parametrize("n", [2, 3])
def test_a_disconnect_cancels_choices_that_take_turns(single_slot_server: LiveServer, stream: bool, n: int) -> None:
    """Some choices run and some wait for their turn at the disconnect."""
    with raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", n=n, stream=stream)) as caller:
        if stream:
            caller.read_until(b"so far")
        wait_for_running(single_slot_server, 1)


def test_a_disconnect_cancels_queued_choices(single_slot_server: LiveServer, stream: bool) -> None:
    with raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with raw_request(single_slot_server, CHAT.path, CHAT.body("text", n=2, stream=stream)):
            wait_for_queued(single_slot_server, 1)
        wait_for_queued(single_slot_server, 0)


def test_a_disconnect_cancels_a_legacy_completion(single_slot_server: LiveServer, stream: bool) -> None:
    body = {"model": "demo", "prompt": "endless stream", "stream": stream}
    with raw_request(single_slot_server, "/v1/completions", body):
        wait_for_running(single_slot_server, 1)


# --- deduplication of identical requests ------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0}


def joined_requests(server: LiveServer) -> float:
    return sum(server.app.gateway.metrics.joined._series.values())


def test_a_resend_reads_the_running_reply_and_outlives_the_first_client(
    single_slot_server: LiveServer, protocol: Protocol
) -> None:
    body = protocol.body("endless stream", stream=True) | GREEDY
    before = joined_requests(single_slot_server)
    with raw_request(single_slot_server, protocol.path, body) as second:
        with raw_request(single_slot_server, protocol.path, body) as first:
            first.read_until(b"so far")
            second.read_until(b"so far")
            assert joined_requests(single_slot_server) == before + 1
            wait_for_running(single_slot_server, 1)
        wait_for_running(single_slot_server, 1)
        with raw_request(
            single_slot_server, protocol.path, body
        ) as third:  # the reply continues and can still be joined
            third.read_until(b"so far")
            assert joined_requests(single_slot_server) == before + 2
    wait_until_idle(single_slot_server)


def test_sampled_requests_are_not_deduplicated(single_slot_server: LiveServer) -> None:
    chat, before = CHAT, joined_requests(single_slot_server)
    body = chat.body("endless stream", stream=True) | {"temperature": 0.8}
    with raw_request(single_slot_server, chat.path, body) as first:
        first.read_until(b"so far")
        with raw_request(single_slot_server, chat.path, body):
            wait_for_queued(single_slot_server, 1)
            assert joined_requests(single_slot_server) == before
    wait_until_idle(single_slot_server)
