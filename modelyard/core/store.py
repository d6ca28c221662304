"""The store interfaces: data kept between requests, bounded and scoped by API key; the record of an uploaded file."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Store(Protocol):
    """Bytes by (scope, key). Old entries are evicted when the store is full, so a miss is always possible."""

    async def get(self, scope: str, key: str) -> bytes | None: ...
    async def put(self, scope: str, key: str, value: bytes) -> None: ...
    async def delete(self, scope: str, key: str) -> bool: ...
    async def close(self) -> None: ...


class ObjectStore(Protocol):
    """Objects that clients create, list and delete: bytes by (scope, key), in the order of their creation.

    Nothing is evicted: a full store refuses. The parts of an object have the scope `<scope>/<key>`; they are deleted
    and expire with it. Every write is atomic and durable, and several processes may share a store.
    """

    async def get(self, scope: str, key: str) -> bytes | None: ...
    async def put(self, scope: str, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """Create or replace. Without `ttl_s` an object keeps its expiry; a new one has none."""
        ...

    async def swap(self, scope: str, key: str, old: bytes | None, new: bytes, ttl_s: float | None = None) -> bool:
        """Replace, if the value is still `old`; create, if `old` is None and there is no such object."""
        ...

    async def delete(self, scope: str, key: str) -> bool: ...
    async def page(
        self, scope: str, *, after: str = "", limit: int = 100, newest_first: bool = False, values: bool = True
    ) -> list[tuple[str, bytes]]:
        """Keys and values; with `values` False all values are empty. Raise NotFound if there is no object `after`."""
        ...

    async def close(self) -> None: ...


class FileRecord(Struct, frozen=True):
    """`created` and `expires` are Unix times. `mime_type` is what the client said, or empty."""

    id: str
    bytes: int
    created: int
    expires: int
    filename: str
    purpose: str
    mime_type: str = ""
