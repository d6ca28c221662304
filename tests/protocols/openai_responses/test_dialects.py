"""Which bodies are in the pool dialect, which in OpenAI's, and that each gets a reply in its dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import ContextOverflow
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Request, Text
from modelyard.protocols import openai_responses

TEXTS = [{"type": "text", "text": "Hello"}]
REPLY = Reply(Started("t", "m", 0), (Block(Text("Hi.")),), Finished("end", Usage(1, 0, 1, 0)))


def read(**body: Any) -> Request:
    return openai_responses.read_request(msgspec.json.encode({"model": "m", **body}), {})


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hello", "decoding": {}},
        {"input": "Hello", "decoding": None},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"input": "Hello", "thinking": "default"},
        {"input": "Hello", "source_lang_code": "nl"},
        {"input": "Hello", "target_lang_code": None},
        {"input": TEXTS},
        {"input": [*TEXTS, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
    ],
)
def test_a_key_or_item_type_of_the_pool_dialect_selects_it(body: dict[str, Any]) -> None:
    assert read(**body).dialect == "pool_responses"


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hello"},
        {"input": "Hello", "instructions": "Be brief.", "stream": True},
        {"input": "Hello", "thinking": {"type": "enabled"}},
        {"input": [{"role": "user", "content": TEXTS}]},
        {"input": [{"type": "message", "role": "user", "content": "Hello"}]},
    ],
)
def test_every_other_body_is_in_openais_dialect(body: dict[str, Any]) -> None:
    request = read(**body)
    assert request.dialect == ""
    assert not request.allow_remote


def test_each_dialect_has_its_own_reply() -> None:
    requests = read(input="Hello", decoding={}), read(input="Hello")
    pool, openai = (msgspec.json.decode(openai_responses.write_reply([REPLY], request)) for request in requests)
    assert set(pool) == {"id", "object", "model", "output", "output_text", "metrics"}
    assert openai["status"] == "completed"
    assert (openai["output_text"], openai["metrics"]) == (pool["output_text"], pool["metrics"])


def test_each_dialect_has_its_own_stream_and_errors() -> None:
    pool, openai = read(input="Hello", decoding={}, stream=True), read(input="Hello", stream=True)
    assert b"response.in_progress" in openai_responses.writer(openai, "t").write(REPLY.started)
    assert b"response.in_progress" not in openai_responses.writer(pool, "t").write(REPLY.started)
    overflow = ContextOverflow(9, 8)
    assert openai_responses.write_error(overflow, trace="t", streaming=True, request=pool).status == 400
    assert openai_responses.write_error(overflow, trace="t", streaming=True, request=openai).status == 200
