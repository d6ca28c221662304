"""An identical resend over HTTP: one job in the engine, and a client that leaves takes nothing from the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.helpers import raw_request, single_slot_config, wait_for_queued, wait_for_running, wait_until_idle
from tests.e2e.protocols import CHAT, Protocol
from tests.live_server import LiveServer, live_server

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def single_slot_server() -> Iterator[LiveServer]:
    """What joins needs no second place; what does not would wait for it."""
    with live_server(single_slot_config()) as running:
        yield running


def joined_requests(server: LiveServer) -> float:
    return sum(server.app.gateway.metrics._joined.values())


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
        ) as third:  # the answer goes on, and can still be joined
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
