"""An MCP server of the official SDK with tools that work, fail, hang, lie and die.

python tool_server.py         on its standard streams
python tool_server.py PORT    over streamable HTTP
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent, ToolAnnotations

server = MCPServer("tools")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"0" * 20).decode()


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(structured_output=False)
def secret() -> str:
    """Tell the token of this server."""
    return os.environ.get("TOKEN", "no token")


@server.tool(structured_output=False)
def fail() -> str:
    """Always fail."""
    raise ToolError("the disk is full")


@server.tool(structured_output=False)
async def hang(marker: str = "") -> str:
    """Never answer; write to the marker when it is called and when it is cancelled."""
    _write(marker, "called")
    try:
        await asyncio.sleep(3600)
    finally:
        _write(marker, "cancelled")
    return ""


def _write(marker: str, state: str) -> None:
    if marker:
        Path(marker).write_text(state)


@server.tool(structured_output=False)
def die() -> str:
    """End the whole server."""
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool(structured_output=False)
def big(count: int) -> str:
    """Write many letters."""
    return "x" * count


@server.tool(structured_output=False)
def picture() -> CallToolResult:
    """Draw something."""
    return CallToolResult(content=[TextContent(text="a dot"), ImageContent(data=PNG, mime_type="image/png")])


@server.tool(name="odd.name/x", structured_output=False)
def odd() -> str:
    """Have a name that models cannot say."""
    return "odd"


@server.tool(structured_output=False)
def misdescribed(a: int) -> str:
    """Have a schema that is none."""
    return str(a)


described: Any = server._tool_manager.get_tool("misdescribed")
described.parameters = {"type": "object", "properties": {"a": {"type": "nonsense"}}}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdecimal():
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
