"""Resources and prompts as tools, in a session of the official SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp.server import MCPServer

from modelyard.core.request import Text
from modelyard.mcp.connection import McpConnection

server = MCPServer("notes")


@server.resource("note://one", description="The first note.")
def one() -> str:
    return "Buy milk."


@server.resource("note://of/{day}")
def of_day(day: str) -> str:
    return f"Nothing on {day}."


@server.prompt()
def review(language: str) -> str:
    """Review some code."""
    return f"Review this {language} code."


@server.tool(structured_output=False)
def list_prompts() -> str:
    """A tool of the server that has the name of one of ours."""
    return "its own"


def notes(*offered: str) -> McpConnection:
    return McpConnection("notes", lambda _e, _o: server, timeout_s=20, connect_timeout_s=60, offered=frozenset(offered))


async def text(connection: McpConnection, tool: str, arguments: dict[str, Any]) -> str:
    result = await connection.call(tool, arguments)
    (part,) = result.content
    assert isinstance(part, Text)
    return part.text


async def test_only_what_the_settings_offer_is_a_tool() -> None:
    connection = notes()
    assert [tool.name for tool in await connection.tools()] == ["list_prompts"]
    assert (await connection.call("read_resource", {"uri": "note://one"})).status == "error"
    await connection.close()


async def test_resources_are_listed_and_read() -> None:
    connection = notes("resources")
    assert {"list_resources", "read_resource"} < {tool.name for tool in await connection.tools()}
    listed = json.loads(await text(connection, "list_resources", {}))
    assert [entry.get("uri") or entry["uriTemplate"] for entry in listed] == ["note://one", "note://of/{day}"]
    assert await text(connection, "read_resource", {"uri": "note://one"}) == "Buy milk."
    assert await text(connection, "read_resource", {"uri": "note://of/Monday"}) == "Nothing on Monday."
    await connection.close()


async def test_prompts_are_read_and_a_tool_of_the_server_keeps_its_name() -> None:
    connection = notes("prompts")
    await connection.tools()
    assert await text(connection, "get_prompt", {"name": "review", "arguments": {"language": "C"}}) == (
        "Review this C code."
    )
    assert await text(connection, "list_prompts", {}) == "its own"
    await connection.close()


@pytest.mark.parametrize(
    "arguments", [{}, {"uri": 7}, {"uri": "note://nowhere"}], ids=["no address", "a number", "unknown"]
)
async def test_wrong_arguments_are_a_result_that_the_model_reads(arguments: dict[str, Any]) -> None:
    connection = notes("resources")
    await connection.tools()
    assert (await connection.call("read_resource", arguments)).status == "error"
    await connection.close()
