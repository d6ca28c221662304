"""Calls that an upstream has run itself: read where they are asked for, else left out."""

from __future__ import annotations

import json

import pytest

from modelyard.core.events import ReplyBuilder
from modelyard.core.request import Text, ToolCall, ToolResult
from modelyard.protocols.openai_responses.client import ResponsesStreamReader

CALL = {"type": "mcp_call", "id": "mcp_0_call_1", "name": "add", "server_label": "sums", "arguments": ""}
DONE = {**CALL, "arguments": '{"a":1}', "status": "completed"}
MESSAGE = {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "Two."}]}


def stream(result: dict[str, object]) -> bytes:
    events = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "m"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "mcp_list_tools", "id": "mcpl_1"}},
        {"type": "response.output_item.added", "output_index": 1, "item": CALL},
        {"type": "response.mcp_call_arguments.delta", "output_index": 1, "delta": '{"a":1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": {**DONE, **result}},
        {"type": "response.output_item.added", "output_index": 2, "item": {**MESSAGE, "content": []}},
        {"type": "response.output_item.done", "output_index": 2, "item": MESSAGE},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}},
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize(
    ("result", "text", "is_error"), [({"output": "2"}, "2", False), ({"error": "no disk"}, "no disk", True)]
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_call_that_the_upstream_ran_has_its_result(
    result: dict[str, object], text: str, is_error: bool, size: int
) -> None:
    builder, reader, data = ReplyBuilder(), ResponsesStreamReader(server_calls=True), stream(result)
    for at in range(0, len(data), size):
        builder.feed(reader.feed(data[at : at + size]))
    reply = builder.reply()
    assert [block.part for block in reply.blocks] == [
        ToolCall("call_1", "add", '{"a":1}', server="sums"),
        ToolResult("call_1", (Text(text),), is_error=is_error),
        Text("Two."),
    ]
    assert reply.finished.reason == "end", "nothing is left for the client to run"


def test_other_readers_see_the_answer_only() -> None:
    builder = ReplyBuilder()
    builder.feed(ResponsesStreamReader().feed(stream({"output": "2"})))
    assert [block.part for block in builder.reply().blocks] == [Text("Two.")]
