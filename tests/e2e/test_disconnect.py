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
from tests.e2e.protocols import PROTOCOLS, Protocol
from tests.live_server import LiveServer, live_server

CHAT = PROTOCOLS["chat"]


@pytest.fixture(scope="module")
def one_place() -> Iterator[LiveServer]:
    with live_server(single_slot_config()) as running:
        yield running


@pytest.fixture(autouse=True)
def _goes_on(one_place: LiveServer) -> Iterator[None]:
    """Whatever a test did, the only place is free afterwards and the next client is answered."""
    yield
    wait_until_idle(one_place)
    reply = httpx.post(one_place.url + CHAT.path, json=CHAT.body("text"))
    assert CHAT.whole(reply.json()).text == "Hello there, friend."


def test_in_the_queue(one_place: LiveServer, wire: Protocol, stream: bool) -> None:
    with raw_request(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        begun = engine_stats(one_place).evaluated_tokens + engine_stats(one_place).reused_tokens
        with raw_request(one_place, wire.path, wire.body("text of one who waits", stream=stream)):
            wait_for_queued(one_place, 1)
        wait_for_queued(one_place, 0)
        wait_for_running(one_place, 1)
    wait_until_idle(one_place)
    # The place came free with nobody in line: a waiter that was still there would have been read by the engine.
    assert engine_stats(one_place).evaluated_tokens + engine_stats(one_place).reused_tokens == begun


def test_in_prefill(one_place: LiveServer, wire: Protocol, stream: bool) -> None:
    with raw_request(one_place, wire.path, wire.body("endless prefill", stream=stream)):
        wait_for_running(one_place, 1)


def test_in_the_stream(one_place: LiveServer, wire: Protocol) -> None:
    with raw_request(one_place, wire.path, wire.body("endless stream", stream=True)) as caller:
        caller.reads(b"so far")
        assert engine_stats(one_place).running == 1


def test_while_a_whole_reply_is_made(one_place: LiveServer, wire: Protocol) -> None:
    with raw_request(one_place, wire.path, wire.body("endless stream")):
        wait_for_running(one_place, 1)


def test_those_behind_it_move_up(one_place: LiveServer, wire: Protocol) -> None:
    with (
        raw_request(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder,
        raw_request(one_place, wire.path, wire.body("endless prefill")) as first,
        raw_request(one_place, wire.path, wire.body("text")) as second,
    ):
        wait_for_queued(one_place, 2)
        first.leaves()
        wait_for_queued(one_place, 1)
        holder.leaves()
        second.reads(b"Hello there, friend.")


@pytest.mark.parametrize("n", [2, 3])
def test_with_several_answers_on_one_place(one_place: LiveServer, stream: bool, n: int) -> None:
    """They take turns: some run and some wait for their turn when the client leaves."""
    with raw_request(one_place, CHAT.path, CHAT.body("endless stream", n=n, stream=stream)) as caller:
        if stream:
            caller.reads(b"so far")
        wait_for_running(one_place, 1)


def test_with_several_answers_in_the_queue(one_place: LiveServer, stream: bool) -> None:
    with raw_request(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        with raw_request(one_place, CHAT.path, CHAT.body("text", n=2, stream=stream)):
            wait_for_queued(one_place, 1)
        wait_for_queued(one_place, 0)


def test_of_the_legacy_endpoint(one_place: LiveServer, stream: bool) -> None:
    body = {"model": "demo", "prompt": "endless stream", "stream": stream}
    with raw_request(one_place, "/v1/completions", body):
        wait_for_running(one_place, 1)
