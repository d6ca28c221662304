"""The seam to the scheduler: a demand is queued at once or refused at once; a ticket turns into a lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from msgspec import Struct

from modelyard.core.engine import Capabilities, Engine
from modelyard.core.request import Priority

ModelState = Literal["stopped", "loading", "ready", "draining", "failed"]


class Demand(Struct, frozen=True, kw_only=True):
    """`weight` is the number of sequences wanted at once (the client's `n`)."""

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    deadline: float | None = None
    trace: str = ""


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

    def release(self) -> None: ...


class Ticket(Protocol):
    """A place in the queue. `lease()` returns at once where one was free; `cancel` gives back what was had."""

    @property
    def granted(self) -> bool: ...
    @property
    def position(self) -> int: ...

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


class Leases(Protocol):
    def request(self, demand: Demand) -> Ticket:
        """Raises Overloaded, Conflict or Unavailable where waiting would be in vain."""
        ...

    def status(self) -> Mapping[str, ModelStatus]: ...
    def engine(self, model: str) -> Engine | None:
        """The open engine, for side questions that need no place (counting); None while it is not up."""
        ...
