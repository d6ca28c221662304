"""MCP in the Responses API: the tool `{"type": "mcp"}`, and the items of its lists, calls and approvals.

    mcp_list_tools          the tools of a server, once per conversation
    mcp_call                a call that the gateway has run, with its output or error
    mcp_approval_request    a call that it runs once the client sends an mcp_approval_response

The id of a call's item holds the id of the call and its place among the calls of one turn of the model, so that the
items lead to the same prompt when a client sends them back: `mcp_0_call_ab`, `mcp_1_call_cd`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeGuard

from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Reply, ToolList
from modelyard.core.request import (
    TOOL_SEARCH,
    Message,
    Part,
    Text,
    Tool,
    ToolApproval,
    ToolCall,
    ToolResult,
    ToolSelection,
    ToolServer,
)
from modelyard.protocols.common.json import JsonObject, dumps
from modelyard.protocols.common.sse import delta_start

ITEM_TYPES = frozenset({"mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"})
_CALL_ID = re.compile(r"mcp_(\d+)_(.+)", re.DOTALL)
_APPROVAL = "mcpr_"
_CREDENTIALS = ("headers", "authorization")


# --- the tool -------------------------------------------------------------------------------------------------------


def read_server(body: JsonObject, path: str) -> ToolServer | None:
    """None for a connector or a tunnel, which are OpenAI's own services."""
    if body.get("connector_id") or body.get("tunnel_id"):
        return None
    label = body.get("server_label")
    if not isinstance(label, str) or not label:
        raise InvalidRequest(f"{path}.server_label: an MCP server needs a label", param=f"{path}.server_label")
    url, headers, token = body.get("server_url"), body.get("headers") or {}, body.get("authorization")
    if url is not None and not isinstance(url, str):
        raise InvalidRequest(f"{path}.server_url must be a string", param=f"{path}.server_url")
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise InvalidRequest(f"{path}.headers must be an object of strings", param=f"{path}.headers")
    if isinstance(token, str) and token:
        headers = headers | {"authorization": token if " " in token else f"Bearer {token}"}
    asks, approved = _read_approval(body.get("require_approval"), path)
    return ToolServer(
        label=label,
        url=url,
        headers=headers,
        tools=_read_selection(body.get("allowed_tools"), f"{path}.allowed_tools") or ToolSelection(),
        asks=asks,
        approved=approved,
    )


def _read_approval(value: Any, path: str) -> tuple[ToolSelection | None, ToolSelection | None]:
    """Which calls need an approval, and which of them do not. Without the field all do."""
    if value in (None, "always"):
        return ToolSelection(), None
    if value == "never":
        return None, None
    path = f"{path}.require_approval"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be 'always', 'never', or an object with these two", param=path)
    always = _read_selection(value.get("always"), f"{path}.always")
    never = _read_selection(value.get("never"), f"{path}.never")
    return always if never is None and always is not None else ToolSelection(), never


def _read_selection(value: Any, path: str) -> ToolSelection | None:
    if value is None:
        return None
    names, read_only = (value.get("tool_names"), value.get("read_only")) if isinstance(value, dict) else (value, None)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_list and names is not None:
        raise InvalidRequest(f"{path} must be a list of tool names, or an object with tool_names", param=path)
    return ToolSelection(None if names is None else tuple(names), read_only if isinstance(read_only, bool) else None)


def public_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """As a response repeats them: without credentials."""
    return tuple(_public(tool) if tool.server is not None else tool for tool in tools)


def _public(tool: Tool) -> Tool:
    settings = {name: value for name, value in tool.parameters.items() if name not in _CREDENTIALS}
    return Tool(tool.name, parameters=settings, kind="server", type=tool.type, namespace=tool.namespace)


# --- items of an input ----------------------------------------------------------------------------------------------


def call_id(item_id: str) -> str:
    """The id of the call in the id of an item, which may be another provider's."""
    found = _CALL_ID.fullmatch(item_id)
    return found[2] if found is not None else item_id.removeprefix(_APPROVAL)


