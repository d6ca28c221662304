"""Requests that came together go in step, one that is alone straight through, and a client may leave in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from modelyard.app import Yard
from modelyard.http.farewell import Farewells, enlist
from modelyard.http.together import has_company, introduce, next_turn
from tests.http.front import load_all, yard

ASKED = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()


class Client:
    """One request to the app as our own connection makes it, and what was sent back."""

    def __init__(self, running: set[object]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.farewells: Farewells = set()
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
        }
        running.add(self)
        introduce(self.scope, running)
        enlist(self.scope, self.farewells)

    async def receive(self) -> Any:
        return {"type": "http.request", "body": ASKED, "more_body": False}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def said(self) -> str:
        return str(json.loads(self.sent[1]["body"])["choices"][0]["message"]["content"])


@pytest.fixture
async def made() -> AsyncIterator[Yard]:
    """Loaded, so that the requests of a test wait for nothing but each other."""
    made = yard()
    try:
        await load_all(made)
        yield made
    finally:
        await made.stop()
        await made.gateway.close()


def test_company_is_more_than_oneself_and_only_where_it_is_known() -> None:
    scope: dict[str, Any] = {}
    assert not has_company(scope)
    running = {1}
    introduce(scope, running)
    assert not has_company(scope)
    running.add(2)
    assert has_company(scope)


async def test_in_a_turn_everybody_else_goes_one_step() -> None:
    order: list[str] = []

    async def one(name: str) -> None:
        order.append(f"{name} begins")
        await next_turn()
        order.append(f"{name} ends")

    await asyncio.gather(one("a"), one("b"))
    assert order == ["a begins", "b begins", "a ends", "b ends"]


async def test_requests_that_came_together_are_all_placed_before_the_first_is_answered(made: Yard) -> None:
    running: set[object] = set()
    clients = [Client(running) for _ in range(3)]
    tasks = [asyncio.ensure_future(made.app(c.scope, c.receive, c.send)) for c in clients]
    async with asyncio.timeout(60):
        while not all(client.farewells for client in clients):
            assert not any(client.sent for client in clients)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert [client.said for client in clients] == ["Hello there."] * 3


async def test_a_request_that_is_alone_is_answered_in_one_go(made: Yard) -> None:
    client = Client(set())
    going = made.app(client.scope, client.receive, client.send).__await__()
    with pytest.raises(StopIteration):
        next(going)
    assert client.said == "Hello there."


async def test_a_client_that_leaves_in_between_is_not_answered_and_its_place_is_free_again(made: Yard) -> None:
    leaving = Client({object()})
    task = asyncio.ensure_future(made.app(leaving.scope, leaving.receive, leaving.send))
    async with asyncio.timeout(60):
        while not leaving.farewells:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for cancel in tuple(leaving.farewells):
            cancel()
        await task
    assert leaving.sent == []
    assert all(status.running == 0 for status in made.scheduler.status().values())
