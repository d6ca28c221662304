"""Servers that sleep instead of having ended: their GPU memory is given back, and a load only wakes them.

An engine is made anew at each load, so what outlives one has its home here: one dormitory an event loop. A sleeper ends
when its time is over, when it dies, and with its loop.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakKeyDictionary

from modelyard.core.errors import ModelyardError
from modelyard.engines.managed.server import Server

log = logging.getLogger(__name__)

_LEVEL = 1  # the weights go to RAM; at 2 they would have to be read anew


class Dormitory:
    def __init__(self) -> None:
        self._beds: dict[str, list[tuple[Server, asyncio.Task[None]]]] = {}

    def __len__(self) -> int:
        return sum(len(beds) for beds in self._beds.values())

    async def lay_down(self, kind: str, server: Server, seconds: float) -> None:
        """A server that cannot sleep is ended."""
        if not await _told(server, f"/sleep?level={_LEVEL}"):
            await server.stop()
            return
        watch = asyncio.get_running_loop().create_task(self._watch(kind, server, seconds))
        self._beds.setdefault(kind, []).append((server, watch))
        await asyncio.sleep(0)  # a watch that is cancelled before its first step would end nothing

    async def wake(self, kind: str) -> Server | None:
        """One of this kind, awake; None where none sleeps or none wakes."""
        while beds := self._beds.get(kind):
            server, watch = beds.pop()
            watch.cancel()
            await asyncio.wait({watch})
            if not server.child.ended.done() and await _told(server, "/wake_up"):
                return server
            await server.stop()
        return None

    async def clear(self) -> None:
        """Ends all that sleep, as the end of the loop does."""
        watches = [watch for beds in self._beds.values() for _, watch in beds]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, kind: str, server: Server, seconds: float) -> None:
        try:
            await asyncio.wait({server.child.ended}, timeout=seconds)
        finally:
            if self._leave(kind, server):  # else it was woken: it is somebody's again
                await server.stop()

    def _leave(self, kind: str, server: Server) -> bool:
        beds = self._beds.get(kind, [])
        left = [bed for bed in beds if bed[0] is not server]
        self._beds[kind] = left
        return len(left) < len(beds)


async def _told(server: Server, path: str) -> bool:
    try:
        status, said = await server.client.ask("POST", path)
    except ModelyardError as error:
        status, said = 0, error.message
    if status != 200:
        log.warning(
            "%s did not answer %s as it should (%s: %s): it is ended", server.program.place.name, path, status, said
        )
    return status == 200


_DORMITORIES: WeakKeyDictionary[asyncio.AbstractEventLoop, Dormitory] = WeakKeyDictionary()


def dormitory() -> Dormitory:
    """The running loop's own."""
    return _DORMITORIES.setdefault(asyncio.get_running_loop(), Dormitory())
