"""Google's Files: `POST /upload/v1beta/files`, a resumable upload, and `/v1beta/files`.

start            X-Goog-Upload-Command: start      a description    →  X-Goog-Upload-URL
the pieces       upload, or upload, finalize       bytes            →  X-Goog-Upload-Status: active, or final
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.store import FileRecord
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.media_parts import mime_type
from modelyard.protocols.common.openai_fields import PageQuery, read_page_query
from modelyard.protocols.gemini.schema import decode_proto

_MAX_PAGE = 100
_DEFAULT_PAGE = 10
_NUMBER = re.compile(r"\d{1,15}")
_URI = re.compile(r"(?:.*/)?files/(file-[0-9a-f]{32})")
_COMMANDS = (("upload",), ("upload", "finalize"), ("finalize",), ("query",), ("cancel",))


class GeminiFileFields(Struct, rename="camel"):
    name: limits.Name = ""
    display_name: limits.Name = ""
    mime_type: limits.Word = ""


class GeminiUploadBody(Struct):
    file: GeminiFileFields | None = None


class UploadStart(Struct, frozen=True):
    filename: str
    mime_type: str
    bytes: int  # that the client announces; 0: not known


class UploadPiece(Struct, frozen=True):
    offset: int
    is_last: bool
    command: str


_body = msgspec.json.Decoder(GeminiUploadBody)


def read_start(body: bytes, headers: Mapping[str, str]) -> UploadStart:
    protocol = headers.get("x-goog-upload-protocol", "")
    if protocol != "resumable":
        raise Unsupported(
            f"x-goog-upload-protocol is {protocol[:40]!r}: send resumable, as Google's SDKs do",
            param="x-goog-upload-protocol",
        )
    fields = (decode_proto(_body, GeminiUploadBody, body).file if body.strip() else None) or GeminiFileFields()
    if fields.name:
        raise Unsupported("file.name: names are chosen here; send displayName", param="file.name")
    kind = fields.mime_type or headers.get("x-goog-upload-header-content-type", "")[:256]
    name = fields.display_name or headers.get("x-goog-upload-file-name", "")[:255]
    return UploadStart(name, kind, _number(headers, "x-goog-upload-header-content-length"))


def read_piece(headers: Mapping[str, str]) -> UploadPiece:
    text = headers.get("x-goog-upload-command", "")
    words = tuple(word.strip() for word in text.lower().split(","))
    if words not in _COMMANDS:
        raise InvalidRequest(
            f"x-goog-upload-command is {text[:40]!r}: send start, upload, finalize, query or cancel",
            param="x-goog-upload-command",
        )
    return UploadPiece(_number(headers, "x-goog-upload-offset"), "finalize" in words, words[0])


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "0")
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{name} must be a whole number, got {text[:40]!r}", param=name)
    return int(text)


def read_list_query(params: Mapping[str, str]) -> PageQuery:
    """A token is the name of the last file of the page before."""
    size = params.get("pageSize") or str(_DEFAULT_PAGE)
    if not _NUMBER.fullmatch(size):
        raise InvalidRequest(f"pageSize must be a whole number, got {size[:40]!r}", param="pageSize")
    query = {"limit": str(min(int(size) or _DEFAULT_PAGE, _MAX_PAGE)), "after": params.get("pageToken", "")}
    return read_page_query(query, most=_MAX_PAGE)


def file_of_uri(uri: str) -> str | None:
    """The id of a file of this server, from the URI or the name that it gave to the client."""
    found = _URI.fullmatch(uri)
    return None if found is None else found[1]


def write_file(file: FileRecord, base_url: str) -> JsonObject:
    created = _time(file.created)
    return {
        "name": f"files/{file.id}",
        "displayName": file.filename,
        "mimeType": mime_type(file),
        "sizeBytes": str(file.bytes),
        "createTime": created,
        "updateTime": created,
        "expirationTime": _time(file.expires),
        "uri": f"{base_url}/v1beta/files/{file.id}",
        "state": "ACTIVE",
        "source": "UPLOADED",
    }


def write_files(files: Sequence[FileRecord], base_url: str, has_more: bool) -> bytes:
    following = {"nextPageToken": files[-1].id} if files and has_more else {}
    return encode({"files": [write_file(file, base_url) for file in files]} | following)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
