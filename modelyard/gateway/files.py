"""Uploaded files, and the files that batches write: in chunks in the object store, scoped by API key."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import cast

import msgspec
from msgspec.structs import replace

from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, NotFound, TooLarge
from modelyard.core.request import FILE_ID, Audio, Caller, Document, Image, Part, Request, ResultPart, Text, ToolResult
from modelyard.core.store import FileRecord, ObjectStore
from modelyard.gateway.records import Records, new_id
from modelyard.gateway.request_work import run_sized
from modelyard.protocols.common.openai_fields import PageQuery

CHUNK = 1 << 20  # bytes
_PAGE = 8  # chunks read at once
_LISTED = 1000  # records read at once
_MAX_INLINE = 32 << 20  # bytes of all files that a request names
_UPLOAD_TTL_S = 86_400.0  # of one that is not finished
_KINDS = (
    (b"%PDF", "application/pdf"),
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
)
_RIFF_KINDS = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


class UploadRecord(msgspec.Struct, frozen=True):
    """A file that arrives in pieces, of which `received` bytes are there."""

    id: str
    received: int
    filename: str
    purpose: str
    mime_type: str


class Files:
    def __init__(self, store: ObjectStore, ttl_s: float, max_bytes: int) -> None:
        self._store, self._ttl, self.max_bytes = store, ttl_s, max_bytes
        self._records = Records(store, "files", FileRecord, "file", ttl_s)
        self._uploads = Records(store, "uploads", UploadRecord, "upload", min(ttl_s, _UPLOAD_TTL_S))
        self.find, self.get, self.delete = self._records.find, self._records.get, self._records.delete
        self.upload = self._uploads.get

    async def create(
        self,
        key: str,
        filename: str,
        purpose: str,
        data: AsyncIterator[bytes],
        ttl_s: float | None,
        *,
        bound: bool,
        mime_type: str = "",
    ) -> FileRecord:
        """`bound`: refuse more than `max_bytes`. A file that cannot be stored leaves nothing behind."""
        id, ttl = new_id("file-"), min(ttl_s or self._ttl, self._ttl)
        try:
            size = await self._write(id, key, data, ttl, self.max_bytes if bound else None)
            record = await self._put(FileRecord(id, size, 0, 0, filename, purpose, mime_type), key, ttl)
        except BaseException:
            await self._store.delete(self._records.scope(key), id)
            raise
        return record

    async def _put(self, record: FileRecord, key: str, ttl: float) -> FileRecord:
        now = time.time()
        record = replace(record, created=int(now), expires=int(now + ttl))
        await self._records.put(record.id, key, record, ttl)
        return record

    async def _write(
        self, id: str, key: str, data: AsyncIterator[bytes], ttl: float, limit: int | None, size: int = 0
    ) -> int:
        """Behind the first `size` bytes. The size of all."""
        async for chunk in data:
            size += len(chunk)
            if limit is not None and size > limit:
                raise TooLarge(f"the file is larger than the limit of {limit} bytes (batches.max_file_bytes)")
            await self._store.put(self._records.parts(id, key), f"{size:015d}", chunk, ttl)
        return size

    async def begin(self, key: str, filename: str, purpose: str, mime_type: str) -> str:
        """The id of a file whose pieces follow."""
        id = new_id("file-")
        await self._uploads.put(id, key, UploadRecord(id, 0, filename, purpose, mime_type))
        return id

    async def append(self, id: str, key: str, offset: int, data: AsyncIterator[bytes]) -> int:
        """How many bytes of the file are there."""
        upload = await self.upload(id, key)
        if offset != upload.received:
            raise Conflict(f"the upload has {upload.received} bytes: continue there, not at {offset}")
        await self._drop_after(id, key, offset)
        received = await self._write(id, key, data, self._ttl, self.max_bytes, offset)
        await self._uploads.put(id, key, replace(upload, received=received))
        return received

    async def _drop_after(self, id: str, key: str, offset: int) -> None:
        """What an interrupted piece has left."""
        scope = self._records.parts(id, key)
        while page := await self._store.page(scope, newest_first=True, values=False):
            left = [name for name, _ in page if int(name) > offset]
            for name in left:
                await self._store.delete(scope, name)
            if len(left) < len(page):
                return

    async def finish(self, id: str, key: str) -> FileRecord:
        upload = await self.upload(id, key)
        record = FileRecord(id, upload.received, 0, 0, upload.filename, upload.purpose, upload.mime_type)
        record = await self._put(record, key, self._ttl)
        await self._uploads.delete(id, key)
        return record

    async def cancel(self, id: str, key: str) -> None:
        await self._uploads.delete(id, key)
        await self._store.delete(self._records.scope(key), id)

    def content(self, id: str, key: str) -> AsyncIterator[bytes]:
        return read_chunks(self._store, self._records.parts(id, key))

    async def inline(self, request: Request, caller: Caller, *, is_remote: bool) -> Request:
        """With the uploaded files that the request names by their ids. A remote service may know other ids."""
        key = caller.key
        found: dict[Part, Part] = {}
        files: dict[str, FileRecord] = {}
        total = 0
        for part, is_result in _named_files(request):
            try:
                id = part.url.removeprefix(FILE_ID)
                file = files[id] = files.get(id) or await self.get(id, key)
                if total + file.bytes > _MAX_INLINE:  # counted as often as it is named: the prompt has it as often
                    raise TooLarge(
                        f"the files that this request names have {total + file.bytes} bytes or more, with {id!r}; at "
                        f"most {_MAX_INLINE} fit into a request"
                    )
                if caller.reservation is not None:
                    caller.reservation.grow(file.bytes)
                total += file.bytes
                if part not in found:
                    found[part] = await self._inlined(part, file, key)
            except ModelyardError as error:
                if isinstance(error, NotFound) and is_remote:
                    continue
                if is_result:  # a refusal would end an agent's session, because the file stays in its history
                    found[part] = Text(f"[file: {error.message}]")
                elif isinstance(error, NotFound):
                    raise InvalidRequest(error.message, code="file_not_found", param="file_id") from None
                else:
                    raise
        if not found:
            return request
        messages = tuple(replace(m, parts=tuple(_inline_part(p, found) for p in m.parts)) for m in request.messages)
        return replace(request, messages=messages)

    async def _inlined(self, part: Image | Document, file: FileRecord, key: str) -> Part:
        """An image, a sound, a PDF, or the text of any other file."""
        data = b"".join([chunk async for chunk in self.content(file.id, key)])
        name = part.name if isinstance(part, Document) and part.name else file.filename
        return await run_sized(len(data), _as_part, part, data, name, file.id)

    async def page(self, key: str, query: PageQuery, purpose: str | None) -> tuple[list[FileRecord], bool]:
        found: list[FileRecord] = []
        after, has_more = query.after, True
        while has_more and len(found) <= query.limit:
            page, has_more = await self._records.page(key, after, _LISTED, newest_first=query.newest_first)
            found += [record for record in page if purpose is None or record.purpose == purpose]
            after = page[-1].id if page else ""
        return found[: query.limit], has_more or len(found) > query.limit


def _as_part(part: Image | Document, data: bytes, name: str, id: str) -> Part:
    if kind := _kind(data):
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        detail = part.detail if isinstance(part, Image) else None
        if kind.startswith("audio/"):
            return Audio(url)
        return Image(url, detail) if kind.startswith("image/") else Document(url, name)
    try:
        return Text(f"{name}:\n\n{data.decode()}")
    except UnicodeDecodeError:
        problem = f"the file {id!r} is neither an image nor a sound nor a PDF nor text"
        raise InvalidRequest(problem, code="invalid_document", param="file_id") from None


def _kind(data: bytes) -> str:
    """The media type of an image, a sound or a PDF, from its first bytes; empty for anything else."""
    if data.startswith(b"RIFF"):
        return _RIFF_KINDS.get(data[8:12], "")
    return next((kind for start, kind in _KINDS if data.startswith(start)), "")


def _named_files(request: Request) -> Iterator[tuple[Image | Document, bool]]:
    """With whether it is in a tool's result."""
    for message in request.messages:
        for part in message.parts:
            is_result = isinstance(part, ToolResult)
            for each in part.content if isinstance(part, ToolResult) else (part,):
                if isinstance(each, Image | Document) and each.url.startswith(FILE_ID):
                    yield each, is_result


def _inline_part(part: Part, found: Mapping[Part, Part]) -> Part:
    if isinstance(part, ToolResult):
        content = tuple(cast("ResultPart", found.get(each, each)) for each in part.content)
        return replace(part, content=content)
    return found.get(part, part)


async def read_chunks(store: ObjectStore, scope: str) -> AsyncIterator[bytes]:
    after = ""
    while page := await store.page(scope, after=after, limit=_PAGE):
        for _, chunk in page:
            yield chunk
        after = page[-1][0]


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
