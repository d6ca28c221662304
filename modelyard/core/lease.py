"""The scheduler interface: a lease request is queued or refused at once; a ticket becomes a lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct, field

from modelyard.core.engine import Capabilities, Engine
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Priority

ModelState = Literal["stopped", "loading", "ready", "draining", "failed"]


class LeaseRequest(Struct, frozen=True, kw_only=True, gc=False):
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


class ModelStatus(Struct, frozen=True):
    state: ModelState
    running: int = 0
    waiting: int = 0
    reason: str = ""  # reason it failed or was lost
    phase: str = field(default="", name="doing")  # of a load
    progress: float = 0.0
    capabilities: Capabilities = Capabilities()
    loads_on_request: bool = False  # stopped; the next request loads it


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
