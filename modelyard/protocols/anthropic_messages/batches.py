"""Anthropic's Message Batches: `/v1/messages/batches`, their requests and their results."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from modelyard.core import limits
from modelyard.core.batch import Batch, BatchLine, BatchRow, LineFault
from modelyard.core.errors import InvalidRequest
from modelyard.protocols.anthropic_messages.reply import write_time
from modelyard.protocols.common.json import JsonObject, decode, encode

ENDPOINT = "/v1/messages"
WINDOW_S = 86_400
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class BatchRequest(Struct):
    custom_id: limits.Id
    params: Raw


class MessageBatchBody(Struct):
    requests: Annotated[list[BatchRequest], Meta(min_length=1)]


_body = msgspec.json.Decoder(MessageBatchBody)
_request = msgspec.json.Decoder(BatchRequest)
_fields = msgspec.json.Decoder(dict[str, Raw])


def read_batch_requests(body: bytes, most: int) -> list[BatchRequest]:
    requests = decode(_body, body).requests
    if len(requests) > most:
        raise InvalidRequest(f"requests has {len(requests)} entries; the most are {most}", param="requests")
    seen: set[str] = set()
    for index, request in enumerate(requests):
        path = f"requests.{index}.custom_id"
        if not _CUSTOM_ID.fullmatch(request.custom_id):
            raise InvalidRequest(f"{path} must be 1 to 64 letters, digits, '_' or '-'", param=path)
        if request.custom_id in seen:
            raise InvalidRequest(f"{path}: {request.custom_id!r} is used twice", param=path)
        seen.add(request.custom_id)
    return requests


def read_batch_line(line: bytes) -> BatchLine:
    """A request as it was stored."""
    request = _request.decode(line)
    params = bytes(request.params)
    if not params.startswith(b"{"):
        raise LineFault("invalid_request", "params must be an object: the request", request.custom_id)
    if bytes(_fields.decode(params).get("stream", Raw(b"null"))) == b"true":
        raise LineFault("invalid_request", "params.stream must be false in a batch", request.custom_id)
    return BatchLine(request.custom_id, params)


def write_batch_line(request: BatchRequest) -> bytes:
    """On one line: a client's JSON may contain line breaks between values."""
    return (
        encode({"custom_id": request.custom_id, "params": Raw(msgspec.json.format(request.params, indent=-1))}) + b"\n"
    )


def write_message_batch(batch: Batch, base_url: str) -> JsonObject:
    """Requests count as processing until the whole batch has ended."""
    ended, counts = batch.has_ended, {"processing": batch.total, "succeeded": 0, "errored": 0}
    counts |= {"canceled": 0, "expired": 0}
    if ended:
        counts = {"processing": 0} | {name: batch.counts.get(name, 0) for name in list(counts)[1:]}
    ended_at = next(
        (
            batch.times[state]
            for state in ("completed", "cancelled", "expired", "failed")
            if ended and state in batch.times
        ),
        None,
    )
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": counts,
        "created_at": write_time(batch.created),
        "expires_at": write_time(batch.expires),
        "ended_at": write_time(ended_at),
        "cancel_initiated_at": write_time(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"{base_url}/v1/messages/batches/{batch.id}/results" if ended else None,
    }


def write_deleted_batch(id: str) -> bytes:
    return encode({"id": id, "type": "message_batch_deleted"})


def write_result(row: BatchRow) -> bytes:
    """A line of the results."""
    result: JsonObject = {"type": row.outcome}
    if row.outcome == "succeeded":
        result["message"] = Raw(row.body)
    elif row.outcome == "errored":
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": row.message}}
        result["error"] = Raw(row.body) if row.body else error | {"request_id": None}
    return encode({"custom_id": row.custom_id, "result": result}) + b"\n"
