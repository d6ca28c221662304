"""OpenAI's tools that the client runs: shells, patches of files, a screen. Calls and outputs are items of their own.

    tool `local_shell`               local_shell_call, local_shell_call_output
    tool `shell`                     shell_call, shell_call_output          (not in a container of OpenAI)
    tool `apply_patch`               apply_patch_call, apply_patch_call_output
    tool `tool_search`               tool_search_call, tool_search_output   (or the gateway runs it)
    tool `computer`, `computer_use_preview`      computer_call, computer_call_output

A model calls each as a function with the tool's type as its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.request import FILE_ID, Image, ResultPart, Text, Tool, ToolCall, ToolReference, ToolResult
from modelyard.protocols.common.client_tools import ClientTool, schema
from modelyard.protocols.common.extensions import present
from modelyard.protocols.common.json import JsonObject, dumps

_POINTS = {"type": "array", "items": schema("x:integer y:integer")}
_ACTION = schema(
    "type:kind x?:integer y?:integer button?:button keys?:strings path?:points scroll_x?:integer scroll_y?:integer "
    "text?:string",
    kind=("click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait"),
    button=("left", "right", "wheel", "back", "forward"),
    points=_POINTS,
)
_SCREEN = "Use the screen, the mouse and the keyboard of a computer. Positions are in pixels from the top left corner."
TOOLS: Mapping[str, ClientTool] = {
    tool.name: tool
    for tool in (
        ClientTool(
            "local_shell",
            "Run a command on the user's computer. `command` is the program and its arguments.",
            schema(
                "command:strings env?:variables working_directory?:string timeout_ms?:integer user?:string",
            ),
        ),
        ClientTool(
            "shell",
            "Run commands in a shell, one after the other. `max_output_length` limits the characters of the output.",
            schema("commands:strings timeout_ms?:integer max_output_length?:integer"),
        ),
        ClientTool(
            "apply_patch",
            "Create, update or delete one file. `diff` has the new lines, each after `+`, of a created file, and the "
            "hunks of a unified diff for an updated one.",
            schema("type:kind path:string diff?:string", kind=("create_file", "update_file", "delete_file")),
        ),
        ClientTool("computer", _SCREEN, schema("actions:actions", actions={"type": "array", "items": _ACTION})),
        ClientTool("tool_search", "Find tools that can be called from then on.", schema("query:string")),
        ClientTool("computer_use_preview", _SCREEN, schema("action:action", action=_ACTION)),
    )
}
_PREFIXES = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc", "computer": "cu", "computer_use_preview": "cu"}
_PREFIXES["tool_search"] = "tsc"
PREFIXES = frozenset(_PREFIXES.values())
_CALLS = {"local_shell_call", "shell_call", "apply_patch_call", "computer_call"}
CALL_ITEMS = frozenset(_CALLS)
OUTPUT_ITEMS = frozenset(f"{call}_output" for call in _CALLS)


# --- tools ------------------------------------------------------------------------------------------------------------


def is_client_tool(kind: str, entry: JsonObject) -> bool:
    """A shell in a container runs at OpenAI."""
    environment = entry.get("environment")
    hosted = kind == "shell" and isinstance(environment, dict) and environment.get("type") != "local"
    return kind in TOOLS and not hosted and (kind != "tool_search" or entry.get("execution") == "client")


def read_client_tool(kind: str, entry: JsonObject, namespace: str | None) -> Tool:
    tool, width, height = TOOLS[kind], entry.get("display_width"), entry.get("display_height")
    size = f" The screen is {width} x {height} pixels large." if isinstance(width, int | float) and height else ""
    own, text = entry.get("parameters"), entry.get("description")
    parameters = own if kind == "tool_search" and isinstance(own, dict) else tool.parameters
    description = text if kind == "tool_search" and isinstance(text, str) else tool.description + size
    return Tool(kind, description, parameters, type=kind, namespace=namespace, vendor=entry)


def call_type(tools: Iterable[Tool], name: str) -> str | None:
    """The type of the tool that the client runs under this name; None: it is an ordinary function."""
    found = (t for t in tools if t.name == name and (t.vendor is not None or t.kind == "server"))
    return next((t.type for t in found if t.type in TOOLS), None)


def typed(call: ToolCall, tools: Iterable[Tool]) -> ToolCall:
    kind = call_type(tools, call.name)
    return call if kind is None else replace(call, vendor_type=kind)


# --- items ------------------------------------------------------------------------------------------------------------


def prefix(kind: str) -> str:
    """Of the ids of its items."""
    return _PREFIXES[kind]


def write_call(kind: str, status: str, call: ToolCall) -> JsonObject:
    """The item of a call, without an id. Where the model's arguments lack a value, the client finds an empty one."""
    try:
        found = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = {}
    arguments = found if isinstance(found, dict) else {}
    item = {"type": _item_type(kind), "status": status, "call_id": call.id}
    if kind == "tool_search":
        return item | {"execution": "client" if call.server is None else "server", "arguments": arguments}
    if kind == "local_shell":
        names = ("timeout_ms", "user", "working_directory")
        action = {"type": "exec", "command": _strings(arguments.get("command")), "env": arguments.get("env") or {}}
        return item | {"action": action | present(**{name: arguments.get(name) for name in names})}
    if kind == "shell":
        limits = {name: arguments.get(name) for name in ("max_output_length", "timeout_ms")}
        return item | {
            "action": {"commands": _strings(arguments.get("commands"))} | limits,
            "environment": {"type": "local"},
        }
    if kind == "apply_patch":  # it has no status for an incomplete call
        operation = {"type": arguments.get("type") or "update_file", "path": str(arguments.get("path") or "")}
        if operation["type"] != "delete_file":
            operation["diff"] = str(arguments.get("diff") or "")
        return item | {"operation": operation, "status": "completed" if status == "completed" else "in_progress"}
    field, empty = ("action", {"type": "screenshot"}) if kind == "computer_use_preview" else ("actions", [])
    return item | {field: arguments.get(field) or empty, "pending_safety_checks": []}


