"""A client that leaves frees its place at once, wherever its request stands, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator

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
    """Whatever a test did, the only place is free afterwards and the next client is answered."""
    yield
    wait_until_idle(single_slot_server)
    reply = httpx.post(single_slot_server.url + CHAT.path, json=CHAT.body("text"))
    assert CHAT.parse_reply(reply.json()).text == "Hello there, friend."


def test_a_disconnect_in_the_queue_removes_the_request(single_slot_server: LiveServer, protocol: Protocol, stream: bool) -> None:
    with raw_request(single_slot_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        prompt_tokens = (
            engine_stats(single_slot_server).evaluated_tokens + engine_stats(single_slot_server).reused_tokens
        )
        with raw_request(single_slot_server, protocol.path, protocol.body("text of one who waits", stream=stream)):
            wait_for_queued(single_slot_server, 1)
        wait_for_queued(single_slot_server, 0)
        wait_for_running(single_slot_server, 1)
    wait_until_idle(single_slot_server)
    # The place came free with nobody in line: a waiter that was still there would have been read by the engine.
    assert (
        engine_stats(single_slot_server).evaluated_tokens + engine_stats(single_slot_server).reused_tokens
        == prompt_tokens
    )


def test_a_disconnect_in_prefill_cancels_the_request(single_slot_server: LiveServer, protocol: Protocol, stream: bool) -> None:
    with raw_request(single_slot_server, protocol.path, protocol.body("endless prefill", stream=stream)):
        wait_for_running(single_slot_server, 1)


def test_a_disconnect_in_the_stream_cancels_the_request(single_slot_server: LiveServer, protocol: Protocol) -> None:
    with raw_request(single_slot_server, protocol.path, protocol.body("endless stream", stream=True)) as caller:
        caller.read_until(b"so far")
        assert engine_stats(single_slot_server).running == 1


def test_a_disconnect_before_an_unstreamed_reply_cancels_the_request(single_slot_server: LiveServer, protocol: Protocol) -> None:
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
    """They take turns: some run and some wait for their turn when the client leaves."""
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
