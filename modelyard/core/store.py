"""The store interface: data kept between requests, bounded and scoped by API key."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Bytes by (scope, key). Old entries are evicted when the store is full, so a miss is always possible."""

    async def get(self, scope: str, key: str) -> bytes | None: ...
    async def put(self, scope: str, key: str, value: bytes) -> None: ...
    async def delete(self, scope: str, key: str) -> bool: ...
    async def close(self) -> None: ...
