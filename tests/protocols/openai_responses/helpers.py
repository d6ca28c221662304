"""The replies that the golden files hold, and small readers of what was written."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.errors import Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
)
from modelyard.core.request import Message, Reasoning, Request, Text, Tool
from modelyard.protocols import openai_responses as wire
from modelyard.protocols.common.sse import SseParser

TRACE = "abc123"
STARTED = Started(TRACE, "tiny", 1_700_000_000)
USAGE = Usage(prompt=20, cached=12, output=7, reasoning=3)
ASKED = Request(model="tiny", messages=(Message("user", (Text("hello"),)),), stream=True)
CODEX = msgspec.structs.replace(
    ASKED,
    tools=(
        Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),
        Tool("spawn_agent", "Starts a helper.", {"type": "object"}, namespace="multi_agent_v1"),
        Tool("apply_patch", "Edits files.", kind="custom", grammar={"syntax": "lark", "definition": "start: /.+/"}),
    ),
    reasoning=Reasoning(effort="medium", summary="auto"),
    encrypted_reasoning=True,
    store=False,
)


def text(index: int, *deltas: str) -> list[Event]:
    return [BlockStart(index, "text"), *(BlockDelta(index, d) for d in deltas), BlockEnd(index)]


def thought(index: int, *deltas: str) -> list[Event]:
    return [BlockStart(index, "thinking"), *(BlockDelta(index, d) for d in deltas), BlockEnd(index)]


def call(index: int, id: str, name: str, *deltas: str, complete: bool = True, **more: Any) -> list[Event]:
    start = BlockStart(index, "tool_call", id, name, **more)
    return [start, *(BlockDelta(index, d) for d in deltas), BlockEnd(index, "", complete)]


SCORED = BlockDelta(0, "Hi", (TokenLogprob("Hi", -0.5, b"Hi", (TokenLogprob("Yo", -1.5, b"Yo"),)),))

# name → (request, events)
CASES: dict[str, tuple[Request, list[Event]]] = {
    "text": (ASKED, [STARTED, *text(0, "Hel", "lo."), Finished("end", USAGE)]),
    "logprobs": (
        msgspec.structs.replace(ASKED, logprobs=1),
        [STARTED, BlockStart(0, "text"), SCORED, BlockEnd(0), Finished("end", USAGE)],
    ),
    "reasoning": (ASKED, [STARTED, *thought(0, "Think", "ing."), *text(1, "Done."), Finished("end", USAGE)]),
    "reasoning_for_codex": (CODEX, [STARTED, *thought(0, "Hm", "m."), *text(1, "Done."), Finished("end", USAGE)]),
    "one_tool": (CODEX, [STARTED, *call(0, "call_1", "shell", '{"command"', ':"ls"}'), Finished("tool_calls", USAGE)]),
    "parallel_tools": (
        CODEX,
        [
            STARTED,
            *text(0, "Looking."),
            *call(1, "call_1", "shell", '{"command":"ls"}'),
            *call(2, "call_2", "shell", '{"command":"pwd"}'),
            Finished("tool_calls", USAGE),
        ],
    ),
    "custom_tool": (
        CODEX,
        [STARTED, *call(0, "call_1", "apply_patch", "*** Begin", " Patch", custom=True), Finished("tool_calls", USAGE)],
    ),
    "namespaced_tool": (
        CODEX,
        [
            STARTED,
            *call(0, "call_1", "spawn_agent", "{}", namespace="multi_agent_v1"),
            Finished("tool_calls", USAGE),
        ],
    ),
    "length": (ASKED, [STARTED, *text(0, "Once upon"), Finished("max_tokens", USAGE)]),
    "cut_call": (
        CODEX,
        [STARTED, *call(0, "call_1", "shell", '{"comm', complete=False), Finished("max_tokens", USAGE)],
    ),
    "cut_custom_call": (
        CODEX,
        [
            STARTED,
            *call(0, "call_1", "apply_patch", "*** Be", complete=False, custom=True),
            Finished("window", USAGE),
        ],
    ),
    "stop_string": (ASKED, [STARTED, *text(0, "One"), Finished("stop_string", USAGE, "\n")]),
    "content_filter": (ASKED, [STARTED, *text(0, "I"), Finished("content_filter", USAGE)]),
    "failed": (
        ASKED,
        [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hal"), Failed(Unavailable("the engine was lost"))],
    ),
    "empty": (ASKED, [STARTED, Finished("end", USAGE)]),
}


def stream(request: Request, events: list[Event]) -> bytes:
    writer = wire.writer(request, TRACE)
    return b"".join(writer.write(event) for event in events) + writer.end()


def data_of(written: bytes) -> list[dict[str, Any]]:
    """Every event's data, after a look at its `event:` line."""
    events = SseParser().feed(written)
    decoded = [msgspec.json.decode(event.data) for event in events]
    assert [event.event for event in events] == [data["type"] for data in decoded]
    return decoded


def names_of(written: bytes) -> list[str]:
    return [data["type"].removeprefix("response.") for data in data_of(written)]
