"""The seam to the scheduler: a demand is queued at once or refused at once; a ticket turns into a lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from modelyard.core.engine import Capabilities, Engine
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Priority

ModelState = Literal["stopped", "loading", "ready", "draining", "failed"]


class LeaseRequest(Struct, frozen=True, kw_only=True, gc=False):
    """`weight` is the number of sequences wanted at once (the client's `n`).

    `prompt` is looked at only where a model has several replicas: the one that knows its beginning is the cheapest.
    """

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    deadline: float | None = None  # unix time until which it may wait
    trace: str = ""
    prompt: Sequence[int] = ()
    is_retry: bool = False  # the request was counted against its key before


class Lease(Protocol):
    """A place in an engine. Released exactly once, when the engine says that the slot is free."""

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
        """How many sequences may run at once: as many as were wanted, or as many as the cache has."""
        ...

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        """What to call, once, where this place is taken away again: it must end the work there and release."""
        ...

    def spend(self, tokens: int) -> None:
        """So many output tokens were made here: they count against the key's limit."""
        ...

    def release(self) -> None: ...


class Ticket(Protocol):
    """A place in the queue. `lease()` returns at once where one was free; `cancel` gives back what was had."""

    @property
    def granted(self) -> bool: ...
    @property
    def position(self) -> int:
        """In the queue as it is now, counted from 1; 0 when it does not wait any more."""
        ...

    async def lease(self) -> Lease: ...
    def cancel(self) -> None: ...


class ModelStatus(Struct, frozen=True):
    state: ModelState
    running: int = 0
    waiting: int = 0
    reason: str = ""  # why it failed or was lost
    doing: str = ""  # what loading is busy with
    progress: float = 0.0
    capabilities: Capabilities = Capabilities()
    loads_on_request: bool = False  # stopped, and the next request for it loads it


class LeaseProvider(Protocol):
    def request(self, demand: LeaseRequest) -> Ticket:
        """Raises Overloaded, RateLimited, Conflict or Unavailable where waiting would be in vain."""
        ...

    def status(self) -> Mapping[str, ModelStatus]: ...
    def engine(self, model: str) -> Engine | None:
        """The open engine, for side questions that need no place (counting); None while it is not up."""
        ...


# A place that can be taken away again, and who is to end the work in it.


class RevocableLease(Struct, eq=False, kw_only=True):
    """The part of a `Lease` that is the same wherever it is granted. A Struct, because one is made at every request:
    an `__init__` costs more than all else that is done with it."""

    _revokers: tuple[Callable[[ModelyardError], None], ...] = ()
    _revoked: ModelyardError | None = None

    def on_revoke(self, end: Callable[[ModelyardError], None]) -> None:
        if self._revoked is not None:
            end(self._revoked)
        else:
            self._revokers += (end,)

    def revoke(self, why: ModelyardError) -> None:
        """Ends the work in it, once. Whoever has not said yet how that is done hears of it when he does."""
        if self._revoked is None:
            self._revoked = why
            revokers, self._revokers = self._revokers, ()
            for end in revokers:
                end(why)
