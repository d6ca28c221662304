"""Records that belong to an API key, in the object store; and the processes that work on some of them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Generic, TypeVar
from urllib.parse import quote

import msgspec

from modelyard.core.errors import ModelyardError, NotFound
from modelyard.core.store import ObjectStore
from modelyard.telemetry.log import log_event

log = logging.getLogger("modelyard.gateway")

R = TypeVar("R", bound=msgspec.Struct)

_OWNERS = "owners"
OWNER_TTL_S = 10.0  # after the last sign of life; then others take over its work
_RENEW_S = 2.0


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


class Records(Generic[R]):
    """Records of one kind by id. `noun` is what messages call one. Another key's record does not exist for a key."""

    def __init__(self, store: ObjectStore, kind: str, type: type[R], noun: str, ttl_s: float) -> None:
        self.store, self._kind, self._noun, self._ttl = store, kind, noun, ttl_s
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(type)

    def scope(self, key: str) -> str:
        return f"{self._kind}/{quote(key, safe='')}"

    def parts(self, id: str, key: str) -> str:
        """The scope of what belongs to a record, and is deleted with it."""
        return f"{self.scope(key)}/{id}"

    async def find(self, id: str, key: str) -> R | None:
        found = await self.store.get(self.scope(key), id)
        if found is None:
            return None
        record: R = self._decoder.decode(found)
        return record

    async def get(self, id: str, key: str) -> R:
        found = await self.find(id, key)
        if found is None:
            raise self._missing(id)
        return found

    async def put(self, id: str, key: str, record: R, ttl_s: float | None = None) -> None:
        await self.store.put(self.scope(key), id, self._encoder.encode(record), ttl_s or self._ttl)

    async def update(self, id: str, key: str, change: Callable[[R], R | None]) -> R:
        """The record after the change, which is made to the newest version. None: it stays as it is."""
        while True:
            old = await self.store.get(self.scope(key), id)
            if old is None:
                raise self._missing(id)
            record = self._decoder.decode(old)
            changed = change(record)
            if changed is None:
                return record
            if await self.store.swap(self.scope(key), id, old, self._encoder.encode(changed)):
                return changed

    async def touch(self, id: str, key: str) -> None:
        """Its time to live begins again."""
        found = await self.store.get(self.scope(key), id)
        if found is None:
            raise self._missing(id)
        await self.store.swap(self.scope(key), id, found, found, self._ttl)

    async def delete(self, id: str, key: str) -> None:
        if not await self.store.delete(self.scope(key), id):
            raise self._missing(id)

    async def page(self, key: str, after: str, limit: int, *, newest_first: bool) -> tuple[list[R], bool]:
        """One page, and whether there are more."""
        found = await self.store.page(self.scope(key), after=after, limit=limit + 1, newest_first=newest_first)
        return [self._decoder.decode(value) for _, value in found[:limit]], len(found) > limit

    def _missing(self, id: str) -> NotFound:
        return NotFound(
            f"there is no {self._noun} {id[:100]!r}; it may have expired, or belong to another key",
            code=f"{self._noun.replace(' ', '_')}_not_found",
        )


class OwnerProcess:
    """This process, while it works on records that others can see. It gives a sign of life; when that stops, another
    process may take its work over. `on_sign` is called with each sign."""

    def __init__(self, store: ObjectStore) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = store
        self._held = 0
        self._renewing: asyncio.Task[None] | None = None
        self.on_sign: list[Callable[[], None]] = []

    async def hold(self) -> None:
        """Before a record names this process."""
        self._held += 1
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
            await self._store.put(_OWNERS, self.id, b"", OWNER_TTL_S)

    def release(self) -> None:
        self._held -= 1

    async def is_alive(self, owner: str) -> bool:
        return owner == self.id or (bool(owner) and await self._store.get(_OWNERS, owner) is not None)

    async def _renew(self) -> None:
        while self._held:
            await asyncio.sleep(_RENEW_S)
            try:
                await self._store.put(_OWNERS, self.id, b"", OWNER_TTL_S)
            except ModelyardError as error:
                log_event(log, logging.ERROR, "the sign of life was not stored", why=error.message)
            for call in self.on_sign:
                call()
        self._renewing = None

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            await asyncio.gather(self._store.delete(_OWNERS, self.id), return_exceptions=True)