def _item_type(kind: str) -> str:
    return "computer_call" if kind.startswith("computer") else f"{kind}_call"


def _strings(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [value] if isinstance(value, str) else []


def command_events(item: JsonObject, index: int) -> Iterator[tuple[str, JsonObject]]:
    """The events of a stream that show the commands of a shell call."""
    for number, command in enumerate(item["action"]["commands"]):
        shown = {"output_index": index, "command_index": number, "command": command}
        yield "response.shell_call_command.added", shown
        yield "response.shell_call_command.done", shown


def read_call(item_type: str, call_id: str, fields: JsonObject) -> ToolCall:
    """`fields` are the item's action, actions or operation."""
    if item_type == "computer_call":
        kind = "computer" if "actions" in fields else "computer_use_preview"
        return ToolCall(call_id, kind, dumps(fields), vendor_type=kind)
    kind = item_type.removesuffix("_call")
    values = next((value for value in fields.values() if isinstance(value, dict)), {})
    arguments = {k: v for k, v in values.items() if v is not None and (kind != "local_shell" or k != "type")}
    return ToolCall(call_id, kind, dumps(arguments), vendor_type=kind)


def read_output(call_id: str, output: Any, status: str | None) -> ToolResult:
    """What the model reads of an output: text, or the picture of the screen."""
    content: list[ResultPart] = []
    for part in output if isinstance(output, list) else [output]:
        if isinstance(part, str):
            content.append(Text(part))
        elif isinstance(part, dict):
            content.append(_read_screenshot(part) or Text(_read_commands(part)))
    return ToolResult(call_id, tuple(content), is_error=status == "failed")


def _read_screenshot(part: JsonObject) -> Image | None:
    url, file = part.get("image_url"), part.get("file_id")
    if isinstance(url, str):
        return Image(url)
    return Image(FILE_ID + file) if isinstance(file, str) else None


def _read_commands(part: JsonObject) -> str:
    """Standard output, standard error and how the command ended, as a person would see them."""
    outcome = part.get("outcome")
    outcome = outcome if isinstance(outcome, dict) else {}
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
    texts = [text for name in ("stdout", "stderr") if isinstance(text := part.get(name), str) and text]
    return "\n".join([*(text.removesuffix("\n") for text in texts), f"[{ended}]"])


def search_output(call_id: str, tools: list[JsonObject]) -> JsonObject:
    item = {"type": "tool_search_output", "call_id": call_id, "execution": "server", "status": "completed"}
    return item | {"tools": tools}


def write_output(kind: str, result: ToolResult) -> JsonObject:
    """For an upstream of OpenAI, and in lists of items. The text of a shell's result is its standard output."""
    texts = "\n".join(part.text for part in result.content if isinstance(part, Text))
    if kind == "local_shell":  # its id is the call's
        return {"type": "local_shell_call_output", "id": result.call_id, "output": texts}
    if kind == "tool_search":
        names = [part.name for part in result.content if isinstance(part, ToolReference)]
        return search_output(result.call_id, [{"type": "function", "name": name, "parameters": {}} for name in names])
    item: JsonObject = {"type": f"{_item_type(kind)}_output", "call_id": result.call_id}
    if kind == "shell":
        outcome = {"type": "exit", "exit_code": int(result.is_error)}
        return item | {"output": [{"stdout": texts, "stderr": "", "outcome": outcome}]}
    if kind == "apply_patch":
        return item | {"status": "failed" if result.is_error else "completed", "output": texts}
    image = next((part.url for part in result.content if isinstance(part, Image)), "")
    where, url = ("file_id", image.removeprefix(FILE_ID)) if image.startswith(FILE_ID) else ("image_url", image)
    return item | {"output": {"type": "computer_screenshot", where: url}}
