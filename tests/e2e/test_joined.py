"""An identical resend over HTTP: one job in the engine, and a client that leaves takes nothing from the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.servers import calling, is_idle, is_running, is_waiting, narrow
from tests.e2e.wires import WIRES, Wire
from tests.live_server import LiveServer, live_server

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def one_place() -> Iterator[LiveServer]:
    """What joins needs no second place; what does not would wait for it."""
    with live_server(narrow()) as running:
        yield running


def joined(served: LiveServer) -> float:
    return sum(served.yard.gateway.metrics._joined.values())


def test_a_resend_hears_all_of_it_and_outlives_the_first_client(one_place: LiveServer, wire: Wire) -> None:
    body = wire.body("endless stream", stream=True) | GREEDY
    before = joined(one_place)
    with calling(one_place, wire.path, body) as second:
        with calling(one_place, wire.path, body) as first:
            first.reads(b"so far")
            second.reads(b"so far")
            assert joined(one_place) == before + 1
            is_running(one_place, 1)
        is_running(one_place, 1)
        with calling(one_place, wire.path, body) as third:  # the answer goes on, and can still be joined
            third.reads(b"so far")
            assert joined(one_place) == before + 2
    is_idle(one_place)


def test_requests_that_are_left_to_chance_do_not_join(one_place: LiveServer) -> None:
    chat, before = WIRES["chat"], joined(one_place)
    body = chat.body("endless stream", stream=True) | {"temperature": 0.8}
    with calling(one_place, chat.path, body) as first:
        first.reads(b"so far")
        with calling(one_place, chat.path, body):
            is_waiting(one_place, 1)
            assert joined(one_place) == before
    is_idle(one_place)
