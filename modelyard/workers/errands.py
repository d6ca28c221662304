"""What the scheduler's desk does for its callers: demands and orders in the pool's own words, and the shared store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.lease import Lease, LeaseRequest, Ticket
from modelyard.core.pool import Pool
from modelyard.core.store import Store
from modelyard.workers.packing import unpack_ids
from modelyard.workers.scheduling import Asked, Command, Keep


def demand_of(asked: Asked, *, again: bool = False) -> LeaseRequest:
    return LeaseRequest(
        model=asked.model,
        cache=asked.cache,
        tokens=asked.tokens,
        weight=asked.weight,
        key=asked.key,
        session=asked.session,
        priority=asked.priority,
        deadline=asked.deadline,
        trace=asked.trace,
        prompt=unpack_ids(asked.prompt),
        is_retry=asked.is_retry or again,
    )


def lease_of(ticket: Ticket) -> Lease:
    """A ticket that is granted and its lease are one object in our scheduler."""
    lease: Any = ticket
    granted: Lease = lease
    return granted


def engine_of(ticket: Ticket) -> Any:
    try:
        return lease_of(ticket).engine
    except ModelyardError:
        return None


async def carry_out(pool: Pool, command: Command, argument: Any) -> bytes | None:
    """Shielded: the work goes on when the one who asked for it leaves."""
    name = command.model
    if command.verb == "cancel":
        return msgspec.msgpack.encode(pool.cancel(str(argument)))
    orders: dict[str, Callable[[], asyncio.Future[None]]] = {
        "load": lambda: pool.load(name, argument),
        "unload": lambda: pool.unload(name, bool(argument)),
        "drain": lambda: pool.drain(name),
        "scale": lambda: pool.scale(name, _count(argument)),
    }
    await asyncio.shield(orders[command.verb]())
    return None


def _count(argument: Any) -> int:
    if not isinstance(argument, int):
        raise InvalidRequest("the number of replicas is a whole number", param="replicas")
    return argument


async def kept(store: Store, keep: Keep) -> bytes | None:
    """What the store has; for a deletion, something where there was something."""
    scope, key = (part.decode("utf-8", "surrogatepass") for part in (keep.scope, keep.key))
    if keep.delete:
        return b"\1" if await store.delete(scope, key) else None
    if keep.value is None:
        return await store.get(scope, key)
    await store.put(scope, key, keep.value)
    return None
