"""Uploaded files over HTTP, for the clients of three protocols: `/v1/files` (OpenAI, and Anthropic with its header) and
`/v1beta/files` (Google, whose files arrive in pieces at `/upload`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote, urlencode

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive

from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, TooLarge
from modelyard.core.request import is_api_key
from modelyard.core.store import FileRecord
from modelyard.gateway.files import CHUNK, Files, in_chunks
from modelyard.http.errors import error_response, protocol_of
from modelyard.http.request_context import GOOGLE_KEY, RequestContext
from modelyard.protocols import openai_batches as openai
from modelyard.protocols.anthropic_messages import reply as anthropic
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.openai_fields import read_page_query, write_page
from modelyard.protocols.gemini import files as gemini

_MAX_FORM_FIELDS = 16
_FORM_BYTES = 1 << 20  # of an upload, besides its file
_MAX_IDS = 100  # of files that a list asks for by their ids
_PURPOSE = "user_data"  # of files for requests; only OpenAI's clients name one


def _key(request: HttpRequest) -> str:
    return RequestContext.of(request.scope).key


def _json(body: bytes | JsonObject, headers: dict[str, str] | None = None) -> Response:
    return Response(body if isinstance(body, bytes) else encode(body), headers=headers, media_type="application/json")


def _is_google(request: HttpRequest) -> bool:
    context = RequestContext.of(request.scope)
    return protocol_of(context).NAME == "gemini"


def _is_anthropic(request: HttpRequest) -> bool:
    return "anthropic-version" in request.headers


def _base_url(request: HttpRequest) -> str:
    return str(request.base_url).rstrip("/")


class FileEndpoints:
    def __init__(self, files: Files) -> None:
        self._files = files
        self.receive = UploadEndpoint(files).receive

    async def upload(self, request: HttpRequest) -> Response:
        """A form, of OpenAI's or Anthropic's clients."""
        _check_size(request.headers.get("content-length", ""), self._files.max_bytes, _FORM_BYTES)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest("send the file as multipart/form-data, with the fields file and purpose")
        request = HttpRequest(request.scope, _bounded(request, self._files.max_bytes + _FORM_BYTES))
        try:
            form = await request.form(max_files=1, max_fields=_MAX_FORM_FIELDS)
        except (MultiPartException, HTTPException) as error:
            raise InvalidRequest(f"the form cannot be read: {getattr(error, 'detail', error)}") from None
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("file is required: the file to upload", param="file")
            purpose, ttl_s = _PURPOSE, None
            if not _is_anthropic(request):
                fields = {name: value for name, value in form.items() if isinstance(value, str)}
                purpose, ttl_s = openai.read_upload(fields)
            name = (file.filename or "upload").replace("\\", "/").rpartition("/")[2][:255] or "upload"
            if purpose == "batch" and not name.endswith(".jsonl"):
                raise InvalidRequest(f"a file with purpose batch must be .jsonl, not {name!r}", param="file")
            kind = (file.content_type or "")[:256]
            made = await self._files.create(
                _key(request), name, purpose, _read(file), ttl_s, bound=True, mime_type=kind
            )
        finally:
            await form.close()
        return _json(_written(made, request))

    async def all(self, request: HttpRequest) -> Response:
        params, key = request.query_params, _key(request)
        if _is_google(request):
            found, has_more = await self._files.page(key, gemini.read_list_query(params), None)
            return _json(gemini.write_files(found, _base_url(request), has_more))
        if _is_anthropic(request):
            return await self._anthropic_list(request)
        query = read_page_query(params, default=10_000, most=10_000)
        found, has_more = await self._files.page(key, query, params.get("purpose"))
        return _json(write_page([openai.write_file(file) for file in found], [file.id for file in found], has_more))

    async def _anthropic_list(self, request: HttpRequest) -> Response:
        key, ids = _key(request), request.query_params.getlist("ids[]")
        if ids:
            wanted = [await self._files.find(id, key) for id in dict.fromkeys(ids[:_MAX_IDS])]
            return _json(
                anthropic.write_list([anthropic.write_file(file) for file in wanted if file is not None], False)
            )
        query = anthropic.read_query(request.query_params)
        found, has_more = await self._files.page(key, query, None)
        if not query.newest_first:
            found.reverse()
        return _json(anthropic.write_list([anthropic.write_file(file) for file in found], has_more))

    async def get(self, request: HttpRequest) -> Response:
        return _json(_written(await self._files.get(request.path_params["id"], _key(request)), request))

    async def content(self, request: HttpRequest) -> Response:
        id, key = request.path_params["id"], _key(request)
        file = await self._files.get(id, key)
        disposition = f"attachment; filename*=utf-8''{quote(file.filename)}"
        headers = {"content-length": str(file.bytes), "content-disposition": disposition}
        kind = "application/jsonl" if file.filename.endswith(".jsonl") else "application/octet-stream"
        return StreamingResponse(self._files.content(id, key), media_type=kind, headers=headers)

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._files.delete(id, _key(request))
        if _is_google(request):
            return _json({})
        return _json(anthropic.write_deleted_file(id) if _is_anthropic(request) else openai.write_deleted_file(id))


def _written(file: FileRecord, request: HttpRequest) -> JsonObject:
    if _is_google(request):
        return gemini.write_file(file, _base_url(request))
    return anthropic.write_file(file) if _is_anthropic(request) else openai.write_file(file)


def _check_size(declared: str, limit: int, more: int = 0) -> None:
    if declared.isdecimal() and int(declared[:20]) > limit + more:
        raise TooLarge(f"the file is larger than the limit of {limit} bytes (batches.max_file_bytes)")


def _bounded(request: HttpRequest, limit: int) -> Receive:
    """A body of unknown length is read no further than its limit."""
    read = 0

    async def receive() -> Message:
        nonlocal read
        message = await request.receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise TooLarge(f"the upload is larger than {limit} bytes (batches.max_file_bytes)")
        return message

    return receive


async def _read(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK):
        yield chunk


# --- Google's uploads -------------------------------------------------------------------------------------------------

_STATUS = "x-goog-upload-status"


class UploadEndpoint:
    """A file in pieces. Its URL carries the key, because the SDKs send the pieces without one."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def receive(self, request: HttpRequest) -> Response:
        id = request.query_params.get("upload_id", "")
        if not id:
            return await self._start(request)
        try:
            return await self._piece(request, id)
        except ModelyardError as error:
            reply = error_response(request, error)
            # Without a status, the SDKs would send the piece again; while it is active, they do not show the error.
            reply.headers[_STATUS] = "active" if isinstance(error, Conflict) else "final"
            return reply

    async def _start(self, request: HttpRequest) -> Response:
        context = RequestContext.of(request.scope)
        body = HttpRequest(request.scope, _bounded(request, _FORM_BYTES))
        start = gemini.read_start(await body.body(), context.headers)
        _check_size(str(start.bytes), self._files.max_bytes)
        query = {"upload_id": await self._files.begin(context.key, start.filename, _PURPOSE, start.mime_type)}
        if is_api_key(context.key):
            query["key"] = context.headers.get(GOOGLE_KEY, "")
        url = f"{_base_url(request)}{context.path}?{urlencode(query)}"
        return _json({}, {_STATUS: "active", "x-goog-upload-url": url})

    async def _piece(self, request: HttpRequest, id: str) -> Response:
        context = RequestContext.of(request.scope)
        piece = gemini.read_piece(context.headers)
        if piece.command == "cancel":
            await self._files.cancel(id, context.key)
            return _json({}, {_STATUS: "cancelled"})
        if piece.command == "query":
            received = (await self._files.upload(id, context.key)).received
        else:
            data = in_chunks(HttpRequest(request.scope, _bounded(request, self._files.max_bytes)).stream())
            received = await self._files.append(id, context.key, piece.offset, data)
        if not piece.is_last:
            return _json({}, {_STATUS: "active", "x-goog-upload-size-received": str(received)})
        made = await self._files.finish(id, context.key)
        return _json({"file": gemini.write_file(made, _base_url(request))}, {_STATUS: "final"})
