"""Tools of MCP servers in a request: which ones the model is offered, under which names, and who may run them.

A request names servers (`Tool.server`), or its route lists some. Their tools become functions for the model;
`ServerTools` knows where each of them runs. A server that the request names must list its tools, or the request fails.
One that only the route lists is left out with a warning, because the client does not know about it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, field
from msgspec.structs import replace

from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, NotFound
from modelyard.core.events import ListedTool, ToolList
from modelyard.core.request import (
    TOOL_SEARCH,
    Message,
    Part,
    Request,
    Tool,
    ToolApproval,
    ToolCall,
    ToolChoice,
    ToolResult,
    ToolServer,
)
from modelyard.gateway.tool_search import ToolSearch, is_tool_search
from modelyard.mcp.connection import McpConnection, McpTool
from modelyard.mcp.servers import McpServers
from modelyard.telemetry.history import RequestRecord, ToolRun

log = logging.getLogger("modelyard.gateway")

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 64  # what all engines and upstreams take
_ANY_ARGUMENTS = {"type": "object"}  # instead of a schema that is wrong: the server checks its arguments itself


class ServerTool(Struct, frozen=True):
    """A tool that runs at `connection` under its own `name`."""

    connection: McpConnection | ToolSearch
    label: str
    name: str
    asks: bool = False

    @property
    def is_search(self) -> bool:
        return self.label == TOOL_SEARCH


class ServerTools(Struct):
    """The servers' tools of one request by the names that the model knows, and what became of their calls."""

    servers: McpServers
    by_name: dict[str, ServerTool]
    is_shown: bool = True  # the request names servers, so its reply has their calls
    lists: tuple[ToolList, ...] = ()
    approved: tuple[ToolCall, ...] = ()  # calls that the client has just approved, which are run first
    runs: list[ToolRun] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)  # of the rounds


async def offer_tools(
    servers: McpServers, request: Request, route: Sequence[str], *, forwards: bool
) -> tuple[Request, ServerTools | None]:
    """The request with the servers' tools as functions. `forwards`: the engine is another server, which may know
    servers that this one does not."""
    named = [tool.server for tool in request.tools if tool.server is not None]
    searches = [] if forwards else [tool for tool in request.tools if is_tool_search(tool)]
    if request.tool_choice.mode == "none" or request.prompts or request.warm_up or request.n > 1:
        route = ()
    if not named and not route and not searches:
        return request, None
    found: dict[str, tuple[ToolServer, McpConnection]] = {}
    for server in named:
        if server.label in found:
            raise InvalidRequest(f"two MCP servers have the label {server.label!r}", param="mcp_servers")
        try:
            found[server.label] = server, servers.find(server)
        except (Forbidden, NotFound):
            if not forwards:
                raise
    taken = {connection.name for _, connection in found.values()}
    by_route = [name for name in route if name not in taken and name not in found and name in servers.settings.servers]
    listed = await _list_all([connection for _, connection in found.values()], [servers.named(n) for n in by_route])
    found |= {name: (ToolServer(label=name), servers.named(name)) for name in by_route}
    kept = [tool for tool in request.tools if tool.server is None or tool.server.label not in found]
    offered = _Offer([tool for tool in kept if tool not in searches])
    for tool in searches:
        offered.add_search(ToolSearch(tool, kept))
    for (server, connection), tools in zip(found.values(), listed, strict=True):
        globs = servers.tool_globs(connection)
        offered.add(server, connection, [tool for tool in tools or () if _matches(tool.name, globs)])
    messages, approved = _adapt_messages(request.messages, offered.by_name)
    lists = tuple(made for made in offered.lists if not found[made.server][0].is_listed)
    choice = _choice(request.tool_choice, offered.by_name)
    adapted = replace(request, tools=tuple(offered.tools), messages=messages, tool_choice=choice)
    return adapted, ServerTools(servers, offered.by_name, bool(named), lists, approved)


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