def continues_turn(item_id: str) -> bool:
    """Whether the model made the call in one turn with the call before it."""
    found = _CALL_ID.fullmatch(item_id)
    return found is not None and found[1] != "0"


def read_result(item_id: str, output: Any, error: Any) -> ToolResult:
    text = output if isinstance(output, str) else "" if output is None else dumps(output)
    if error is None:
        return ToolResult(call_id(item_id), (Text(text),))
    return ToolResult(call_id(item_id), (Text(_error_text(error) or text),), is_error=True)


def _error_text(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    content = error.get("content", error.get("message"))
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else dumps(error)


def refusal(item_id: str, reason: Any) -> ToolResult:
    why = f": {reason}" if isinstance(reason, str) and reason else ""
    return ToolResult(call_id(item_id), (Text(f"The user did not approve this call{why}"),), is_error=True)


def _is_mcp_call(part: Part) -> TypeGuard[ToolCall]:
    return isinstance(part, ToolCall) and part.server not in (None, TOOL_SEARCH)


class ServerCalls:
    """Writes the calls of servers' tools in a conversation as items of an input, each with its result."""

    def __init__(self, messages: Iterable[Message]) -> None:
        parts = [part for message in messages for part in message.parts]
        self._calls = {part.id for part in parts if _is_mcp_call(part)}
        self._results = {part.call_id: part for part in parts if isinstance(part, ToolResult)} if self._calls else {}

    def write(self, parts: Iterable[Part], write: Callable[[Part], JsonObject]) -> Iterator[JsonObject]:
        """`write` writes any other part."""
        place = 0
        for part in parts:
            if isinstance(part, ToolApproval):
                yield {
                    "type": "mcp_approval_response",
                    "approval_request_id": _APPROVAL + part.call_id,
                    "approve": True,
                }
            elif _is_mcp_call(part):
                result = self._results.get(part.id)
                item = mcp_item(part, place, "completed", asks=result is None)
                if result is not None:
                    add_result(item, result)
                yield item
            elif not isinstance(part, ToolResult) or part.call_id not in self._calls:
                yield write(part)
            place = place + 1 if isinstance(part, ToolCall) else 0


# --- stored responses -----------------------------------------------------------------------------------------------


def with_answer(
    messages: tuple[Message, ...], parts: Sequence[Part]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages and the answer of a response that ran calls, as the next request reads them: a call that the client
    had approved gets its result where the approval was, the results of other calls are messages of their own."""
    approved = {part.call_id for message in messages for part in message.parts if isinstance(part, ToolApproval)}
    results = {part.call_id: part for part in parts if isinstance(part, ToolResult)}

    def answered(part: Part) -> Part:
        return results.get(part.call_id, part) if isinstance(part, ToolApproval) else part

    if approved:
        messages = tuple(replace(message, parts=tuple(map(answered, message.parts))) for message in messages)
    own = [part for part in parts if _call_of(part) not in approved]
    answer: list[Message] = []
    for is_result, group in groupby(own, key=lambda part: isinstance(part, ToolResult)):
        answer.append(Message("tool" if is_result else "assistant", tuple(group)))
    return messages, tuple(answer) or (Message("assistant"),)


def _call_of(part: Part) -> str:
    return part.id if isinstance(part, ToolCall) else part.call_id if isinstance(part, ToolResult) else ""


def listed_servers(tools: Iterable[Tool], reply: Reply | None) -> tuple[str, ...]:
    """The servers whose tools are listed in the conversation, this reply included."""
    before = [tool.server.label for tool in tools if tool.server is not None and tool.server.is_listed]
    return (*before, *(listed.server for listed in (reply.started.tool_lists if reply is not None else ())))


def with_listed(tools: tuple[Tool, ...], labels: Collection[str]) -> tuple[Tool, ...]:
    """The tools of these servers are listed in the conversation already."""
    return tuple(
        replace(tool, server=replace(tool.server, is_listed=True))
        if tool.server is not None and tool.server.label in labels
        else tool
        for tool in tools
    )


# --- items of an output ---------------------------------------------------------------------------------------------


def list_item(listed: ToolList, key: str, index: int) -> JsonObject:
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.schema,
            "annotations": tool.annotations,
        }
        for tool in listed.tools
    ]
    return {"id": f"mcpl_{key}_{index}", "type": "mcp_list_tools", "server_label": listed.server, "tools": tools}


def list_events(item: JsonObject, index: int) -> Iterator[tuple[str, JsonObject]]:
    position = {"item_id": item["id"], "output_index": index}
    yield "response.output_item.added", {"output_index": index, "item": item | {"tools": []}}
    yield "response.mcp_list_tools.in_progress", position
    yield "response.mcp_list_tools.completed", position
    yield "response.output_item.done", {"output_index": index, "item": item}


def mcp_item(call: ToolCall, place: int, status: str, *, asks: bool = False, approved: bool = False) -> JsonObject:
    """`place` among the calls of one turn."""
    named = {"name": call.name, "server_label": call.server, "arguments": call.arguments}
    if asks:
        return {"id": f"{_APPROVAL}{call.id}", "type": "mcp_approval_request", **named}
    return {
        "id": f"mcp_{place}_{call.id}",
        "type": "mcp_call",
        "status": status,
        **named,
        "approval_request_id": f"{_APPROVAL}{call.id}" if approved else None,
        "output": None,
        "error": None,
    }


def add_result(item: JsonObject, result: ToolResult) -> None:
    text = result_text(result)
    item["status"] = "failed" if result.is_error else "completed"
    if result.is_error:
        item["error"] = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
    else:
        item["output"] = text


def result_text(result: ToolResult) -> str:
    """An item has room for text only."""
    return "\n".join(
        part.text if isinstance(part, Text) else f"[{type(part).__name__.lower()}]" for part in result.content
    )


class McpCallWriter:
    """One call as the output item at `index`. The item stays open until its result comes."""

    def __init__(self, start: BlockStart, index: int, place: int) -> None:
        self._start, self._index, self._place = start, index, place
        self._text: list[str] = []
        self.item = self._item("", "in_progress")
        asks = start.asks  # an approval request is sent whole
        self.delta_starts = () if asks else (delta_start("response.mcp_call_arguments.delta", self._position),)

    def _item(self, arguments: str, status: str) -> JsonObject:
        start = self._start
        call = ToolCall(start.call_id, start.name, arguments, server=start.server)
        return mcp_item(call, self._place, status, asks=start.asks, approved=start.approved)

    @property
    def _position(self) -> JsonObject:
        return {"item_id": self.item["id"], "output_index": self._index}

    def start_events(self) -> Iterator[tuple[str, JsonObject]]:
        if not self._start.asks:
            yield "response.output_item.added", {"output_index": self._index, "item": self.item}
            yield "response.mcp_call.in_progress", self._position

    def add(self, delta: BlockDelta) -> bytes:
        self._text.append(delta.text)
        return b""

    def end(self, end: BlockEnd) -> Iterator[tuple[str, JsonObject]]:
        """The arguments are complete, or cut."""
        arguments = "".join(self._text)
        self.item = self._item(arguments, "calling" if end.complete else "incomplete")
        added = {"output_index": self._index, "item": self.item}
        if self._start.asks:
            yield "response.output_item.added", added
            yield "response.output_item.done", added
        elif end.complete:
            yield "response.mcp_call_arguments.done", self._position | {"arguments": arguments}
        else:
            yield "response.output_item.done", added

    def finish(self, result: ToolResult) -> Iterator[tuple[str, JsonObject]]:
        add_result(self.item, result)
        yield f"response.mcp_call.{self.item['status']}", self._position
        yield "response.output_item.done", {"output_index": self._index, "item": self.item}
