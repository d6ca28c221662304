"""A server that runs as our child: started, waited for until it answers, and why it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from modelyard.core.errors import Timeout, Unavailable
from modelyard.engines.managed.listening import Folder
from modelyard.engines.upstream.client import Client, Place
from modelyard.processes.child_process import ChildProcess, describe_exit

_LOOK = 0.1  # seconds between two looks


class Program(Struct, frozen=True, kw_only=True):
    """How a server is started and spoken to. `reason` reads out of its last lines why it ended; `loads` names what it
    is to load; `folder` is its own and goes with it."""

    name: str
    loads: str
    argv: Sequence[str]
    env: Mapping[str, str]
    place: Place
    reason: Callable[[Sequence[str]], str]
    folder: Folder | None = None


class Server:
    """A started program and the client that speaks to it."""

    def __init__(self, program: Program, child: ChildProcess, client: Client) -> None:
        self.program, self.child, self.client = program, child, client

    @classmethod
    async def start(cls, program: Program) -> Server:
        try:
            child = await ChildProcess.start(program.argv, program.env)
        except BaseException:
            if program.folder is not None:
                program.folder.cleanup()
            raise
        return cls(program, child, Client(program.place))

    async def until(self, is_ready: Callable[[], Awaitable[bool]], limit: float) -> None:
        """Asks again and again, until it is ready, has ended, or has taken longer than `limit` seconds."""
        try:
            async with asyncio.timeout(limit):
                while not await is_ready():
                    await asyncio.wait({self.child.ended}, timeout=_LOOK)
                    if self.child.ended.done():
                        raise self.stillbirth()
        except TimeoutError:
            last = self.child.log.tail(1) or "it wrote nothing"
            raise Timeout(f"{self.program.name} was not ready after {limit:g} s: {last}", code="load_timeout") from None

    def death(self) -> Unavailable:
        """How it ended, and why in its own words."""
        return Unavailable(f"{self.program.place.name} {self._end()}")

    def stillbirth(self) -> Unavailable:
        told = f"{self.program.name} {self._end()} (it was to load {self.program.loads})"
        return Unavailable(told, code="load_failed")

    def _end(self) -> str:
        end, why = describe_exit(self.child.ended.result()), self.program.reason(self.child.log.lines())
        return f"{end}: {why}" if why else end

    async def stop(self) -> None:
        """Idempotent."""
        await self.client.close()
        await self.child.stop()
        if self.program.folder is not None:
            self.program.folder.cleanup()
