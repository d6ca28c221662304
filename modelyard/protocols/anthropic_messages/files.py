"""Anthropic's Files: `/v1/files` for clients that send `anthropic-version`."""

from __future__ import annotations

from modelyard.core.files import FileRecord
from modelyard.protocols.anthropic_messages.lists import write_time
from modelyard.protocols.common.json import JsonObject
from modelyard.protocols.common.media_parts import mime_type


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
