"""Which bodies are the pool's, which are OpenAI's, and that each is answered in its own shape."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import ContextOverflow
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Request, Text
from modelyard.protocols import openai_responses as wire

TEXTS = [{"type": "text", "text": "Hello"}]
REPLY = Reply(Started("t", "m", 0), (Block(Text("Hi.")),), Finished("end", Usage(1, 0, 1, 0)))


def read(**body: Any) -> Request:
    return wire.read_request(msgspec.json.encode({"model": "m", **body}), {})


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
        {"input": "Hello", "allow_remote": True},
        {"input": "Hello", "thinking": {"type": "enabled"}},
        {"input": [{"role": "user", "content": TEXTS}]},
        {"input": [{"type": "message", "role": "user", "content": "Hello"}]},
    ],
)
def test_every_other_body_is_in_openais_dialect(body: dict[str, Any]) -> None:
    asked = read(**body)
    assert asked.dialect == ""
    assert not asked.allow_remote


def test_each_dialect_has_its_own_reply() -> None:
    pool, openai = read(input="Hello", decoding={}), read(input="Hello")
    mine, theirs = (msgspec.json.decode(wire.write_reply([REPLY], asked)) for asked in (pool, openai))
    assert set(mine) == {"id", "object", "model", "output", "output_text", "metrics"}
    assert theirs["status"] == "completed"
    assert (theirs["output_text"], theirs["metrics"]) == (mine["output_text"], mine["metrics"])


def test_each_dialect_has_its_own_stream_and_errors() -> None:
    pool, openai = read(input="Hello", decoding={}, stream=True), read(input="Hello", stream=True)
    mine, theirs = (wire.writer(asked, "t").write(REPLY.started) for asked in (pool, openai))
    assert b"response.in_progress" in theirs
    assert b"response.in_progress" not in mine
    overflow = ContextOverflow(9, 8)
    assert wire.write_error(overflow, trace="t", streaming=True, request=pool).status == 400
    assert wire.write_error(overflow, trace="t", streaming=True, request=openai).status == 200
