"""One replica of a model: its engine's life, and the places in it. It reports; the depot decides."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from modelyard.core.engine import Engine
from modelyard.core.errors import Internal, ModelyardError, Timeout
from modelyard.core.pool import ModelSpec, ReplicaState
from modelyard.scheduler.memory_planner import DeviceBytes, MemoryMeter
from modelyard.scheduler.policy import ReplicaView

log = logging.getLogger(__name__)


class ReplicaObserver(Protocol):
    """Where slow work comes back to, always on the loop's thread."""

    def ready(self, replica: Replica) -> None: ...
    def failed(self, replica: Replica, error: ModelyardError) -> None: ...
    def lost(self, replica: Replica, error: ModelyardError) -> None: ...
    def closed(self, replica: Replica) -> None: ...
    def progressed(self, replica: Replica) -> None: ...


class Replica:
    """`granted` counts the requests of its present engine; `took` is what opening that engine took of memory, and
    `moves` tells whether that is to be trusted."""

    def __init__(
        self,
        id: int,
        model: str,
        blueprint: ModelSpec,
        reports: ReplicaObserver,
        *,
        load_timeout_s: float,
        gauge: MemoryMeter | None = None,
    ) -> None:
        self.id, self.model, self.blueprint = id, model, blueprint
        self.state: ReplicaState = "placing"
        self.progress, self.doing, self.reason = 0.0, "", ""
        self.since = self.began = self.ready_since = self.idle_since = 0.0
        self.restarts = self.running = self.granted = self.moves = 0
        self.evicting = False
        self.site = ""  # the machine that was chosen for it; none: this one
        self.bytes: DeviceBytes = {}
        self.took: DeviceBytes | None = None
        self.engine: Engine | None = None
        self._reports, self._load_timeout_s, self._gauge = reports, load_timeout_s, gauge
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._empty()

    # --- its places ------------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        """A new engine has all its places free, whoever may still hold one in the old."""
        caches = self.blueprint.caches
        self.running = self.granted = 0
        self.free = {name: info.parallel for name, info in caches.items()}
        self.most = _most(self.blueprint)

    def adjust(self, blueprint: ModelSpec) -> None:
        """The same engine, run otherwise: those who run stay, even where fewer may now."""
        self.most = _most(blueprint)
        self.blueprint = blueprint

    def has_room(self, cache: str, weight: int) -> bool:
        """None in a lost engine: its jobs hear of that before this replica does, and come back at once."""
        if self.running + weight > self.most or weight > self.free.get(cache, 0):
            return False
        return self.engine is not None and not self.engine.lost.done()

    def take(self, cache: str, weight: int) -> bool:
        if not self.has_room(cache, weight):
            return False
        self.free[cache] -= weight
        self.running += weight
        self.granted += 1
        return True

    def give(self, cache: str, weight: int, engine: Engine, now: float) -> None:
        if engine is not self.engine:  # of an engine that is gone: its places went with it
            return
        self.free[cache] += weight
        self.running -= weight
        if not self.running:
            self.idle_since = now

    @property
    def view(self) -> ReplicaView:
        return ReplicaView(
            id=self.id,
            state=self.state,
            bytes=self.bytes,
            running=self.running,
            ready_since=self.ready_since,
            idle_since=self.idle_since,
            evicting=self.evicting,
        )

    # --- its life --------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        pid: Any = getattr(self.engine, "pid", None)
        return pid if isinstance(pid, int) else None

    def settle(self) -> bool:
        """Notes on which machine its engine is open; True where that is another one than was chosen."""
        found: Any = getattr(self.engine, "site", None)
        chosen, self.site = self.site, found if isinstance(found, str) else self.site
        return chosen != self.site

    def start(self) -> None:
        self.state, self.progress, self.doing = "loading", 0.0, ""
        self._task = asyncio.get_running_loop().create_task(self._live())

    def close(self) -> None:
        """Whatever it does now, it ends. `closed` is reported when its engine is gone."""
        self.state = "closing"
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def gone(self) -> None:
        if self._closing is not None:
            await self._closing

    async def _live(self) -> None:
        try:
            before = await self._read()
            engine = self.engine = self._made()
            async with asyncio.timeout(self._load_timeout_s):
                await engine.open(self._progress)
            self.took = _grown(before, await self._read())
        except Exception as error:
            await self._discard()
            self._reports.failed(self, self._fault(error))
            return
        self._empty()
        self._reports.ready(self)
        lost = await asyncio.shield(engine.lost)
        await self._discard()
        self._reports.lost(self, lost)

    def _made(self) -> Engine:
        there = self.blueprint.make_at if self.site else None
        return self.blueprint.make() if there is None else there(self.site)

    def _fault(self, error: Exception) -> ModelyardError:
        if isinstance(error, ModelyardError):
            return error
        if isinstance(error, TimeoutError):
            return Timeout(f"loading took longer than {self._load_timeout_s:g} s (scheduler.load_timeout_s)")
        log.error("a model could not be loaded", exc_info=error)
        return Internal(f"{type(error).__name__}: {error}", id="load")

    async def _read(self) -> DeviceBytes | None:
        return None if self._gauge is None else await asyncio.to_thread(self._gauge)

    def _progress(self, done: float, what: str) -> None:
        self.progress, self.doing = done, what
        self._reports.progressed(self)

    async def _discard(self) -> None:
        """In a task of its own: an engine that is half closed when nobody wants it any more is closed to the end."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._ending = asyncio.get_running_loop().create_task(_end(engine))
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._discard()
        self._reports.closed(self)


def _most(blueprint: ModelSpec) -> int:
    return blueprint.target_inflight or sum(info.parallel for info in blueprint.caches.values())


async def _end(engine: Engine) -> None:
    """An engine that cannot even be closed must not keep its successor from being opened."""
    try:
        await engine.close()
    except Exception:
        log.exception("an engine could not be closed")


def _grown(before: DeviceBytes | None, after: DeviceBytes | None) -> DeviceBytes | None:
    if before is None or after is None:
        return None
    return {device: max(0, amount - before.get(device, 0)) for device, amount in after.items()}
