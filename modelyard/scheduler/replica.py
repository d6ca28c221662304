"""One replica of a model: the life of its engine, and its slots. It reports events; the replica manager decides."""

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
    """Receives the results of slow work, always on the loop's thread."""

    def on_ready(self, replica: Replica) -> None: ...
    def on_load_failed(self, replica: Replica, error: ModelyardError) -> None: ...
    def on_lost(self, replica: Replica, error: ModelyardError) -> None: ...
    def on_closed(self, replica: Replica) -> None: ...
    def on_progress(self, replica: Replica) -> None: ...


class Replica:
    """`granted` counts the requests of the current engine. `load_growth` is how much memory opening it took; it is
    valid while `allocation` is the planner's latest. `node` is the chosen machine, "" this one."""

    def __init__(
        self,
        id: int,
        model: str,
        spec: ModelSpec,
        observer: ReplicaObserver,
        *,
        load_timeout_s: float,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.id, self.model, self.spec = id, model, spec
        self.state: ReplicaState = "reserved"
        self.progress, self.phase, self.reason = 0.0, "", ""
        self.since = self.load_started = self.ready_since = self.idle_since = 0.0
        self.restarts = self.running = self.granted = self.allocation = 0
        self.evicting = False
        self.node = ""
        self.bytes: DeviceBytes = {}
        self.load_growth: DeviceBytes | None = None
        self.engine: Engine | None = None
        self._observer, self._load_timeout_s, self._meter = observer, load_timeout_s, meter
        self._life: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closing_engine: asyncio.Task[None] | None = None
        self._reset_slots()

    # --- slots -----------------------------------------------------------------------------------------------------

    def _reset_slots(self) -> None:
        """All slots of a new engine are free, even if leases of the old engine are still held."""
        self.running = self.granted = 0
        self.free_slots = {name: cache.parallel for name, cache in self.spec.caches.items()}
        self.max_running = _max_running(self.spec)

    def update_spec(self, spec: ModelSpec) -> None:
        """The same engine with other limits. Running requests stay, even if the new limit is lower."""
        self.max_running = _max_running(spec)
        self.spec = spec

    def has_room(self, cache: str, weight: int) -> bool:
        """A lost engine has no room: its requests learn of the loss, and are retried, before this replica does."""
        if self.running + weight > self.max_running or weight > self.free_slots.get(cache, 0):
            return False
        return self.engine is not None and not self.engine.lost.done()

    def acquire(self, cache: str, weight: int) -> bool:
        if not self.has_room(cache, weight):
            return False
        self.free_slots[cache] -= weight
        self.running += weight
        self.granted += 1
        return True

    def release(self, cache: str, weight: int, engine: Engine, now: float) -> None:
        if engine is not self.engine:  # the slots went with the old engine
            return
        self.free_slots[cache] += weight
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

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self.state in ("draining", "closing")

    @property
    def pid(self) -> int | None:
        pid: Any = getattr(self.engine, "pid", None)
        return pid if isinstance(pid, int) else None

    def update_node(self) -> bool:
        """Record where the engine is open. Returns whether that differs from the chosen node."""
        actual: Any = getattr(self.engine, "node", None)
        chosen, self.node = self.node, actual if isinstance(actual, str) else self.node
        return chosen != self.node

    def start(self) -> None:
        self.state, self.progress, self.phase = "loading", 0.0, ""
        self._life = asyncio.get_running_loop().create_task(self._live())

    def close(self) -> None:
        """Abort whatever it does. `on_closed` is called when its engine is closed."""
        self.state = "closing"
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def wait_closed(self) -> None:
        if self._closing is not None:
            await self._closing

    async def _live(self) -> None:
        try:
            before = await self._read_meter()
            make_at = self.spec.make_at if self.node else None
            engine = self.engine = self.spec.make() if make_at is None else make_at(self.node)
            async with asyncio.timeout(self._load_timeout_s):
                await engine.open(self._on_progress)
            after = await self._read_meter()
        except Exception as error:
            await self._close_engine()
            self._observer.on_load_failed(self, self._to_modelyard_error(error))
            return
        if before is not None and after is not None:
            self.load_growth = {device: max(0, used - before.get(device, 0)) for device, used in after.items()}
        self._reset_slots()
        self._observer.on_ready(self)
        loss = await asyncio.shield(engine.lost)
        await self._close_engine()
        self._observer.on_lost(self, loss)

    def _to_modelyard_error(self, error: Exception) -> ModelyardError:
        if isinstance(error, ModelyardError):
            return error
        if isinstance(error, TimeoutError):
            return Timeout(f"loading took longer than {self._load_timeout_s:g} s (scheduler.load_timeout_s)")
        log.error("loading a model failed", exc_info=error)
        return Internal(f"{type(error).__name__}: {error}", id="load")

    async def _read_meter(self) -> DeviceBytes | None:
        return None if self._meter is None else await asyncio.to_thread(self._meter)

    def _on_progress(self, done: float, phase: str) -> None:
        self.progress, self.phase = done, phase
        self._observer.on_progress(self)

    async def _close_engine(self) -> None:
        """In a separate task, so that cancelling the caller does not leave the engine half closed."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._closing_engine = asyncio.get_running_loop().create_task(_close_quietly(engine))
        if self._closing_engine is not None:
            await asyncio.shield(self._closing_engine)

    async def _close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
            self._life = None  # the traceback of its cancellation refers to the engine
        await self._close_engine()
        self._observer.on_closed(self)


def _max_running(spec: ModelSpec) -> int:
    return spec.target_inflight or sum(cache.parallel for cache in spec.caches.values())


async def _close_quietly(engine: Engine) -> None:
    """A failing close must not prevent the next open."""
    try:
        await engine.close()
    except Exception:
        log.exception("closing an engine failed")
