"""Conversations as agents send them, for tests of all templates."""

from __future__ import annotations

from modelyard.core.request import Message, Part, Request, Text, Tool, ToolCall, ToolResult
from modelyard.prompt.template_source import builtin, formats
from modelyard.prompt.translation import SOURCE

TALKING = tuple(name for name in formats() if SOURCE not in builtin(name))  # one that translates takes no conversation
TOOL = Tool("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})


def say(role: str, *parts: Part | str) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))  # type: ignore[arg-type]


def call(id: str = "call_0123456789", arguments: str = '{"path": "a.txt"}') -> ToolCall:
    return ToolCall(id, "read_file", arguments)


def result(id: str = "call_0123456789", text: str = "WORD-RESULT") -> Message:
    return say("tool", ToolResult(id, (Text(text),)))


def ask(*messages: Message, tools: tuple[Tool, ...] = ()) -> Request:
    return Request(model="m", messages=messages, tools=tools)


# name → (request, strings that the prompt must contain in this order)
HISTORIES: dict[str, tuple[Request, tuple[str, ...]]] = {
    "plain": (ask(say("system", "WORD-RULES"), say("user", "WORD-ONE")), ("WORD-RULES", "WORD-ONE")),
    "system in the middle": (
        ask(
            say("user", "WORD-ONE"), say("assistant", "WORD-TWO"), say("system", "WORD-LATE"), say("user", "WORD-THREE")
        ),
        ("WORD-ONE", "WORD-TWO", "WORD-LATE", "WORD-THREE"),
    ),
    "system last": (ask(say("user", "WORD-ONE"), say("system", "WORD-LATE")), ("WORD-ONE", "WORD-LATE")),
    "developer anywhere": (
        ask(say("developer", "WORD-DEV"), say("user", "WORD-ONE"), say("developer", "WORD-LATE")),
        ("WORD-DEV", "WORD-ONE", "WORD-LATE"),
    ),
    "two of a role": (
        ask(
            say("user", "WORD-ONE"),
            say("user", "WORD-TWO"),
            say("assistant", "WORD-A"),
            say("assistant", "WORD-B"),
            say("user", "x"),
        ),
        ("WORD-ONE", "WORD-TWO", "WORD-A", "WORD-B"),
    ),
    "assistant first": (ask(say("assistant", "WORD-A"), say("user", "WORD-ONE")), ("WORD-A", "WORD-ONE")),
    "a tool": (
        ask(say("user", "WORD-ONE"), say("assistant", "WORD-LOOK", call()), result(), tools=(TOOL,)),
        ("WORD-ONE", "WORD-LOOK", "read_file", "a.txt", "WORD-RESULT"),
    ),
    "a tool that is not offered": (
        ask(say("user", "WORD-ONE"), say("assistant", call()), result(), say("user", "WORD-TWO")),
        ("WORD-ONE", "a.txt", "WORD-RESULT", "WORD-TWO"),
    ),
    "broken arguments": (
        ask(say("user", "WORD-ONE"), say("assistant", call(arguments='{"path": "WORD-BR')), result(), tools=(TOOL,)),
        ("WORD-ONE", "WORD-BR", "WORD-RESULT"),
    ),
    "parallel calls": (
        ask(
            say("user", "WORD-ONE"),
            say("assistant", call("a"), call("b", '{"path": "b.txt"}')),
            say("tool", ToolResult("a", (Text("WORD-RA"),)), ToolResult("b", (Text("WORD-RB"),))),
            say("user", "WORD-STOP"),
            tools=(TOOL,),
        ),
        ("a.txt", "b.txt", "WORD-RA", "WORD-RB", "WORD-STOP"),
    ),
    "only a system prompt": (ask(say("system", "WORD-RULES")), ("WORD-RULES",)),
    "an answer without a question": (ask(result("x")), ("WORD-RESULT",)),
}
