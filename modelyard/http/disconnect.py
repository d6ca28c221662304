"""Client disconnects: work is cancelled the moment its connection is lost.

Our connection class (`connection.py`) puts its disconnect callbacks into the request's scope. Under another ASGI server
a task waits for `http.disconnect` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Receive, Scope

_SCOPE_KEY = "modelyard.on_disconnect"

DisconnectCallbacks = set[Callable[[], None]]


class Cancellable(Protocol):
    def cancel(self) -> None: ...


def offer_callbacks(scope: Scope, callbacks: DisconnectCallbacks) -> None:
    scope[_SCOPE_KEY] = callbacks


def withdraw_callbacks(scope: Scope) -> None:
    """The connection is lost: a later `cancel_on_disconnect` must ask `receive`, which reports it."""
    scope.pop(_SCOPE_KEY, None)


def cancel_on_disconnect(scope: Scope, receive: Receive, work: Cancellable) -> Callable[[], object]:
    """Cancel the work when the client disconnects. Call the returned function when the work is done."""
    callbacks: DisconnectCallbacks | None = scope.get(_SCOPE_KEY)
    if callbacks is None:
        return asyncio.get_running_loop().create_task(_wait(receive, work)).cancel
    cancel = work.cancel
    callbacks.add(cancel)
    return lambda: callbacks.discard(cancel)


async def _wait(receive: Receive, work: Cancellable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()
