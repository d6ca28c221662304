"""Background requests are distinguished from conversations by their shape, with bodies as real agents send them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.request import Constraint, Message, Request, Text, Tool, ToolCall, ToolResult
from modelyard.gateway.priority import background_task_id, priority
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from tests.gateway.harness import CALLER, GatewayHarness, make_request

SCHEMA = Constraint("json_schema", '{"type": "object"}')
BASH, SEARCH = Tool("Bash"), Tool("web_search", kind="server", type="web_search_20250305")


def messages(*turns: tuple[Any, str]) -> tuple[Message, ...]:
    return tuple(Message(role, (Text(text),)) for role, text in turns)


def messages_with_tool_call() -> tuple[Message, ...]:
    called = Message("assistant", (ToolCall("c1", "Bash", "{}"),))
    return (
        *messages(("user", "list")),
        called,
        Message("tool", (ToolResult("c1", (Text("a"),)),)),
        *messages(("user", "now")),
    )


def request(**fields: Any) -> Request:
    return Request(**{"model": "local", "session": "s", "messages": messages(("user", "hi"))} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": (BASH,)},
        {"tools": (BASH,), "model": "claude-haiku-4-5"},
        {"tools": (BASH,), "constraint": SCHEMA},
        {"tools": (BASH, SEARCH)},
        {"tools": (BASH,), "messages": messages_with_tool_call()},
        {},
        {"stop": ("END",), "max_tokens": 64, "stream": True},
        {"stop": ("END",), "max_tokens": 32000},
        {"constraint": SCHEMA, "session": None},
        {"constraint": SCHEMA, "messages": messages(("user", "a"), ("assistant", "{}"), ("user", "b"))},
        {"messages": messages(("system", "You are an expert coder. " * 20 + "Write titles."), ("user", "hi"))},
        {"messages": messages(("user", "Write a title for my novel."))},
        {"model": "haikus-by-me"},
        {"model": "claude-haiku-4-5", "priority": "main"},
        {"model": ""},
        {"messages": ()},
    ],
)
def test_conversations_have_main_priority(fields: dict[str, Any]) -> None:
    assert priority(request(**fields)) == "main"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": (BASH,), "priority": "background"},
        {"model": "claude-haiku-4-5"},
        {"model": "local-haiku", "session": None},
        {"messages": messages_with_tool_call()},
        {"tools": (SEARCH,), "messages": messages(("user", "Perform a web search for: x"))},
        {"constraint": SCHEMA},
        {"constraint": SCHEMA, "messages": messages(("system", "Name it."), ("user", "hi"), ("system", "env"))},
        {"stop": ("</block>",), "max_tokens": 64, "messages": messages(("system", "x" * 99_999), ("user", "rm -rf /"))},
        {"stop": ("</block>",), "max_tokens": 2112, "messages": messages(("user", "rm"), ("assistant", "<block>"))},
        {"messages": messages(("system", "You are a title generator. Output ONLY a title."), ("user", "hi"))},
        {"messages": messages(("developer", "Summarize the conversation."), ("user", "hi"))},
    ],
)
def test_side_requests_have_background_priority(fields: dict[str, Any]) -> None:
    assert priority(request(**fields)) == "background"


def test_background_tasks_of_one_kind_share_an_id() -> None:
    title, again, verdict = (
        request(messages=messages(("system", system), ("user", user)))
        for system, user in (("Title.", "a"), ("Title.", "b"), ("Block or not?", "a"))
    )
    assert background_task_id(title) == background_task_id(again) != background_task_id(verdict)
    assert background_task_id(request(messages=messages(("user", "\udc80")))) == background_task_id(
        request(messages=())
    )
    assert background_task_id(request(messages=messages(("system", "\udc80")))) != background_task_id(request())


# --- bodies of real agents --------------------------------------------------------------------------------------------

_TURN = [{"role": "user", "content": "fix the tests"}]
_FORMAT = {"type": "json_schema", "name": "title", "schema": {"type": "object"}, "strict": True}
_HEADERS = {"x-claude-code-session-id": "s1"}
_FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object"}}

CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], str]] = {
    "Claude Code's title": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "background",
    ),
    "Claude Code's classifier": (
        anthropic_messages,
        _HEADERS,
        {
            "model": "claude-sonnet-5",
            "system": "x" * 5000,
            "messages": _TURN,
            "max_tokens": 64,
            "stop_sequences": ["</block>"],
            "thinking": {"type": "disabled"},
        },
        "background",
    ),
    "Claude Code's web search": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "background",
    ),
    "Claude Code's conversation": (
        anthropic_messages,
        _HEADERS,
        {"messages": _TURN, "stream": True, "tools": [{"name": "Bash", "input_schema": {"type": "object"}}]},
        "main",
    ),
    "Codex's title": (
        openai_responses,
        {"session-id": "t1", "thread-id": "t1"},
        {"input": "fix the tests", "stream": True, "tools": [], "text": {"format": _FORMAT}},
        "background",
    ),
    "Codex's summary": (
        openai_responses,
        {"session-id": "s1", "thread-id": "s1"},
        {
            "input": [
                {"type": "message", "role": "user", "content": "fix"},
                {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "ok"},
                {"type": "message", "role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION"},
            ],
            "stream": True,
            "tools": [],
        },
        "background",
    ),
    "Codex's conversation": (
        openai_responses,
        {"session-id": "s1", "thread-id": "s1"},
        {"input": "fix the tests", "stream": True, "tools": [_FUNCTION]},
        "main",
    ),
    "opencode's title": (
        openai_chat,
        {"x-session-id": "s1"},
        {"messages": [{"role": "system", "content": "You are a title generator."}, *_TURN], "stream": True},
        "background",
    ),
    "opencode's conversation": (
        openai_chat,
        {"x-session-id": "s1"},
        {"messages": _TURN, "stream": True, "tools": [{"type": "function", "function": {"name": "bash"}}]},
        "main",
    ),
    "aider's conversation": (
        openai_chat,
        {},
        {"messages": [{"role": "system", "content": "Act as an expert software developer."}, *_TURN], "stream": True},
        "main",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_priority_of_requests_of_real_agents(name: str) -> None:
    protocol, headers, body, wanted = CASES[name]
    parsed = protocol.read_request(msgspec.json.encode({"model": "local", "max_tokens": 100} | body), headers)
    assert priority(parsed) == wanted


@pytest.mark.parametrize(("name", "wanted"), [("demo", "main"), ("demo-haiku", "background")])
async def test_priority_reaches_the_queue_and_the_engine(name: str, wanted: str) -> None:
    async with GatewayHarness() as harness:
        prepared = await harness.gateway.prepare(make_request(model=name, session="s"), CALLER)
    assert (prepared.lease_request().priority, prepared.engine_prompt(0).priority) == (wanted, wanted)
