"""A client that leaves frees its place at once, wherever its request stands, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.servers import calling, is_idle, is_running, is_waiting, narrow, stats
from tests.e2e.wires import WIRES, Wire
from tests.live_server import LiveServer, live_server

CHAT = WIRES["chat"]


@pytest.fixture(scope="module")
def one_place() -> Iterator[LiveServer]:
    with live_server(narrow()) as running:
        yield running


@pytest.fixture(autouse=True)
def _goes_on(one_place: LiveServer) -> Iterator[None]:
    """Whatever a test did, the only place is free afterwards and the next client is answered."""
    yield
    is_idle(one_place)
    reply = httpx.post(one_place.url + CHAT.path, json=CHAT.body("text"))
    assert CHAT.whole(reply.json()).text == "Hello there, friend."


def test_in_the_queue(one_place: LiveServer, wire: Wire, stream: bool) -> None:
    with calling(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        begun = stats(one_place).evaluated_tokens + stats(one_place).reused_tokens
        with calling(one_place, wire.path, wire.body("text of one who waits", stream=stream)):
            is_waiting(one_place, 1)
        is_waiting(one_place, 0)
        is_running(one_place, 1)
    is_idle(one_place)
    # The place came free with nobody in line: a waiter that was still there would have been read by the engine.
    assert stats(one_place).evaluated_tokens + stats(one_place).reused_tokens == begun


def test_in_prefill(one_place: LiveServer, wire: Wire, stream: bool) -> None:
    with calling(one_place, wire.path, wire.body("endless prefill", stream=stream)):
        is_running(one_place, 1)


def test_in_the_stream(one_place: LiveServer, wire: Wire) -> None:
    with calling(one_place, wire.path, wire.body("endless stream", stream=True)) as caller:
        caller.reads(b"so far")
        assert stats(one_place).running == 1


def test_while_a_whole_reply_is_made(one_place: LiveServer, wire: Wire) -> None:
    with calling(one_place, wire.path, wire.body("endless stream")):
        is_running(one_place, 1)


def test_those_behind_it_move_up(one_place: LiveServer, wire: Wire) -> None:
    with (
        calling(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder,
        calling(one_place, wire.path, wire.body("endless prefill")) as first,
        calling(one_place, wire.path, wire.body("text")) as second,
    ):
        is_waiting(one_place, 2)
        first.leaves()
        is_waiting(one_place, 1)
        holder.leaves()
        second.reads(b"Hello there, friend.")


@pytest.mark.parametrize("n", [2, 3])
def test_with_several_answers_on_one_place(one_place: LiveServer, stream: bool, n: int) -> None:
    """They take turns: some run and some wait for their turn when the client leaves."""
    with calling(one_place, CHAT.path, CHAT.body("endless stream", n=n, stream=stream)) as caller:
        if stream:
            caller.reads(b"so far")
        is_running(one_place, 1)


def test_with_several_answers_in_the_queue(one_place: LiveServer, stream: bool) -> None:
    with calling(one_place, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        with calling(one_place, CHAT.path, CHAT.body("text", n=2, stream=stream)):
            is_waiting(one_place, 1)
        is_waiting(one_place, 0)


def test_of_the_legacy_endpoint(one_place: LiveServer, stream: bool) -> None:
    body = {"model": "demo", "prompt": "endless stream", "stream": stream}
    with calling(one_place, "/v1/completions", body):
        is_running(one_place, 1)
