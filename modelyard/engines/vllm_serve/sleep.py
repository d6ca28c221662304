"""Unloaded servers that sleep instead of exiting: they release the GPU memory, and a later load wakes them up.

Every load creates a new engine, so sleeping servers are kept per event loop. A sleeping server is stopped when its time
is over, when it exits, and when the event loop ends.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakKeyDictionary

from modelyard.core.errors import ModelyardError
from modelyard.engines.managed import ManagedServer

log = logging.getLogger(__name__)

_LEVEL = 1  # the weights move to RAM; level 2 would discard them


class SleepingServers:
    def __init__(self) -> None:
        self._servers: dict[str, list[tuple[ManagedServer, asyncio.Task[None]]]] = {}

    def __len__(self) -> int:
        return sum(len(servers) for servers in self._servers.values())

    async def put_to_sleep(self, key: str, server: ManagedServer, seconds: float) -> None:
        """Stops the server if it cannot sleep."""
        if not await _post(server, f"/sleep?level={_LEVEL}"):
            await server.stop()
            return
        task = asyncio.get_running_loop().create_task(self._stop_after(key, server, seconds))
        self._servers.setdefault(key, []).append((server, task))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not stop the server

    async def wake_up(self, key: str) -> ManagedServer | None:
        """A server with this key, awake; None if there is none."""
        while servers := self._servers.get(key):
            server, task = servers.pop()
            task.cancel()
            await asyncio.wait({task})
            if not server.has_exited and await _post(server, "/wake_up"):
                return server
            await server.stop()
        return None

    async def clear(self) -> None:
        """Stops all sleeping servers, as the end of the event loop does."""
        tasks = [task for servers in self._servers.values() for _, task in servers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_after(self, key: str, server: ManagedServer, seconds: float) -> None:
        try:
            await server.wait_exited(seconds)
        finally:
            before = self._servers.get(key, [])
            self._servers[key] = [entry for entry in before if entry[0] is not server]
            if len(self._servers[key]) < len(before):  # else it was woken up
                await server.stop()


async def _post(server: ManagedServer, path: str) -> bool:
    try:
        status, reply = await server.upstream.request_json("POST", path)
    except ModelyardError as error:
        status, reply = 0, error.message
    if status != 200:
        log.warning("%s: %s failed (%s: %s); stopping it", server.command.address.name, path, status, reply)
    return status == 200


_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, SleepingServers] = WeakKeyDictionary()


def sleeping_servers() -> SleepingServers:
    """The sleeping servers of the running event loop."""
    return _BY_LOOP.setdefault(asyncio.get_running_loop(), SleepingServers())
