"""Sounds, documents and uploaded files as clients send them, for the protocols that have such parts."""

from __future__ import annotations

import mimetypes
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import FILE_ID, Audio, Document
from modelyard.core.store import FileRecord

_AUDIO_TYPES = {"mp3": "audio/mpeg", "wav": "audio/wav", "flac": "audio/flac"}


def read_audio(part: Any, path: str) -> Audio:
    """OpenAI's `input_audio`: base64 data and the name of its format."""
    data, format = (part.get("data"), part.get("format")) if isinstance(part, dict) else (None, None)
    if not isinstance(data, str) or not data:
        raise InvalidRequest(f"{path} needs data, in base64, and format", param=f"{path}.data", code="invalid_audio")
    if data.startswith("data:"):
        return Audio(data)
    if format not in _AUDIO_TYPES:
        known = ", ".join(_AUDIO_TYPES)
        raise InvalidRequest(
            f"{path}.format is {str(format)[:40]!r}; the formats are {known}",
            param=f"{path}.format",
            code="invalid_audio",
        )
    return Audio(f"data:{_AUDIO_TYPES[format]};base64,{data}")


def read_file(part: Any, path: str) -> Document:
    """OpenAI's `file` and `input_file`: a PDF as `file_data`, as the `file_id` of an uploaded file or, in Responses, as
    `file_url`."""
    fields = part if isinstance(part, dict) else {}
    name, data, url, id = (fields.get(key) for key in ("filename", "file_data", "file_url", "file_id"))
    name = name if isinstance(name, str) else ""
    if isinstance(data, str) and data:
        return Document(data if data.startswith("data:") else f"data:application/pdf;base64,{data}", name)
    if isinstance(url, str) and url:
        return Document(url, name)
    if isinstance(id, str) and id:
        return Document(FILE_ID + id, name)
    raise InvalidRequest(
        f"{path} needs file_data, or the file_id of an uploaded file",
        param=f"{path}.file_data",
        code="invalid_document",
    )


def mime_type(file: FileRecord) -> str:
    """Of an uploaded file: what the client said, else what its name says."""
    return file.mime_type or mimetypes.guess_type(file.filename)[0] or "application/octet-stream"


def write_audio(audio: Audio) -> dict[str, Any]:
    """OpenAI's part for a sound."""
    kind, _, data = audio.url.removeprefix("data:").partition(";base64,")
    format = next((name for name, known in _AUDIO_TYPES.items() if known == kind), kind.partition("/")[2])
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}
