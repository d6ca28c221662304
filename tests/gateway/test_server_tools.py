from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.core.request import (
    Message,
    Request,
    Text,
    Tool,
    ToolApproval,
    ToolCall,
    ToolChoice,
    ToolResult,
    ToolSelection,
    ToolServer,
)
from modelyard.gateway.server_tools import ServerTools, offer_tools
from modelyard.mcp.connection import McpTool, ServerFailed
from modelyard.mcp.servers import McpServers
from modelyard.mcp.settings import McpSettings

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


class ListedConnection:
    """A connection whose tools the test decides."""

    def __init__(self, name: str, tools: list[McpTool] | None) -> None:
        self.name, self._tools = name, tools

    async def tools(self) -> tuple[McpTool, ...]:
        if self._tools is None:
            raise ServerFailed(f"the MCP server {self.name!r} cannot be reached")
        return tuple(self._tools)


def tool(name: str, *, read_only: bool = False, is_valid: bool = True) -> McpTool:
    return McpTool(name, f"does {name}", SCHEMA, {"readOnlyHint": True} if read_only else None, is_valid)


def servers(**tools: list[McpTool] | None) -> McpServers:
    made = McpServers(McpSettings.model_validate({"servers": {name: {"command": "x"} for name in tools}}), {})
    made._configured = {name: ListedConnection(name, its) for name, its in tools.items()}  # type: ignore[misc]
    return made


def named(label: str, **more: Any) -> Tool:
    return Tool("mcp", kind="server", type="mcp", server=ToolServer(label=label, **more))


def request(*tools: Tool, **more: Any) -> Request:
    messages = (Message("user", (Text("hi"),)),)
    return Request(**{"model": "demo", "messages": messages, "tools": tools} | more)


async def offer(
    known: McpServers, wanted: Request, *route: str, forwards: bool = False
) -> tuple[Request, ServerTools | None]:
    return await offer_tools(known, wanted, route, forwards=forwards)


def names(request: Request) -> list[str]:
    return [tool.name for tool in request.tools]


async def test_a_request_without_servers_stays_as_it_is() -> None:
    plain = request(Tool("mine"))
    assert await offer(servers(docs=[tool("search")]), plain) == (plain, None)


async def test_the_tools_of_a_named_server_replace_it() -> None:
    adapted, offered = await offer(servers(docs=[tool("search"), tool("read")]), request(Tool("mine"), named("docs")))
    assert names(adapted) == ["mine", "search", "read"]
    assert adapted.tools[1] == Tool("search", "does search", SCHEMA)
    assert offered is not None
    assert offered.is_shown
    assert [listed.server for listed in offered.lists] == ["docs"]


async def test_a_name_that_is_taken_gets_its_server_in_front() -> None:
    known = servers(a=[tool("search"), tool("x.y/z")], b=[tool("search")])
    adapted, offered = await offer(known, request(Tool("search"), named("a"), named("b")))
    assert names(adapted) == ["search", "a_search", "x_y_z", "b_search"]
    assert offered is not None
    assert (offered.by_name["b_search"].label, offered.by_name["b_search"].name) == ("b", "search")
    assert offered.by_name["x_y_z"].name == "x.y/z"


async def test_a_request_selects_tools() -> None:
    known = servers(docs=[tool("search", read_only=True), tool("write"), tool("drop")])
    some, _ = await offer(known, request(named("docs", tools=ToolSelection(("write", "drop")), excluded=("drop",))))
    assert names(some) == ["write"]
    reading, _ = await offer(known, request(named("docs", tools=ToolSelection(read_only=True))))
    assert names(reading) == ["search"]


async def test_approval_is_asked_for_as_the_request_says() -> None:
    known = servers(docs=[tool("search", read_only=True), tool("write"), tool("drop")])
    server = {"asks": ToolSelection(), "approved": ToolSelection(read_only=True)}
    _, offered = await offer(known, request(named("docs", **server)))
    assert offered is not None
    assert [name for name, one in offered.by_name.items() if one.asks] == ["write", "drop"]


