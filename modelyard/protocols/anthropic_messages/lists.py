"""Lists of Anthropic's API: pages of objects and their times, and the objects of `/v1/files` for clients that send
`anthropic-version`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from modelyard.core.files import FileRecord
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.media_parts import mime_type
from modelyard.protocols.common.openai_lists import PageQuery, read_page_query

_CURSOR = "page_"


def read_query(params: Mapping[str, str]) -> PageQuery:
    """The newest first. `before_id` asks for the page that ends before an object: it is read from its end. `page` is a
    `next_page` of `write_list`."""
    after, before = params.get("after_id", ""), params.get("before_id", "")
    after = params["page"].removeprefix(_CURSOR) if params.get("page") else after
    limits = {"limit": params["limit"]} if "limit" in params else {}
    limit = read_page_query(limits, most=1000).limit
    return PageQuery(before, limit, newest_first=False) if before else PageQuery(after, limit, newest_first=True)


def write_list(objects: Sequence[JsonObject], has_more: bool) -> bytes:
    """Some lists of the SDK go on after `last_id`, others with `next_page`."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    following = _CURSOR + last if has_more and last else None
    return encode({"data": objects, "has_more": has_more, "first_id": first, "last_id": last, "next_page": following})


def write_time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def write_file(file: FileRecord) -> JsonObject:
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": mime_type(file),
        "size_bytes": file.bytes,
        "created_at": write_time(file.created),
        "downloadable": True,
    }


def write_deleted_file(id: str) -> JsonObject:
    return {"id": id, "type": "file_deleted"}
