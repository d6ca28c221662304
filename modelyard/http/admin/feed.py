"""Changes of the pool as server-sent events, for pages that want to know at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from modelyard.core.pool import Change, Pool

PING = b": ping\n\n"


def frame(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


async def feed(pool: Pool, first: Any, silence_s: float) -> AsyncIterator[bytes]:
    """The pool as it is, then every change; a comment where nothing happens for `silence_s`.

    The pending look at the next change is kept over a ping: to cancel it would lose the change.
    """
    changes = pool.subscribe()
    pending: asyncio.Future[Change] | None = None
    try:
        yield frame("snapshot", first)
        while True:
            pending = pending or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait({pending}, timeout=silence_s)
            if not done:
                yield PING
                continue
            try:
                change, pending = pending.result(), None
            except StopAsyncIteration:
                return
            yield frame("model", change)
    finally:
        await _leave(changes, pending)


async def _leave(changes: AsyncIterator[Change], pending: asyncio.Future[Change] | None) -> None:
    if pending is not None:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    close = getattr(changes, "aclose", None)
    if close is not None:
        await close()
