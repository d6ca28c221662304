"""MCP in Messages: `mcp_servers` of the request, the tool `mcp_toolset`, and the blocks of calls and their results.

    {"type": "mcp_tool_use", "id": "mcptoolu_…", "name": …, "server_name": …, "input": {…}}
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_…", "is_error": false, "content": [{"type": "text", …}]}

A server without a toolset offers all of its tools, as in the first version of the beta.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import TOOL_SEARCH, Text, Tool, ToolReference, ToolResult, ToolSelection, ToolServer

TOOLSET = "mcp_toolset"
_CALL_PREFIX, _SEARCH_PREFIX = "mcptoolu_", "srvtoolu_"


class McpToolConfiguration(Struct):
    """Of the first version of the beta."""

    enabled: bool | None = None
    allowed_tools: Annotated[list[limits.Name], limits.Tools] | None = None


class AnthropicMcpServer(Struct):
    name: limits.Name = ""
    type: limits.Word = "url"
    url: limits.Text | None = None
    authorization_token: limits.Text | None = None
    tool_configuration: McpToolConfiguration | None = None


McpServerList = Annotated[list[AnthropicMcpServer], Meta(max_length=256)]


def read_servers(servers: Iterable[AnthropicMcpServer]) -> dict[str, ToolServer]:
    """The servers by name; without those that are turned off."""
    found: dict[str, ToolServer] = {}
    for index, server in enumerate(servers):
        path = f"mcp_servers[{index}]"
        if not server.name:
            raise InvalidRequest(f"{path}.name: an MCP server needs a name", param=f"{path}.name")
        if server.name in found:
            raise InvalidRequest(f"{path}.name: two MCP servers are named {server.name!r}", param=f"{path}.name")
        settings, token = server.tool_configuration or McpToolConfiguration(), server.authorization_token
        names = () if settings.enabled is False else settings.allowed_tools
        found[server.name] = ToolServer(
            label=server.name,
            url=server.url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            tools=ToolSelection(None if names is None else tuple(names)),
        )
    return found


def read_toolset(fields: Mapping[str, Any], servers: Mapping[str, ToolServer], path: str) -> ToolServer:
    """The server of a toolset with the tools that it enables. It may also name a server of the configuration."""
    name = fields.get("mcp_server_name")
    if not isinstance(name, str) or not name:
        param = f"{path}.mcp_server_name"
        raise InvalidRequest(f"{param}: a toolset names its MCP server", param=param)
    server = servers.get(name) or ToolServer(label=name)
    default, configs = fields.get("default_config"), fields.get("configs")
    by_default = not isinstance(default, dict) or default.get("enabled") is not False
    enabled = {
        tool: config.get("enabled", by_default) is not False
        for tool, config in (configs.items() if isinstance(configs, dict) else ())
        if isinstance(config, dict)
    }
    names = server.tools.names if by_default else tuple(tool for tool, is_on in enabled.items() if is_on)
    return ToolServer(
        label=name,
        url=server.url,
        headers=server.headers,
        tools=ToolSelection(names),
        excluded=tuple(tool for tool, is_on in enabled.items() if not is_on),
    )


def without_toolset(servers: Mapping[str, ToolServer], tools: Iterable[Tool]) -> Iterator[Tool]:
    """The servers that no toolset names."""
    named = {tool.server.label for tool in tools if tool.server is not None}
    for name, server in servers.items():
        if name not in named:
            settings = {"mcp_server_name": name}
            yield Tool(name, parameters=settings, kind="server", type=TOOLSET, server=server)


def write_servers(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """For an upstream."""
    return [
        {"type": "url", "name": server.label, "url": server.url}
        | ({"authorization_token": token} if (token := _token(server)) else {})
        for tool in tools
        if (server := tool.server) is not None and server.url
    ]


def _token(server: ToolServer) -> str:
    return server.headers.get("authorization", "").removeprefix("Bearer ")


# --- blocks ---------------------------------------------------------------------------------------------------------


def call_id(block_id: str) -> str:
    return block_id.removeprefix(_CALL_PREFIX).removeprefix(_SEARCH_PREFIX)


def use_block(call_id: str, name: str, server: str, arguments: Any) -> dict[str, Any]:
    if server == TOOL_SEARCH:
        return {"type": "server_tool_use", "id": _SEARCH_PREFIX + call_id, "name": name, "input": arguments}
    named = {"type": "mcp_tool_use", "id": _CALL_PREFIX + call_id, "name": name, "server_name": server}
    return named | {"input": arguments}


def search_result_block(result: ToolResult) -> dict[str, Any]:
    names = [part.name for part in result.content if isinstance(part, ToolReference)]
    content: dict[str, Any] = {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": name} for name in names],
    }
    if result.is_error:
        text = " ".join(part.text for part in result.content if isinstance(part, Text))
        error = {"type": "tool_search_tool_result_error", "error_code": "invalid_tool_input", "error_message": text}
        content = error
    return {"type": "tool_search_tool_result", "tool_use_id": _SEARCH_PREFIX + result.call_id, "content": content}


def result_block(result: ToolResult, searches: Collection[str] = ()) -> dict[str, Any]:
    """A block has room for text only. `searches` are the calls that searched for tools."""
    if result.call_id in searches:
        return search_result_block(result)
    texts = [part.text if isinstance(part, Text) else f"[{type(part).__name__.lower()}]" for part in result.content]
    return {
        "type": "mcp_tool_result",
        "tool_use_id": _CALL_PREFIX + result.call_id,
        "is_error": result.is_error,
        "content": [{"type": "text", "text": text} for text in texts],
    }
