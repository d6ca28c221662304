"""The scheduler interface: leases for requests, admin commands of the model pool, snapshots and changes of its state.

A lease request is queued or refused at once; a ticket becomes a lease. Every method of the pool runs on the event loop
and decides at once. Slow operations return an awaitable: they continue whether or not it is awaited, and awaiting it
raises their error.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from modelyard.core.engine import CacheInfo, Capabilities, Engine, EngineSpec, MemoryEstimate
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Priority

Overrides = Mapping[str, Any]
Override = Callable[[str, Overrides], EngineSpec]  # a model's spec with other settings; raises InvalidRequest


# --- snapshots ------------------------------------------------------------------------------------------------------

ReplicaState = Literal["reserved", "loading", "ready", "draining", "closing", "restarting"]


class ReplicaSnapshot(Struct, frozen=True, kw_only=True):
    """`reserved` waits for memory, `draining` for its last requests, `restarting` for the retry after a crash."""

    id: int
    state: ReplicaState
    running: int = 0
    since: float = 0.0  # unix time of the last state change
    progress: float = 0.0
    phase: str = ""  # of a load
    reason: str = ""
    pid: int | None = None  # of the engine's process, if it has one


class ModelStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as clients and administrators see it. `LeaseProvider.status` has the first group only: it goes to every
    gateway after each change. `Pool.snapshot` has all; there `estimate` is for one replica, and `measured` are the
    bytes that the last load took."""

    name: str
    state: ModelState = "stopped"
    running: int = 0
    waiting: int = 0
    reason: str = ""  # why it failed, was lost, or was unloaded
    phase: str = ""  # of a load
    progress: float = 0.0
    capabilities: Capabilities = Capabilities()
    loads_on_request: bool = False  # stopped, and the next request for it loads it

    waiting_tokens: int = 0
    slots: int = 0  # of all ready replicas
    replicas: tuple[ReplicaSnapshot, ...] = ()
    replicas_wanted: int = 0
    replica_max: int = 1
    target_inflight: int | None = None
    autoload: bool = False
    idle_ttl_s: float | None = None
    caches: Mapping[str, CacheInfo] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)  # until the next unload
    estimate: MemoryEstimate | None = None
    measured: int | None = None
    load_s: float | None = None  # duration of the last load
    loads: int = 0
    failures: int = 0  # failed loads and lost engines
    evictions: int = 0  # unloads in favour of another model
    last_used: float | None = None  # unix time
    service_s: float | None = None  # recent time per request in its slot, averaged
    wait_s: float | None = None  # the longest current wait


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
    since: float = 0.0  # unix time of arrival
    waited: float = 0.0  # seconds in the queue


class DeviceSnapshot(Struct, frozen=True):
    """Bytes of one device ("cpu" is RAM, "gpu" all GPUs): the pool's limit, and what it has reserved."""

    device: str
    limit: int | None
    taken: int


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    """`retiring` are models that a reload has replaced or removed and that finish their requests."""

    models: Mapping[str, ModelStatus]
    retiring: tuple[ModelStatus, ...] = ()
    devices: tuple[DeviceSnapshot, ...] = ()


class ModelStateChange(Struct, frozen=True, kw_only=True):
    """A model changed. `missed`: this many earlier changes were dropped because the reader lagged."""

    model: str
    state: ModelState
    reason: str = ""
    phase: str = ""  # of a load
    progress: float = 0.0
    at: float = 0.0  # unix time
    missed: int = 0


# --- commands -------------------------------------------------------------------------------------------------------


