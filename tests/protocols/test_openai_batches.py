"""Lines, rows, usage and bodies of OpenAI's batches, and what Anthropic's results look like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai.types import Batch as OpenaiBatch
from openai.types import FileObject

from modelyard.core.batch import Batch, BatchFault, BatchRow, LineFault
from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Usage
from modelyard.core.store import FileRecord
from modelyard.protocols import openai_batches
from modelyard.protocols.anthropic_messages import batches as message_batches

CHAT = "/v1/chat/completions"
BATCH = Batch(id="batch_1", api="openai", endpoint=CHAT, input_file="file-1", created=1000, expires=2000)


def line(**changes: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def test_a_line_has_an_id_and_a_body() -> None:
    read = openai_batches.read_line(line(), CHAT)
    assert (read.custom_id, json.loads(read.body)) == ("a", {"model": "m"})
    assert openai_batches.read_line_model(read.body) == "m"
    assert openai_batches.read_line_model(b"{}") is None


@pytest.mark.parametrize(
    ("data", "code", "id"),
    [
        (b"{", "invalid_json_line", None),
        (b"7", "invalid_json_line", None),
        (b'{"custom_id": 7}', "invalid_json_line", None),
        (line(custom_id=None), "invalid_custom_id", None),
        (line(custom_id="x" * 513), "invalid_custom_id", "x" * 512),
        (line(method="GET"), "invalid_method", "a"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "a"),
        (line(body=None), "invalid_request", "a"),
        (line(body="text"), "invalid_request", "a"),
        (line(body={"stream": True}), "invalid_request", "a"),
        (line(body={"background": True}), "invalid_request", "a"),
    ],
)
def test_a_bad_line_has_a_code_and_its_id(data: bytes, code: str, id: str | None) -> None:
    with pytest.raises(LineFault) as fault:
        openai_batches.read_line(data, CHAT)
    assert (fault.value.code, fault.value.custom_id) == (code, id)


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("1h", 3600), ("7d", 604_800)])
def test_a_window_is_hours_or_days(window: str, seconds: int) -> None:
    body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": window}
    batch = openai_batches.read_batch(json.dumps(body).encode(), "batch_1", 1000)
    assert (batch.expires, batch.window) == (1000 + seconds, window)


@pytest.mark.parametrize("window", ["0h", "h", "24", "31d", "-1h", "24h "])
def test_another_window_is_refused(window: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": window}
    with pytest.raises(InvalidRequest, match="completion_window"):
        openai_batches.read_batch(json.dumps(body).encode(), "batch_1", 1000)


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, Usage(5, 2, 3)),
        (
            {"input_tokens": 5, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}},
            Usage(5, 0, 3, 1),
        ),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, Usage(5)),
        (None, Usage()),
    ],
)
def test_usage_of_every_endpoint_is_read(usage: Any, found: Usage) -> None:
    assert openai_batches.read_usage(json.dumps({"usage": usage}).encode()) == found


def test_rows_and_objects_have_the_fields_of_the_api() -> None:
    row = BatchRow(3, "a", "succeeded", 200, "req_1", b'{"id":"x"}')
    assert json.loads(openai_batches.write_row(row, BATCH)) == {
        "id": "batch_req_1_3",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"id": "x"}},
        "error": None,
    }
    failed = json.loads(openai_batches.write_row(BatchRow(1, None, "errored", code="c", message="m"), BATCH))
    assert (failed["response"], failed["error"]) == (None, {"code": "c", "message": "m"})
    written = openai_batches.write_batch(BATCH)
    assert set(written) == set(OpenaiBatch.model_fields)
    OpenaiBatch.model_validate(written)
    faulty = openai_batches.write_batch(Batch(id="b", api="openai", endpoint=CHAT, created=1, expires=2,
                                              faults=(BatchFault("c", "m", 3),)))  # fmt: skip
    assert faulty["errors"]["data"] == [{"code": "c", "message": "m", "line": 3, "param": None}]
    assert set(openai_batches.write_file(FileRecord("f", 1, 2, 3, "n", "batch"))) == set(FileObject.model_fields)


def test_a_message_batch_has_the_fields_of_the_api() -> None:
    batch = Batch(id="msgbatch_1", api="anthropic", endpoint="/v1/messages", created=0, expires=86_400, total=3)
    written = message_batches.write_message_batch(batch, "http://localhost:8000")
    assert set(written) == set(MessageBatch.model_fields)
    assert (written["processing_status"], written["request_counts"]["processing"]) == ("in_progress", 3)
    assert written["created_at"] == "1970-01-01T00:00:00Z"
    ended = Batch(id="m", api="anthropic", endpoint="/v1/messages", created=0, expires=9, total=3, status="cancelled",
                  times={"cancelling": 1, "cancelled": 2}, counts={"succeeded": 1, "canceled": 2})  # fmt: skip
    written = message_batches.write_message_batch(ended, "http://localhost:8000")
    assert written["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 0, "canceled": 2, "expired": 0}
    assert written["ended_at"] == "1970-01-01T00:00:02Z"
    assert written["results_url"] == "http://localhost:8000/v1/messages/batches/m/results"


def test_each_result_of_a_message_batch_is_a_line() -> None:
    error = b'{"type":"error","error":{"type":"api_error","message":"x"},"request_id":"r"}'
    for row, kind in (
        (BatchRow(1, "a", "errored", 500, "r", error), "errored"),
        (BatchRow(1, "a", "errored", code="invalid_request", message="m"), "errored"),
        (BatchRow(1, "a", "canceled", code="c", message="m"), "canceled"),
        (BatchRow(1, "a", "expired", code="c", message="m"), "expired"),
    ):
        written = message_batches.write_result(row)
        assert written.endswith(b"\n")
        assert MessageBatchIndividualResponse.model_validate_json(written).result.type == kind


def test_a_request_of_a_message_batch_is_stored_on_one_line() -> None:
    body = b'{"requests": [{"custom_id": "a", "params": {\n "model": "m",\n "system": "x\\ny"}}]}'
    (request,) = message_batches.read_batch_requests(body, 10)
    stored = message_batches.write_batch_line(request)
    assert stored.count(b"\n") == 1
    line = message_batches.read_batch_line(stored)
    assert (line.custom_id, json.loads(line.body)) == ("a", {"model": "m", "system": "x\ny"})
    for params in (b"7", b'{"stream": true}'):
        with pytest.raises(LineFault):
            message_batches.read_batch_line(b'{"custom_id": "a", "params": ' + params + b"}")
