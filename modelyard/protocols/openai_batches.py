"""OpenAI's batches and files: `/v1/batches`, the lines of their input, output and error files, and `/v1/files`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from modelyard.core import limits
from modelyard.core.batch import Batch, BatchLine, BatchRow, LineFault
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Usage
from modelyard.core.store import FileRecord
from modelyard.protocols.common.extensions import check_option
from modelyard.protocols.common.json import JsonObject, decode, encode
from modelyard.protocols.common.openai_errors import http_error_writer
from modelyard.protocols.common.openai_fields import Metadata, check_metadata

NAME = "openai_batches"
PATHS: tuple[str, ...] = ("/v1/batches",)  # `/v1/files` are of other protocols too
ENDPOINTS = ("/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/embeddings")
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
_WINDOW = re.compile(r"(\d{1,3})([hd])")
_MAX_WINDOW_S = 30 * 86_400
_LIFE_S = (3600, 2_592_000)  # that a client may ask for
_MAX_CUSTOM_ID = 512

write_error = http_error_writer("body")


class ExpiresAfter(Struct):
    anchor: limits.Word = "created_at"
    seconds: int = 0


class BatchBody(Struct):
    input_file_id: limits.Id | None = None
    endpoint: limits.Name | None = None
    completion_window: limits.Word | None = None
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchInputLine(Struct):
    custom_id: limits.Id | None = None
    method: limits.Word | None = None
    url: limits.Name | None = None
    body: Raw | UnsetType = UNSET


_body = msgspec.json.Decoder(BatchBody)
_line = msgspec.json.Decoder(BatchInputLine)
_fields = msgspec.json.Decoder(dict[str, Raw])


def read_batch(body: bytes, id: str, now: int) -> Batch:
    parsed = decode(_body, body)
    if not parsed.input_file_id:
        raise InvalidRequest("input_file_id is required: the id of a file with purpose batch", param="input_file_id")
    endpoint, window = parsed.endpoint or "", parsed.completion_window or "24h"
    check_option("endpoint", endpoint, ENDPOINTS)
    return Batch(
        id=id,
        api="openai",
        endpoint=endpoint,
        input_file=parsed.input_file_id,
        window=window,
        created=now,
        expires=now + _read_window(window),
        metadata=check_metadata(parsed.metadata),
        output_ttl_s=read_life("output_expires_after", parsed.output_expires_after),
    )


def _read_window(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * (3600 if found[2] == "h" else 86_400) if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise InvalidRequest(
            f"completion_window is {window[:40]!r}: send 24h, or other hours or days up to 30d",
            param="completion_window",
        )
    return seconds


def read_life(param: str, expires: ExpiresAfter | None) -> float | None:
    if expires is None:
        return None
    check_option(f"{param}.anchor", expires.anchor, ("created_at",))
    if not _LIFE_S[0] <= expires.seconds <= _LIFE_S[1]:
        raise InvalidRequest(f"{param}.seconds must be from {_LIFE_S[0]} to {_LIFE_S[1]}", param=f"{param}.seconds")
    return float(expires.seconds)


def read_upload(fields: Mapping[str, str]) -> tuple[str, float | None]:
    """Purpose and life of a file, from the fields of the form."""
    purpose = fields.get("purpose", "")
    check_option("purpose", purpose, PURPOSES)
    seconds = fields.get("expires_after[seconds]", "")
    if not seconds:
        return purpose, None
    number = int(seconds) if seconds.isdecimal() and len(seconds) < 12 else 0
    anchor = fields.get("expires_after[anchor]", "created_at")
    return purpose, read_life("expires_after", ExpiresAfter(anchor, number))


def write_file(file: FileRecord) -> JsonObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def write_deleted_file(id: str) -> JsonObject:
    return {"id": id, "object": "file", "deleted": True}


# --- the batch ------------------------------------------------------------------------------------------------------

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def write_batch(batch: Batch) -> JsonObject:
    usage = batch.usage
    errors = [{"code": f.code, "message": f.message, "line": f.line, "param": None} for f in batch.faults]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created,
        "expires_at": batch.expires,
        **{f"{state}_at": batch.times.get(state) for state in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.count("succeeded"),
            "failed": batch.count("errored"),
        },
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.output,
        },
        "metadata": batch.metadata or None,
    }


def read_line(line: bytes, endpoint: str) -> BatchLine:
    try:
        parsed = decode(_line, line)
    except InvalidRequest as error:
        raise LineFault("invalid_json_line", error.message) from None
    id = parsed.custom_id
    if not id or len(id) > _MAX_CUSTOM_ID:
        problem = "needs a custom_id" if not id else f"has a custom_id of more than {_MAX_CUSTOM_ID} characters"
        raise LineFault("invalid_custom_id", f"the line {problem}", id and id[:_MAX_CUSTOM_ID])
    if parsed.method != "POST":
        raise LineFault("invalid_method", f"method must be POST, not {parsed.method!r}", id)
    if parsed.url != endpoint:
        raise LineFault("mismatched_endpoint", f"url must be the batch's endpoint {endpoint}, not {parsed.url!r}", id)
    return BatchLine(id, read_line_body(parsed.body, "body", id))


def read_line_body(body: Raw | UnsetType, name: str, custom_id: str) -> bytes:
    """The body of a request, which is not streamed: nobody reads a stream of a batch."""
    data = b"" if body is UNSET else bytes(body)
    if not data.startswith(b"{"):
        raise LineFault("invalid_request", f"{name} must be an object: the request", custom_id)
    fields = _fields.decode(data)
    for field in ("stream", "background"):
        if bytes(fields.get(field, Raw(b"null"))) == b"true":
            raise LineFault("invalid_request", f"{name}.{field} must be false in a batch", custom_id)
    return data


def read_line_model(body: bytes) -> str | None:
    model = msgspec.json.decode(_fields.decode(body).get("model", Raw(b"null")))
    return model if isinstance(model, str) else None


def write_row(row: BatchRow, batch: Batch) -> bytes:
    """A line of the output file or, unless it has succeeded, of the error file."""
    response = None
    if row.body:
        response = {"status_code": row.status, "request_id": row.request_id, "body": Raw(row.body)}
    error = None if row.body else {"code": row.code, "message": row.message}
    id = f"batch_req_{batch.id.removeprefix('batch_')}_{row.line}"
    return encode({"id": id, "custom_id": row.custom_id, "response": response, "error": error}) + b"\n"


def read_usage(body: bytes) -> Usage:
    """Of a reply of any endpoint."""
    found: Any = msgspec.json.decode(body)
    usage = found.get("usage") if isinstance(found, dict) else None
    if not isinstance(usage, dict):
        return Usage()
    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        inputs.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0,
        usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        outputs.get("reasoning_tokens") or 0,
    )
