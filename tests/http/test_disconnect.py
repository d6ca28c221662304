"""A client that leaves is noticed under our own server and under any other."""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.http.disconnect import Farewells, enlist, watch, withdraw


class Work:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


async def never() -> Any:
    await asyncio.Event().wait()


async def test_our_own_connection_tells_those_who_listen_and_nobody_else():
    farewells: Farewells = set()
    scope: dict[str, Any] = {}
    enlist(scope, farewells)
    here, gone = Work(), Work()
    watch(scope, never, here)
    watch(scope, never, gone)()
    for cancel in tuple(farewells):
        cancel()
    assert here.cancelled.is_set()
    assert not gone.cancelled.is_set()


async def test_whoever_watches_after_the_client_has_left_hears_of_it() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {}
    enlist(scope, set())
    withdraw(scope)
    work = Work()
    watch(scope, receive, work)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_under_another_server_the_disconnect_message_does_it():
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    work = Work()
    watch({}, receive, work)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_whoever_stops_watching_is_left_alone():
    asked = asyncio.Event()

    async def receive() -> Any:
        asked.set()
        await never()

    work = Work()
    unwatch = watch({}, receive, work)
    await asyncio.wait_for(asked.wait(), 60)
    unwatch()
    await asyncio.sleep(0)
    assert not work.cancelled.is_set()
