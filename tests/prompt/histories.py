"""Conversations as agents send them, for tests of all templates."""

from __future__ import annotations

from modelyard.core.request import Message, Part, Request, Text, Tool, ToolCall, ToolResult
from modelyard.prompt.template_source import builtin, formats
from modelyard.prompt.translation import SOURCE

CHAT_TEMPLATES = tuple(name for name in formats() if SOURCE not in builtin(name))  # without translation templates
TOOL = Tool("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})


def make_message(role: str, *parts: Part | str) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))  # type: ignore[arg-type]


def call(id: str = "call_0123456789", arguments: str = '{"path": "a.txt"}') -> ToolCall:
    return ToolCall(id, "read_file", arguments)


def tool_result(id: str = "call_0123456789", text: str = "WORD-RESULT") -> Message:
    return make_message("tool", ToolResult(id, (Text(text),)))


def make_request(*messages: Message, tools: tuple[Tool, ...] = ()) -> Request:
    return Request(model="m", messages=messages, tools=tools)


# name → (request, strings that the prompt must contain in this order)
HISTORIES: dict[str, tuple[Request, tuple[str, ...]]] = {
    "plain": (
        make_request(make_message("system", "WORD-RULES"), make_message("user", "WORD-ONE")),
        ("WORD-RULES", "WORD-ONE"),
    ),
    "system in the middle": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("assistant", "WORD-TWO"),
            make_message("system", "WORD-LATE"),
            make_message("user", "WORD-THREE"),
        ),
        ("WORD-ONE", "WORD-TWO", "WORD-LATE", "WORD-THREE"),
    ),
    "system last": (
        make_request(make_message("user", "WORD-ONE"), make_message("system", "WORD-LATE")),
        ("WORD-ONE", "WORD-LATE"),
    ),
    "developer anywhere": (
        make_request(
            make_message("developer", "WORD-DEV"),
            make_message("user", "WORD-ONE"),
            make_message("developer", "WORD-LATE"),
        ),
        ("WORD-DEV", "WORD-ONE", "WORD-LATE"),
    ),
    "two of a role": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("user", "WORD-TWO"),
            make_message("assistant", "WORD-A"),
            make_message("assistant", "WORD-B"),
            make_message("user", "x"),
        ),
        ("WORD-ONE", "WORD-TWO", "WORD-A", "WORD-B"),
    ),
    "assistant first": (
        make_request(make_message("assistant", "WORD-A"), make_message("user", "WORD-ONE")),
        ("WORD-A", "WORD-ONE"),
    ),
    "a tool": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("assistant", "WORD-LOOK", call()),
            tool_result(),
            tools=(TOOL,),
        ),
        ("WORD-ONE", "WORD-LOOK", "read_file", "a.txt", "WORD-RESULT"),
    ),
    "a tool that is not offered": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("assistant", call()),
            tool_result(),
            make_message("user", "WORD-TWO"),
        ),
        ("WORD-ONE", "a.txt", "WORD-RESULT", "WORD-TWO"),
    ),
    "broken arguments": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("assistant", call(arguments='{"path": "WORD-BR')),
            tool_result(),
            tools=(TOOL,),
        ),
        ("WORD-ONE", "WORD-BR", "WORD-RESULT"),
    ),
    "parallel calls": (
        make_request(
            make_message("user", "WORD-ONE"),
            make_message("assistant", call("a"), call("b", '{"path": "b.txt"}')),
            make_message("tool", ToolResult("a", (Text("WORD-RA"),)), ToolResult("b", (Text("WORD-RB"),))),
            make_message("user", "WORD-STOP"),
            tools=(TOOL,),
        ),
        ("a.txt", "b.txt", "WORD-RA", "WORD-RB", "WORD-STOP"),
    ),
    "only a system prompt": (make_request(make_message("system", "WORD-RULES")), ("WORD-RULES",)),
    "an answer without a question": (make_request(tool_result("x")), ("WORD-RESULT",)),
}