class Pool(Protocol):
    """Unknown models raise NotFound, impossible commands Conflict, bad values InvalidRequest."""

    def snapshot(self) -> PoolSnapshot: ...
    def requests(self) -> tuple[RequestSnapshot, ...]:
        """All running and waiting requests, oldest first."""
        ...

    def cancel(self, trace: str) -> int:
        """End every request of this trace id; return how many there were."""
        ...

    def engines(self, name: str) -> tuple[Engine, ...]:
        """The open engines of a model, for calls that need no lease."""
        ...

    def load(self, name: str, overrides: Overrides | None = None) -> Future[None]:
        """Done when one replica is ready. Joins a load in progress; Conflict if the model is loaded with other
        overrides. Reopens a drained model."""
        ...

    def unload(self, name: str, force: bool = False) -> Future[None]:
        """Done when it is stopped. Waiting requests are refused; running ones finish, or fail at once with `force`."""
        ...

    def drain(self, name: str) -> Future[None]:
        """Accept no new requests; done when all waiting and running ones are answered. The engine stays loaded."""
        ...

    def scale(self, name: str, replicas: int) -> Future[None]:
        """Done when exactly this many replicas are ready."""
        ...

    def reconfigure(self, specs: Mapping[str, EngineSpec], override: Override | None = None) -> None:
        """Replace the models. A removed model, or one with another engine, finishes its requests and stops; a loaded
        one is loaded again in its new form. `override` serves loads with other settings."""
        ...

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """By the names of API keys. A key with unchanged limits keeps its usage."""
        ...

    def subscribe(self) -> AsyncIterator[ModelStateChange]:
        """Every change from now on. A reader that lags loses the oldest; `missed` says how many."""
        ...


ModelState = Literal["stopped", "loading", "ready", "draining", "failed"]


# --- leases -----------------------------------------------------------------------------------------------------------


class LeaseRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """`weight` is the number of concurrent sequences (the client's `n`).

    `prompt` is used only for a model with several replicas: the one that has its prefix cached is preferred.
    """

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    deadline: float | None = None  # until when it may wait, on `time.monotonic`'s clock
    trace: str = ""
    prompt: Sequence[int] = ()
    is_retry: bool = False  # the request was counted against its key before
    keep_alive: float | None = None  # seconds; the model's idle time until it is unloaded, if no later request sets it


class KeyLimits(Struct, frozen=True, kw_only=True):
    """The rate limits of an API key."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


class Lease(Protocol):
    """A slot in an engine. Released once, when the engine reports that the slot is free."""

    @property
    def engine(self) -> Engine: ...
    @property
    def cache(self) -> str: ...
    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        ...

    @property
    def weight(self) -> int:
        """How many sequences may run at once: as many as requested, or as the cache has."""
        ...

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        """Register a callback, called once if the lease is revoked: it must end the work and release."""
        ...

    def spend(self, tokens: int) -> None:
        """Count output tokens against the key's limit."""
        ...

    def release(self) -> None: ...


class Ticket(Protocol):
    """A position in the queue. `lease()` returns at once if a slot was free; `cancel` gives up the ticket or lease."""

    @property
    def granted(self) -> bool: ...
    @property
    def position(self) -> int:
        """The current position, counted from 1; 0 when it no longer waits."""
        ...

    async def lease(self) -> Lease: ...
    def cancel(self) -> None: ...


class LeaseProvider(Protocol):
    """`is_connected` is False while a scheduler in another process does not answer."""

    is_connected: bool

    def request(self, request: LeaseRequest) -> Ticket:
        """Raise Overloaded, RateLimited, Conflict or Unavailable if waiting would be in vain."""
        ...

    def status(self) -> Mapping[str, ModelStatus]: ...
    def engine(self, model: str) -> Engine | None:
        """The open engine, for calls that need no lease (counting); None while the model is not loaded."""
        ...


class RevocableLease(Struct, eq=False, kw_only=True):
    """The part of a `Lease` that every scheduler shares. A Struct, because a Python `__init__` per request is slow."""

    _revokers: tuple[Callable[[ModelyardError], None], ...] = ()
    _revoked: ModelyardError | None = None

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        if self._revoked is not None:
            end(self._revoked)
        else:
            self._revokers += (end,)

    def revoke(self, reason: ModelyardError) -> None:
        """End the work, once. Callbacks registered after revocation run immediately."""
        if self._revoked is None:
            self._revoked = reason
            revokers, self._revokers = self._revokers, ()
            for end in revokers:
                end(reason)
