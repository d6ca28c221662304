from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Finished, Started, Usage, collect_reply
from modelyard.core.request import Message, Request, Text, ToolCall, ToolResult, ToolServer
from modelyard.protocols import anthropic_messages
from tests.protocols.event_streams import text
from tests.protocols.golden import check_golden

SERVER = {"type": "url", "name": "math", "url": "https://a.example/mcp"}
REQUEST = Request(model="demo", messages=(Message("user", (Text("hi"),)),))


def call(index: int, id: str, arguments: str) -> list[Event]:
    start = BlockStart(index, "tool_call", id, "add", server="math")
    return [start, BlockDelta(index, arguments), BlockEnd(index)]


def result(index: int, id: str, text: str, *, is_error: bool = False) -> list[Event]:
    made = ToolResult(id, (Text(text),), is_error)
    return [BlockStart(index, "tool_result", id), BlockEnd(index, result=made)]


ANSWER: list[Event] = [
    Started("r1", "demo", 1_700_000_000, Usage(20)),
    *text(0, "I add."),
    *call(1, "call_1", '{"a":1}'),
    *call(2, "call_2", '{"a":2}'),
    *result(3, "call_1", "1"),
    *result(4, "call_2", "no", is_error=True),
    *text(5, "Done."),
    Finished("end", Usage(20, 0, 9)),
]


def read(**body: Any) -> Request:
    body = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | body
    return anthropic_messages.read_request(msgspec.json.encode(body), {})


def server(toolset: dict[str, Any] | None = None, **more: Any) -> ToolServer:
    tools = [] if toolset is None else [{"type": "mcp_toolset", "mcp_server_name": "math", **toolset}]
    (tool,) = read(mcp_servers=[SERVER | more], tools=tools).tools
    assert tool.server is not None
    return tool.server


def test_calls_of_servers_tools_in_a_reply_and_in_a_stream() -> None:
    writer = anthropic_messages.writer(REQUEST, "r1")
    check_golden("anthropic_messages", "mcp_stream", b"".join(writer.write(event) for event in ANSWER))
    check_golden("anthropic_messages", "mcp_reply", anthropic_messages.write_reply([collect_reply(ANSWER)], REQUEST))


def test_blocks_that_are_sent_back_are_the_same_conversation() -> None:
    reply = msgspec.json.decode(anthropic_messages.write_reply([collect_reply(ANSWER)], REQUEST))
    listing = {"type": "mcp_tool_listing", "mcp_server_name": "math", "tools": []}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [listing, *reply["content"]]}]
    first, second = (ToolCall(f"call_{n}", "add", f'{{"a":{n}}}', server="math") for n in (1, 2))
    request = read(messages=turns)
    assert request.messages[1:] == (
        Message("assistant", (Text("I add."), first, second)),
        Message("tool", (ToolResult("call_1", (Text("1"),)), ToolResult("call_2", (Text("no"),), is_error=True))),
        Message("assistant", (Text("Done."),)),
    )
    assert request.warnings == ()


def test_a_server_offers_all_tools_unless_its_configuration_says_otherwise() -> None:
    assert server(authorization_token="t").headers == {"authorization": "Bearer t"}
    assert server().offers("add", read_only=False)
    some = server(tool_configuration={"allowed_tools": ["add"]})
    assert some.offers("add", read_only=False)
    assert not some.offers("drop", read_only=False)
    assert not server(tool_configuration={"enabled": False}).offers("add", read_only=False)


@pytest.mark.parametrize(
    ("toolset", "offered"),
    [
        ({}, ["add", "drop"]),
        ({"configs": {"drop": {"enabled": False}}}, ["add"]),
        ({"default_config": {"enabled": False}, "configs": {"add": {"enabled": True}}}, ["add"]),
        ({"default_config": {"enabled": False}, "configs": {"add": {"defer_loading": True}}}, []),
    ],
)
def test_a_toolset_selects_tools(toolset: dict[str, Any], offered: list[str]) -> None:
    found = server(toolset)
    assert found.url == SERVER["url"]
    assert [name for name in ("add", "drop") if found.offers(name, read_only=False)] == offered


def test_a_toolset_may_name_a_server_of_the_configuration() -> None:
    (tool,) = read(tools=[{"type": "mcp_toolset", "mcp_server_name": "docs"}]).tools
    assert tool.server == ToolServer(label="docs")


def test_wrong_servers_are_named() -> None:
    for body, param in (
        ({"mcp_servers": [{"type": "url", "url": "x"}]}, "mcp_servers[0].name"),
        ({"mcp_servers": [SERVER, SERVER]}, "mcp_servers[1].name"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools[0].mcp_server_name"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read(**body)
        assert caught.value.param == param


def test_servers_are_forwarded_to_an_upstream() -> None:
    request = read(mcp_servers=[SERVER | {"authorization_token": "t"}])
    written = msgspec.json.decode(anthropic_messages.write_request(request))
    assert written["mcp_servers"] == [SERVER | {"authorization_token": "t"}]
    assert written["tools"][0]["type"] == "mcp_toolset"
