"""Who wants to know that a client has left: its work is cancelled the moment the connection is lost.

Our own connections tell it directly (`Farewells` in the request's scope); under another server the question is asked
by a task that waits for `http.disconnect`. A task costs more than all the rest of watching, so it is the second choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Receive, Scope

_KEY = "modelyard.farewells"

Farewells = set[Callable[[], None]]


class Cancellable(Protocol):
    def cancel(self) -> None: ...


def enlist(scope: Scope, farewells: Farewells) -> None:
    scope[_KEY] = farewells


def withdraw(scope: Scope) -> None:
    """The client has left before anybody watched: whoever does later has to ask, and is told."""
    scope.pop(_KEY, None)


def watch(scope: Scope, receive: Receive, work: Cancellable) -> Callable[[], object]:
    """Cancel the work when the client leaves; call what is returned when there is nothing left to cancel."""
    farewells: Farewells | None = scope.get(_KEY)
    if farewells is None:
        return asyncio.get_running_loop().create_task(_wait(receive, work)).cancel
    cancel = work.cancel
    farewells.add(cancel)
    return lambda: farewells.discard(cancel)


async def _wait(receive: Receive, work: Cancellable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()
