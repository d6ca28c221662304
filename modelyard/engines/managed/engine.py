"""A ChatEngine in front of a server of our own: started, watched, forwarded to, and its death explained."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from modelyard.core.engine import EngineInfo, EngineSpec, EngineStats, Generation, OnProgress
from modelyard.core.errors import Incomplete, ModelyardError, Unavailable
from modelyard.core.events import Event, Failed, Finished
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.engines.managed.server import Server
from modelyard.engines.upstream.faults import LOST, UNREACHABLE
from modelyard.engines.upstream.jobs import Jobs, Say
from modelyard.protocols import openai_chat

_WIRE = cast(WireProtocol, openai_chat)
_PATH = "/v1/chat/completions"


class ManagedEngine(ABC):
    """Made on the loop that it will run on. `verdict_s`: how long a broken answer may take to prove a death."""

    verdict_s = 5.0

    def __init__(self, spec: EngineSpec, info: EngineInfo, start_timeout_s: float) -> None:
        self._spec, self._start_timeout_s, self.info = spec, start_timeout_s, info
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self._jobs = Jobs()
        self._server: Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reused = self._evaluated = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec.model} pid {self.pid} {len(self._jobs)} running>"

    # --- what each kind says ------------------------------------------------------------------------------------------

    @abstractmethod
    async def _started(self, progress: OnProgress) -> Server: ...

    @abstractmethod
    async def _is_ready(self, server: Server, progress: OnProgress) -> bool: ...

    @abstractmethod
    def _body(self, request: Request) -> bytes: ...

    @abstractmethod
    async def count(self, request: Request) -> int | None: ...

    def _is_ominous(self, error: ModelyardError) -> bool:
        """Whether the error may be the first sign of the server's death."""
        return isinstance(error, Incomplete) or error.code in (LOST, UNREACHABLE)

    async def _let_go(self, server: Server) -> None:
        await server.stop()

    # --- its process --------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return self._server.child.pid if self._server is not None else None

    def log_tail(self, count: int = 100) -> list[str]:
        """The last lines that it wrote."""
        return self._server.child.log.lines()[-count:] if self._server is not None else []

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("the engine was asked to work before it was opened")
        return self._server

    # --- its life -----------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        try:
            self._server = server = await self._started(progress)
            await server.until(lambda: self._is_ready(server, progress), self._start_timeout_s)
        except BaseException:
            await self._stop()
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch(server))
        progress(1.0, "ready")

    async def _watch(self, server: Server) -> None:
        await asyncio.shield(server.child.ended)
        self._die(server)

    def _die(self, server: Server) -> None:
        """Idempotent. `lost` first: who hears of it from a job asks at once for another engine."""
        if not self.lost.done():
            self.lost.set_result(death := server.death())
            self._jobs.refuse(death)

    async def close(self) -> None:
        """Idempotent."""
        was_open = await self._ended_work()
        if self._server is not None:
            await (self._let_go(self._server) if was_open else self._server.stop())

    async def _stop(self) -> None:
        await self._ended_work()
        if self._server is not None:
            await self._server.stop()

    async def _ended_work(self) -> bool:
        """Whether the engine was open and well until now."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
        self._jobs.refuse(Unavailable("the engine was closed"))
        await self._jobs.settled()
        return watching is not None and not self.lost.done()

    # --- its work -----------------------------------------------------------------------------------------------------

    def chat(self, request: Request) -> Generation[Event]:
        async def work(say: Say) -> None:
            server = self._running
            try:
                await server.client.stream(_PATH, self._body(request), _WIRE, self._heard(server, request, say))
            except ModelyardError as error:
                raise await self._explained(error, server, request) from error

        return self._jobs.start(work)

    def _heard(self, server: Server, request: Request, say: Say) -> Say:
        """What the server says, counted; its last word is weighed before it is passed on."""

        async def hear(events: Sequence[Event]) -> bool:
            last = events[-1] if events else None
            if isinstance(last, Finished):
                self._reused += last.usage.cached
                self._evaluated += last.usage.prompt - last.usage.cached
            elif isinstance(last, Failed):
                events = [*events[:-1], Failed(await self._explained(last.error, server, request))]
            return await say(events)

        return hear

    async def _explained(
        self,
        error: ModelyardError,
        server: Server,
        request: Request,  # noqa: ARG002 - for those that can tell more when they ask again
    ) -> ModelyardError:
        """A connection breaks a moment before its process is known to be dead; the process's own words say why."""
        if not self._is_ominous(error):
            return error
        await asyncio.wait({server.child.ended}, timeout=self.verdict_s)
        if not server.child.ended.done():
            return error
        self._die(server)
        return server.death()

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs), reused_tokens=self._reused, evaluated_tokens=self._evaluated)
