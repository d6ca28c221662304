from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Finished,
    ListedTool,
    Started,
    ToolList,
    Usage,
    collect_reply,
)
from modelyard.core.request import (
    Message,
    Request,
    Text,
    ToolApproval,
    ToolCall,
    ToolChoice,
    ToolResult,
    ToolSelection,
    ToolServer,
)
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses.client import write_items
from modelyard.protocols.openai_responses.stored import decode_stored, encode_stored, prepend_stored
from tests.protocols.event_streams import text
from tests.protocols.golden import check_golden

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LISTS = (ToolList("math", (ListedTool("add", "Add.", SCHEMA, {"readOnlyHint": True}),)),)


def call(index: int, id: str, arguments: str, **more: Any) -> list[Event]:
    start = BlockStart(index, "tool_call", id, "add", server="math", **more)
    return [start, BlockDelta(index, arguments[:3]), BlockDelta(index, arguments[3:]), BlockEnd(index)]


def result(index: int, id: str, text: str, *, is_error: bool = False) -> list[Event]:
    made = ToolResult(id, (Text(text),), is_error)
    return [BlockStart(index, "tool_result", id), BlockEnd(index, result=made)]


ANSWER: list[Event] = [
    Started("r1", "demo", 1_700_000_000, tool_lists=LISTS),
    *text(0, "I add."),
    *call(1, "call_1", '{"a":1}'),
    *call(2, "call_2", '{"a":2}'),
    *result(3, "call_1", "1"),
    *result(4, "call_2", "no", is_error=True),
    *text(5, "Done."),
    Finished("end", Usage(20, 0, 9)),
]
ASKED: list[Event] = [
    Started("r1", "demo", 1_700_000_000),
    *call(0, "call_1", '{"a":1}', asks=True),
    Finished("end", Usage(20, 0, 9)),
]
APPROVED: list[Event] = [
    Started("r1", "demo", 1_700_000_000),
    *call(0, "call_1", '{"a":1}', approved=True),
    *result(1, "call_1", "1"),
    *text(2, "Done."),
    Finished("end", Usage(20, 0, 9)),
]
REQUEST = Request(model="demo", messages=(Message("user", (Text("hi"),)),))


def read(tool: dict[str, Any] | None = None, **body: Any) -> Request:
    tools = [{"type": "mcp", "server_label": "math", **(tool or {})}]
    body = {"model": "demo", "input": "hi", "tools": tools} | body
    return openai_responses.read_request(msgspec.json.encode(body), {})


def server(**tool: Any) -> ToolServer:
    found = read(tool).tools[0].server
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "events"), [("mcp", ANSWER), ("mcp_asked", ASKED), ("mcp_approved", APPROVED)])
def test_calls_of_servers_tools_in_a_reply_and_in_a_stream(name: str, events: list[Event]) -> None:
    writer = openai_responses.writer(REQUEST, "r1")
    check_golden("openai_responses", f"{name}_stream", b"".join(writer.write(event) for event in events))
    whole = openai_responses.write_reply([collect_reply(events)], REQUEST)
    check_golden("openai_responses", f"{name}_reply", whole)


@pytest.mark.parametrize("events", [ANSWER, ASKED, APPROVED])
def test_a_stream_ends_with_the_same_items_as_the_whole_reply(events: list[Event]) -> None:
    writer = openai_responses.writer(REQUEST, "r1")
    frames = b"".join(writer.write(event) for event in events).strip().split(b"\n\n")
    last = msgspec.json.decode(frames[-1].partition(b"data: ")[2])["response"]
    whole = msgspec.json.decode(openai_responses.write_reply([collect_reply(events)], REQUEST))
    assert last["output"] == whole["output"]


def test_a_tool_names_a_server() -> None:
    found = server(server_url="https://a.example/mcp", headers={"x": "y"}, authorization="t", allowed_tools=["add"])
    assert (found.label, found.url) == ("math", "https://a.example/mcp")
    assert found.headers == {"x": "y", "authorization": "Bearer t"}
    assert found.tools == ToolSelection(("add",))
    assert server(allowed_tools={"read_only": True}).tools == ToolSelection(read_only=True)
    assert read({"connector_id": "connector_gmail"}).tools[0].server is None


