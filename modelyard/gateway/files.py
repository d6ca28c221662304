"""Uploaded files, and the files that batches write: in chunks in the object store, scoped by API key."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec

from modelyard.core.errors import TooLarge
from modelyard.core.store import ObjectStore
from modelyard.gateway.records import Records, new_id
from modelyard.protocols.common.openai_lists import PageQuery

CHUNK = 1 << 20  # bytes
_PAGE = 8  # chunks read at once
_LISTED = 1000  # records read at once


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created: int
    expires: int
    filename: str
    purpose: str


class Files:
    def __init__(self, store: ObjectStore, ttl_s: float, max_bytes: int) -> None:
        self._store, self._ttl, self.max_bytes = store, ttl_s, max_bytes
        self._records = Records(store, "files", FileRecord, "file", ttl_s)
        self.get, self.delete = self._records.get, self._records.delete

    async def create(
        self, key: str, filename: str, purpose: str, data: AsyncIterator[bytes], ttl_s: float | None, *, bound: bool
    ) -> FileRecord:
        """`bound`: refuse more than `max_bytes`. A file that cannot be stored leaves nothing behind."""
        id, ttl = new_id("file-"), min(ttl_s or self._ttl, self._ttl)
        try:
            size = await self._write(id, key, data, ttl, self.max_bytes if bound else None)
            now = time.time()
            record = FileRecord(id, size, int(now), int(now + ttl), filename, purpose)
            await self._records.put(id, key, record, ttl)
        except BaseException:
            await self._store.delete(self._records.scope(key), id)
            raise
        return record

    async def _write(self, id: str, key: str, data: AsyncIterator[bytes], ttl: float, limit: int | None) -> int:
        size = 0
        async for chunk in data:
            size += len(chunk)
            if limit is not None and size > limit:
                raise TooLarge(f"the file is larger than the limit of {limit} bytes (batches.max_file_bytes)")
            await self._store.put(self._records.parts(id, key), f"{size:015d}", chunk, ttl)
        return size

    def content(self, id: str, key: str) -> AsyncIterator[bytes]:
        return read_chunks(self._store, self._records.parts(id, key))

    async def page(self, key: str, query: PageQuery, purpose: str | None) -> tuple[list[FileRecord], bool]:
        found: list[FileRecord] = []
        after, has_more = query.after, True
        while has_more and len(found) <= query.limit:
            page, has_more = await self._records.page(key, after, _LISTED, newest_first=query.newest_first)
            found += [record for record in page if purpose is None or record.purpose == purpose]
            after = page[-1].id if page else ""
        return found[: query.limit], has_more or len(found) > query.limit


async def read_chunks(store: ObjectStore, scope: str) -> AsyncIterator[bytes]:
    after = ""
    while page := await store.page(scope, after=after, limit=_PAGE):
        for _, chunk in page:
            yield chunk
        after = page[-1][0]


async def read_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers, counted from 1."""
    number, rest = 0, b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line
    if rest.strip():
        yield number + 1, rest


async def in_chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Small pieces joined to chunks of the size that is stored."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) >= CHUNK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)
