"""The seam to the model pool: what an administrator may order, what a model's record looks like, and what changes.

Every call is made on the event loop's thread and decides at once. Those that begin something slow return an awaitable:
the work goes on whether or not anybody awaits it, and awaiting it raises what went wrong.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from modelyard.core.engine import AvailableMemory, CacheInfo, Capabilities, Engine, MemoryEstimate
from modelyard.core.lease import ModelState
from modelyard.core.request import Priority

Overrides = Mapping[str, Any]


class ModelSpec(Struct, frozen=True, kw_only=True):
    """All that the pool has to know of a model. Two blueprints of one `identity` make the same engine.

    `altered` makes the blueprint of a load with overrides, or raises InvalidRequest; None: nothing can be overridden.
    `make_at` makes the engine on the machine of this name, where there are several.
    """

    name: str
    caches: Mapping[str, CacheInfo]
    make: Callable[[], Engine]
    make_at: Callable[[str], Engine] | None = None
    estimate: Callable[[AvailableMemory], MemoryEstimate] | None = None  # may read files: it is called in a thread
    altered: Callable[[Overrides], ModelSpec] | None = None
    identity: str = ""
    replicas: int = 1
    replica_max: int = 1
    target_inflight: int | None = None  # requests handed to one replica at a time, over all its caches
    autoload: bool = False
    enabled: bool = False  # loaded when a reload makes it known; at the start the server says when
    idle_ttl_s: float | None = None  # None: never unloaded for being idle


# --- what the pool looks like ---------------------------------------------------------------------------------------

ReplicaState = Literal["placing", "loading", "ready", "draining", "closing", "restarting"]


class ReplicaSnapshot(Struct, frozen=True, kw_only=True):
    """`placing` waits for memory, `draining` for its last answers, `restarting` for its next try after a crash."""

    id: int
    state: ReplicaState
    running: int = 0
    since: float = 0.0  # unix time of its last change of state
    progress: float = 0.0
    doing: str = ""
    reason: str = ""
    pid: int | None = None  # of the engine's own process, where it has one


class ModelSnapshot(Struct, frozen=True, kw_only=True):
    """`estimate` is what one replica should take, `measured` the bytes that one really took when it was last loaded."""

    name: str
    state: ModelState
    reason: str = ""  # why it failed, was lost, or was put to sleep
    doing: str = ""
    progress: float = 0.0
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    places: int = 0  # answers that may run at a time, on all replicas that are up
    replicas: tuple[ReplicaSnapshot, ...] = ()
    replicas_wanted: int = 0
    replica_max: int = 1
    target_inflight: int | None = None
    autoload: bool = False
    idle_ttl_s: float | None = None
    loads_on_request: bool = False  # stopped, and the next request for it loads it
    capabilities: Capabilities = Capabilities()
    caches: Mapping[str, CacheInfo] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)  # live only, gone with the next unload
    estimate: MemoryEstimate | None = None
    measured: int | None = None
    load_s: float | None = None  # how long the last load took
    loads: int = 0
    failures: int = 0  # loads that failed and engines that were lost
    evictions: int = 0  # times that it had to make room for another model
    last_used: float | None = None  # unix time
    service_s: float | None = None  # a recent answer's time in its place, averaged
    wait_s: float | None = None  # the longest wait of those who wait now


class RequestSnapshot(Struct, frozen=True, kw_only=True):
    trace: str
    model: str
    cache: str
    state: Literal["waiting", "running"]
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    tokens: int = 0
    weight: int = 1
    position: int = 0  # 0 while it runs
    replica: int | None = None
    since: float = 0.0  # unix time at which it came
    waited: float = 0.0  # seconds in the queue, so far or in all


class DeviceSnapshot(Struct, frozen=True):
    """Bytes of one device ("cpu" is RAM, "gpu" all GPUs together): what the pool may take, and what it has taken."""

    device: str
    limit: int | None
    taken: int


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    """`retiring` are models that a reload has replaced or removed and that still answer those who came before."""

    models: Mapping[str, ModelSnapshot]
    retiring: tuple[ModelSnapshot, ...] = ()
    devices: tuple[DeviceSnapshot, ...] = ()


class ModelStateChange(Struct, frozen=True, kw_only=True):
    """Something happened to a model. `missed`: so many changes came before this one and were dropped unread."""

    model: str
    state: ModelState
    reason: str = ""
    doing: str = ""
    progress: float = 0.0
    at: float = 0.0  # unix time
    missed: int = 0


# --- what can be asked of it ----------------------------------------------------------------------------------------


class Pool(Protocol):
    """An unknown model is NotFound everywhere; what cannot be done now is Conflict; a bad value is InvalidRequest."""

    def snapshot(self) -> PoolSnapshot: ...
    def requests(self) -> tuple[RequestSnapshot, ...]:
        """All that run and wait, oldest first."""
        ...

    def cancel(self, trace: str) -> int:
        """Ends every request of this trace id; how many there were."""
        ...

    def engines(self, name: str) -> tuple[Engine, ...]:
        """The open engines of a model, for questions that need no place."""
        ...

    def load(self, name: str, overrides: Overrides | None = None) -> Future[None]:
        """Done when one replica is ready. Joins a load under way; a model that is loaded with other overrides is a
        Conflict. Opens a drained model again."""
        ...

    def unload(self, name: str, force: bool = False) -> Future[None]:
        """Done when it is stopped. Those who wait are refused; those who run finish, or fail at once with `force`."""
        ...

    def drain(self, name: str) -> Future[None]:
        """Takes no new requests; done when those who wait and run are answered. The engine stays until `unload`."""
        ...

    def scale(self, name: str, replicas: int) -> Future[None]:
        """Done when so many replicas are ready, and no more."""
        ...

    def reconfigure(self, blueprints: Mapping[str, ModelSpec]) -> None:
        """These are the models from now on. One that is gone or makes another engine answers those who came before,
        then stops; one that was up is loaded anew in its new form."""
        ...

    def subscribe(self) -> AsyncIterator[ModelStateChange]:
        """Every change from now on. A reader that lags misses the oldest, and is told how many."""
        ...