async def _list_all(
    named: Sequence[McpConnection], by_route: Sequence[McpConnection]
) -> list[tuple[McpTool, ...] | None]:
    lists = await asyncio.gather(*(one.tools() for one in (*named, *by_route)), return_exceptions=True)
    for connection, made in zip((*named, *by_route), lists, strict=True):
        if isinstance(made, ModelyardError) and connection in by_route:
            log.warning("%s: the tools of the route are left out", made.message)
        elif isinstance(made, BaseException):
            raise made
    return [None if isinstance(made, BaseException) else made for made in lists]


class _Offer:
    """The tools that the model is offered. A name that is taken gets the label of its server in front."""

    def __init__(self, own: list[Tool]) -> None:
        self.tools, self.by_name, self.lists = own, dict[str, ServerTool](), list[ToolList]()
        self._taken = {tool.name for tool in own}

    def add(self, server: ToolServer, connection: McpConnection, tools: Sequence[McpTool]) -> None:
        listed: list[ListedTool] = []
        for tool in tools:
            read_only = tool.is_read_only
            if not server.offers(tool.name, read_only):
                continue
            name = self._free_name(tool.name, server.label)
            self._taken.add(name)
            self.by_name[name] = ServerTool(
                connection, server.label, tool.name, server.asks_about(tool.name, read_only)
            )
            self.tools.append(Tool(name, tool.description, tool.schema if tool.is_valid else _ANY_ARGUMENTS))
            listed.append(ListedTool(tool.name, tool.description, tool.schema, tool.annotations))
        self.lists.append(ToolList(server.label, tuple(listed)))

    def add_search(self, search: ToolSearch) -> None:
        name = search.tool.name
        self._taken.add(name)
        self.by_name[name] = ServerTool(search, TOOL_SEARCH, name)
        self.tools.append(search.tool)

    def _free_name(self, name: str, label: str) -> str:
        plain = _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME]
        if plain not in self._taken:
            return plain
        longer = _NOT_IN_NAMES.sub("_", f"{label}_{name}")
        number, free = 1, longer[:_MAX_NAME]
        while free in self._taken:
            number += 1
            free = f"{longer[: _MAX_NAME - 4]}_{number}"
        return free


def _choice(choice: ToolChoice, by_name: dict[str, ServerTool]) -> ToolChoice:
    """The names of servers' tools as the model knows them."""
    if choice.server is None:
        return choice
    if choice.name is None:
        return ToolChoice("required")
    for name, tool in by_name.items():
        if (tool.label, tool.name) == (choice.server, choice.name):
            return ToolChoice("named", name)
    raise InvalidRequest(
        f"tool_choice names the tool {choice.name!r} of the MCP server {choice.server!r}, which does not offer it",
        param="tool_choice",
    )


def _adapt_messages(
    messages: tuple[Message, ...], by_name: dict[str, ServerTool]
) -> tuple[tuple[Message, ...], tuple[ToolCall, ...]]:
    """Earlier calls of servers' tools as calls of the functions that they are for the model, an empty result for each
    call that the client has just approved, and those calls."""
    calls = [part for message in messages for part in message.parts if isinstance(part, ToolCall) and part.server]
    approvals = [part.call_id for message in messages for part in message.parts if isinstance(part, ToolApproval)]
    if not calls and not approvals:
        return messages, ()
    by_id = {call.id: call for call in calls}
    names = {(tool.label, tool.name): name for name, tool in by_name.items()}
    for id in approvals:
        if id not in by_id or (by_id[id].server, by_id[id].name) not in names:
            raise InvalidRequest(
                f"the approved call {id!r} is unknown, or its MCP server is not among the tools", param="input"
            )

    def adapted(part: Part) -> Part:
        if isinstance(part, ToolCall) and part.server is not None:
            return replace(part, name=names.get((part.server, part.name), part.name), server=None)
        return ToolResult(part.call_id) if isinstance(part, ToolApproval) else part

    made = tuple(replace(message, parts=tuple(map(adapted, message.parts))) for message in messages)
    return made, tuple(adapted_call(by_id[id], names) for id in approvals)


def adapted_call(call: ToolCall, names: Mapping[tuple[str, str], str]) -> ToolCall:
    return replace(call, name=names[call.server or "", call.name])
