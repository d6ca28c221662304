"""The memory between requests that all gateways of a scheduler share: it lives with the scheduler."""

from __future__ import annotations

from modelyard.workers.pool import RemotePool
from modelyard.workers.scheduling import Keep


class SharedStore:
    """`Store` of `core`. Bounds and scopes are kept where the entries are."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    async def get(self, scope: str, key: str) -> bytes | None:
        return await self._pool.question(lambda id: Keep(id, _bytes(scope), _bytes(key)))

    async def put(self, scope: str, key: str, value: bytes) -> None:
        await self._pool.question(lambda id: Keep(id, _bytes(scope), _bytes(key), value))

    async def delete(self, scope: str, key: str) -> bool:
        return await self._pool.question(lambda id: Keep(id, _bytes(scope), _bytes(key), delete=True)) is not None

    async def close(self) -> None:
        """The link is the pool's to close."""


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
