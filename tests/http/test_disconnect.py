"""A client disconnect cancels its work, under our server and under any other."""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.http.disconnect import DisconnectCallbacks, cancel_on_disconnect, offer_callbacks, withdraw_callbacks


class Work:
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_lost_connection_cancels_the_work_that_is_still_watched():
    callbacks: DisconnectCallbacks = set()
    scope: dict[str, Any] = {}
    offer_callbacks(scope, callbacks)
    here, gone = Work(), Work()
    cancel_on_disconnect(scope, never, here)
    cancel_on_disconnect(scope, never, gone)()
    for cancel in tuple(callbacks):
        cancel()
    assert here.cancelled.is_set()
    assert not gone.cancelled.is_set()


async def test_work_that_starts_after_the_disconnect_is_cancelled() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {}
    offer_callbacks(scope, set())
    withdraw_callbacks(scope)
    work = Work()
    cancel_on_disconnect(scope, receive, work)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_under_another_server_the_disconnect_message_cancels_the_work():
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    work = Work()
    cancel_on_disconnect({}, receive, work)
    await asyncio.wait_for(work.cancelled.wait(), 60)


async def test_work_that_is_no_longer_watched_is_not_cancelled():
    asked = asyncio.Event()

    async def receive() -> Any:
        asked.set()
        await never()

    work = Work()
    stop_watching = cancel_on_disconnect({}, receive, work)
    await asyncio.wait_for(asked.wait(), 60)
    stop_watching()
    await asyncio.sleep(0)
    assert not work.cancelled.is_set()