@pytest.mark.parametrize(
    ("approval", "needed"),
    [
        (None, ["add", "drop"]),
        ("always", ["add", "drop"]),
        ("never", []),
        ({"never": {"tool_names": ["add"]}}, ["drop"]),
        ({"always": {"tool_names": ["add"]}}, ["add"]),
        ({"never": {"read_only": True}}, ["drop"]),
    ],
)
def test_approvals_are_needed_as_openai_says(approval: Any, needed: list[str]) -> None:
    found = server(require_approval=approval)
    tools = {"add": True, "drop": False}
    assert [name for name, read_only in tools.items() if found.asks_about(name, read_only)] == needed


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"server_label": ""}, "tools[0].server_label"),
        ({"server_url": 1}, "tools[0].server_url"),
        ({"headers": {"a": 1}}, "tools[0].headers"),
        ({"allowed_tools": "add"}, "tools[0].allowed_tools"),
        ({"require_approval": "maybe"}, "tools[0].require_approval"),
    ],
)
def test_a_wrong_field_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tool)
    assert caught.value.param == param


def test_a_choice_can_name_a_server() -> None:
    choice = {"type": "mcp", "server_label": "math", "name": "add"}
    request = read(tool_choice=choice)
    assert request.tool_choice == ToolChoice("named", "add", "math")
    assert read(tool_choice={"type": "mcp", "server_label": "math"}).tool_choice == ToolChoice("required", None, "math")
    assert msgspec.json.decode(openai_responses.write_request(request))["tool_choice"] == choice


def items(events: list[Event]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = msgspec.json.decode(openai_responses.write_reply([collect_reply(events)], REQUEST))[
        "output"
    ]
    return output


def test_items_that_are_sent_back_are_the_same_conversation() -> None:
    request = read(input=[{"role": "user", "content": "hi"}, *items(ANSWER)])
    first, second = (ToolCall(f"call_{n}", "add", f'{{"a":{n}}}', server="math") for n in (1, 2))
    assert request.messages[1:] == (
        Message("assistant", (Text("I add."), first, second)),
        Message("tool", (ToolResult("call_1", (Text("1"),)), ToolResult("call_2", (Text("no"),), is_error=True))),
        Message("assistant", (Text("Done."),)),
    )
    assert request.tools[0].server is not None
    assert request.tools[0].server.is_listed


def test_an_approval_stands_for_its_result() -> None:
    asked = [{"role": "user", "content": "hi"}, *items(ASKED)]
    answer = {"type": "mcp_approval_response", "approval_request_id": asked[1]["id"], "approve": True}
    call = ToolCall("call_1", "add", '{"a":1}', server="math")
    pending = read(input=[*asked, answer])
    assert pending.messages[1:] == (Message("assistant", (call,)), Message("tool", (ToolApproval("call_1"),)))
    run = read(input=[*asked, answer, *items(APPROVED)])
    assert run.messages[1:3] == (
        Message("assistant", (call,)),
        Message("tool", (ToolResult("call_1", (Text("1"),)),)),
    )
    refused = read(input=[*asked, answer | {"approve": False, "reason": "no"}])
    assert refused.messages[2].parts[0].is_error  # type: ignore[union-attr]


def test_a_stored_response_continues_with_its_calls_and_results() -> None:
    stored = decode_stored(encode_stored(REQUEST, collect_reply(ANSWER)))
    assert [message.role for message in stored.messages] == ["user", "assistant", "tool", "assistant"]
    assert stored.listed == ("math",)
    resumed = prepend_stored(stored, read())
    assert [message.role for message in resumed.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert resumed.tools[0].server is not None
    assert resumed.tools[0].server.is_listed


def test_a_stored_response_has_the_result_of_an_approved_call_once() -> None:
    call = ToolCall("call_1", "add", '{"a":1}', server="math")
    messages = (*REQUEST.messages, Message("assistant", (call,)), Message("tool", (ToolApproval("call_1"),)))
    request = msgspec.structs.replace(REQUEST, messages=messages)
    stored = decode_stored(encode_stored(request, collect_reply(APPROVED)))
    assert stored.messages[2:] == (
        Message("tool", (ToolResult("call_1", (Text("1"),)),)),
        Message("assistant", (Text("Done."),)),
    )


def test_a_conversation_is_written_as_items() -> None:
    read_back = read(input=[{"role": "user", "content": "hi"}, *items(ANSWER)]).messages
    written = list(write_items(read_back))
    assert [item["type"] for item in written] == ["message", "message", "mcp_call", "mcp_call", "message"]
    assert read(input=written).messages == read_back
