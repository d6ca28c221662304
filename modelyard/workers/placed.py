"""An engine as the scheduler sees it: open in some worker, granted to gateways, never asked anything itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, cast
from uuid import uuid4

from modelyard.core.engine import Engine, EngineInfo, EngineSpec, EngineStats, OnProgress
from modelyard.core.errors import ModelyardError
from modelyard.workers.client import Remote, remote
from modelyard.workers.crew import NOWHERE, Crew, Hire
from modelyard.workers.hosted import order_of
from modelyard.workers.messages import Forget
from modelyard.workers.scheduling import EngineAt

_CLOSE_S = 60.0  # an engine may have much to save
_GIVE_UP_S = 5.0  # one that was never open has nothing


class Placed:
    """Not quite an Engine: it opens, closes, tells its figures and its death; gateways ask it, through its worker."""

    def __init__(self, crew: Crew, backend: str, spec: EngineSpec, identity: str, site: str = NOWHERE) -> None:
        self._crew, self._backend, self._spec, self._identity = crew, backend, spec, identity
        self.site = site  # the machine that it is to go to, and once it is open the one on which it is
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(backend, dict(spec.caches))
        self.kind: Literal["text", "chat"] = "text"
        self.embeds = False
        self.id = ""
        self._hire: Hire | None = None
        self._engine: Remote | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Placed {self._spec.model} {self.id}>"

    @property
    def pid(self) -> int | None:
        welcome = self._hire.session.welcome if self._hire is not None else None
        return None if welcome is None else welcome.pid

    @property
    def endpoint(self) -> str:
        return "" if self._hire is None else self._hire.session.endpoint

    def log_tail(self) -> list[str]:
        return [] if self._hire is None else self._hire.words()

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "looking for a worker")
        self._hire = hire = await self._crew.hire(self._identity, self._spec.model, self._spec.python, self.site)
        self.site = hire.site
        order = order_of(hire.held or uuid4().hex[:16], self._backend, self._spec, self._identity)
        self.id = order.engine
        opening = asyncio.get_running_loop().create_task(hire.session.open(order, progress))
        try:
            waiting: set[Any] = {opening} if hire.ended is None else {opening, hire.ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if hire.ended is not None and hire.ended.done():
                raise hire.death()
            opened = opening.result()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        self.info, self.kind, self.embeds = opened.info, opened.kind, opened.embeds
        self._engine = remote(hire.session, opened, self.lost)
        if hire.ended is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(hire, hire.ended))

    async def _watch(self, hire: Hire, ended: asyncio.Task[int]) -> None:
        await asyncio.shield(ended)
        hire.session.end(hire.death())

    def at(self) -> EngineAt:
        return EngineAt(self._spec.model, self.endpoint, self.id, self.kind, self.info, self.embeds)

    def sign(self) -> Callable[[], bool]:
        """Tells whether the worker has shown since this call that it lives, by answering a beat that was sent after
        it. What it says of an engine's death comes before that."""
        hire = self._hire
        sent = 0 if hire is None else hire.session.beats
        return lambda: hire is not None and hire.session.answered > sent

    async def forget(self, gateway: str) -> None:
        """A gateway is gone: done when nothing runs here for it any more, or this engine is gone, too."""
        if self._hire is not None and not self._hire.session.over:
            await self._hire.session.ask(lambda id: Forget(id, gateway))

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    async def close(self) -> None:
        """Idempotent. A worker that leaves by itself is not hurried."""
        if self._watching is not None:
            self._watching.cancel()
        hire, self._hire = self._hire, None
        if hire is None:
            return
        session, dead = hire.session, self.lost.done()
        if hire.enlisted is not None and session.over:  # the worker itself, not this engine alone: none goes there now
            self._crew.gone(hire.enlisted.name)
        opened = self._engine is not None
        # One that was given up while it opened goes with its worker, unless others have that one.
        if not dead and not session.over and (opened or (self.id and hire.enlisted is not None)):
            try:
                async with asyncio.timeout(_CLOSE_S if opened else _GIVE_UP_S):
                    await session.close_engine(self.id)
            except TimeoutError:
                dead = True
        if hire.enlisted is not None:
            hire.enlisted.used -= 1
        await hire.end(kill=dead and not session.leaving)


def placed(crew: Crew, backend: str, spec: EngineSpec, identity: str, site: str = NOWHERE) -> Engine:
    """For a Blueprint's `make`: the scheduler itself uses nothing of an engine that this one lacks."""
    return cast(Engine, Placed(crew, backend, spec, identity, site))
