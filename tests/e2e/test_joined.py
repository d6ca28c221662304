"""An identical resend over HTTP: one job in the engine, and a client that leaves takes nothing from the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.helpers import raw_request, single_slot_config, wait_for_queued, wait_for_running, wait_until_idle
from tests.e2e.protocols import PROTOCOLS, Protocol
from tests.live_server import LiveServer, live_server

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def one_place() -> Iterator[LiveServer]:
    """What joins needs no second place; what does not would wait for it."""
    with live_server(single_slot_config()) as running:
        yield running


def joined(served: LiveServer) -> float:
    return sum(served.app.gateway.metrics._joined.values())


def test_a_resend_hears_all_of_it_and_outlives_the_first_client(one_place: LiveServer, wire: Protocol) -> None:
    body = wire.body("endless stream", stream=True) | GREEDY
    before = joined(one_place)
    with raw_request(one_place, wire.path, body) as second:
        with raw_request(one_place, wire.path, body) as first:
            first.reads(b"so far")
            second.reads(b"so far")
            assert joined(one_place) == before + 1
            wait_for_running(one_place, 1)
        wait_for_running(one_place, 1)
        with raw_request(one_place, wire.path, body) as third:  # the answer goes on, and can still be joined
            third.reads(b"so far")
            assert joined(one_place) == before + 2
    wait_until_idle(one_place)


def test_requests_that_are_left_to_chance_do_not_join(one_place: LiveServer) -> None:
    chat, before = PROTOCOLS["chat"], joined(one_place)
    body = chat.body("endless stream", stream=True) | {"temperature": 0.8}
    with raw_request(one_place, chat.path, body) as first:
        first.reads(b"so far")
        with raw_request(one_place, chat.path, body):
            wait_for_queued(one_place, 1)
            assert joined(one_place) == before
    wait_until_idle(one_place)