async def test_the_configuration_limits_the_tools_of_a_server() -> None:
    known = servers(docs=[tool("search"), tool("search_all"), tool("drop")])
    known.settings.servers["docs"].tools = ["search*"]
    adapted, _ = await offer(known, request(named("docs")))
    assert names(adapted) == ["search", "search_all"]


async def test_a_wrong_schema_is_not_shown_to_the_model() -> None:
    adapted, _ = await offer(servers(docs=[tool("search", is_valid=False)]), request(named("docs")))
    assert adapted.tools[0].parameters == {"type": "object"}


async def test_a_route_offers_its_servers_and_hides_their_calls() -> None:
    known = servers(docs=[tool("search")], gone=None)
    adapted, offered = await offer(known, request(Tool("mine")), "docs", "gone")
    assert names(adapted) == ["mine", "search"]
    assert offered is not None
    assert not offered.is_shown


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompts": ("x",), "messages": ()}, {"warm_up": True}, {"tool_choice": ToolChoice("none")}]
)
async def test_a_route_offers_nothing_where_no_tool_could_be_called(more: dict[str, Any]) -> None:
    _, offered = await offer(servers(docs=[tool("search")]), request(**more), "docs")
    assert offered is None


async def test_a_named_server_must_list_its_tools() -> None:
    with pytest.raises(ServerFailed):
        await offer(servers(gone=None), request(named("gone")))
    with pytest.raises(NotFound):
        await offer(servers(), request(named("nobody")))
    with pytest.raises(InvalidRequest, match="two MCP servers have the label 'docs'"):
        await offer(servers(docs=[]), request(named("docs"), named("docs")))


async def test_an_upstream_may_know_servers_that_this_one_does_not() -> None:
    known = servers(docs=[tool("search")])
    adapted, _ = await offer(known, request(named("nobody"), named("docs")), forwards=True)
    assert names(adapted) == ["mcp", "search"]


async def test_a_choice_names_a_tool_of_a_server() -> None:
    known = servers(docs=[tool("search")])
    named_tool = ToolChoice("named", "search", "docs")
    adapted, _ = await offer(known, request(Tool("search"), named("docs"), tool_choice=named_tool))
    assert adapted.tool_choice == ToolChoice("named", "docs_search")
    any_tool, _ = await offer(known, request(named("docs"), tool_choice=ToolChoice("required", None, "docs")))
    assert any_tool.tool_choice == ToolChoice("required")
    with pytest.raises(InvalidRequest, match="which does not offer it"):
        await offer(known, request(named("docs"), tool_choice=ToolChoice("named", "drop", "docs")))


async def test_earlier_calls_have_the_names_that_the_model_knows_now() -> None:
    known = servers(docs=[tool("search")])
    call = ToolCall("call_1", "search", "{}", server="docs")
    messages = (Message("assistant", (call,)), Message("tool", (ToolResult("call_1", (Text("x"),)),)))
    adapted, offered = await offer(known, request(Tool("search"), named("docs"), messages=messages))
    assert adapted.messages[0].parts == (ToolCall("call_1", "docs_search", "{}"),)
    assert offered is not None
    assert offered.approved == ()


async def test_an_approved_call_is_to_be_run() -> None:
    known = servers(docs=[tool("search")])
    call = ToolCall("call_1", "search", "{}", server="docs")
    messages = (Message("assistant", (call,)), Message("tool", (ToolApproval("call_1"),)))
    adapted, offered = await offer(known, request(named("docs"), messages=messages))
    assert adapted.messages[1].parts == (ToolResult("call_1"),)
    assert offered is not None
    assert offered.approved == (call,)
    with pytest.raises(InvalidRequest, match="approved call 'call_1' is unknown"):
        await offer(known, request(named("docs"), messages=messages[1:]))
