"""A connection to servers of the official SDK. Each starts a program, so most behaviour is tested in tests/e2e."""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client._memory import InMemoryTransport

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Text
from modelyard.mcp.connection import McpConnection, ServerFailed, endpoint, program
from tests.mcp import tool_server

PROGRAM = str(Path(tool_server.__file__))


def connection(transport: Any, **more: float) -> McpConnection:
    return McpConnection("tools", transport, **({"timeout_s": 20.0, "connect_timeout_s": 60.0} | more))


def of_server() -> McpConnection:
    """In this process: the library connects to a server object like to any transport."""
    return connection(lambda _stderr, _on_end: tool_server.server)


async def test_the_tools_are_listed_once_and_called() -> None:
    tools = of_server()
    listed = await tools.tools()
    assert await tools.tools() is listed
    by_name = {tool.name: tool for tool in listed}
    assert by_name["add"].is_read_only
    assert not by_name["secret"].is_read_only
    assert not by_name["misdescribed"].is_valid
    assert (await tools.call("add", {"a": 1, "b": 2})).content == (Text("3"),)
    assert (await tools.call("nothing", {})).status == "error"
    await tools.close()
    assert (await tools.call("add", {"a": 1, "b": 2})).status == "ok"  # opened again
    await tools.close()


async def test_a_call_that_takes_too_long_is_a_result() -> None:
    tools = connection(lambda _stderr, _on_end: tool_server.server, timeout_s=0.05)
    await tools.tools()
    assert (await tools.call("hang", {})).status == "timeout"
    await tools.close()


async def test_a_cancelled_call_is_cancelled_at_the_server(tmp_path: Path) -> None:
    tools, marker = of_server(), tmp_path / "marker"
    call = asyncio.create_task(tools.call("hang", {"marker": str(marker)}))
    while not marker.exists():  # noqa: ASYNC110 - the tool writes it
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert marker.read_text() == "cancelled"
    await tools.close()


async def test_closing_waits_for_the_sessions_before_the_last() -> None:
    """A program that was replaced may still be ending."""
    opened: list[Any] = []
    closed: list[int] = []
    has_ended, has_closed = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow_to_close(_stderr: Any, on_end: Any) -> AsyncIterator[Any]:
        async with InMemoryTransport(tool_server.server) as streams:
            number = len(opened)
            opened.append(on_end)
            yield streams
        if number == 0:
            await has_ended.wait()
        closed.append(number)
        has_closed.set()

    tools = connection(slow_to_close)
    await tools.tools()
    opened[0]()  # the program says that it has ended
    await tools.tools()
    closing = asyncio.create_task(tools.close())
    await has_closed.wait()
    assert (closed, closing.done()) == ([1], False)
    has_ended.set()
    await closing
    assert closed == [1, 0]


async def test_a_program_that_does_not_start_is_an_error_and_not_tried_again_at_once() -> None:
    tools = connection(program("/no/such/program", [], {}, None))
    for _ in range(2):
        with pytest.raises(ServerFailed, match="the MCP server 'tools' cannot be reached"):
            await tools.tools()
    assert (await tools.call("add", {})).status == "lost"
    await tools.close()


async def test_a_program_that_says_nothing_does_not_keep_requests_waiting() -> None:
    silent = connection(
        program(sys.executable, ["-S", "-c", "import sys; sys.stdin.read()"], {}, None), connect_timeout_s=0.3
    )
    with pytest.raises(ServerFailed, match=r"did not start within 0\.3 s"):
        await silent.tools()
    await silent.close()


async def test_an_unreachable_url_is_an_error() -> None:
    with pytest.raises(ServerFailed, match="cannot be reached"):
        await connection(endpoint("http://127.0.0.1:1/mcp", {})).tools()


async def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_mcp(name: str, *args: Any) -> Any:
        if name == "mcp":
            raise ModuleNotFoundError("no", name="mcp")
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_mcp)
    with pytest.raises(InvalidRequest, match=r"install it with pip install 'modelyard\[mcp\]'"):
        await of_server().tools()
