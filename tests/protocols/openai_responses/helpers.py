"""The cases of the golden files, and helpers that decode what was written."""

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
from modelyard.protocols import openai_responses
from modelyard.protocols.common.sse import SseParser
from tests.protocols.event_streams import call, text, thinking

TRACE = "abc123"
STARTED = Started(TRACE, "tiny", 1_700_000_000)
USAGE = Usage(prompt=20, cached=12, output=7, reasoning=3)
REQUEST = Request(model="tiny", messages=(Message("user", (Text("hello"),)),), stream=True)
CODEX = msgspec.structs.replace(
    REQUEST,
    tools=(
        Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),
        Tool("spawn_agent", "Starts a helper.", {"type": "object"}, namespace="multi_agent_v1"),
        Tool("apply_patch", "Edits files.", kind="custom", grammar={"syntax": "lark", "definition": "start: /.+/"}),
    ),
    reasoning=Reasoning(effort="medium", summary="auto"),
    encrypted_reasoning=True,
    store=False,
)


LOGPROBS_DELTA = BlockDelta(0, "Hi", (TokenLogprob("Hi", -0.5, b"Hi", (TokenLogprob("Yo", -1.5, b"Yo"),)),))

# name → (request, events)
CASES: dict[str, tuple[Request, list[Event]]] = {
    "text": (REQUEST, [STARTED, *text(0, "Hel", "lo."), Finished("end", USAGE)]),
    "logprobs": (
        msgspec.structs.replace(REQUEST, logprobs=1),
        [STARTED, BlockStart(0, "text"), LOGPROBS_DELTA, BlockEnd(0), Finished("end", USAGE)],
    ),
    "reasoning": (REQUEST, [STARTED, *thinking(0, "Think", "ing."), *text(1, "Done."), Finished("end", USAGE)]),
    "reasoning_for_codex": (CODEX, [STARTED, *thinking(0, "Hm", "m."), *text(1, "Done."), Finished("end", USAGE)]),
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
    "length": (REQUEST, [STARTED, *text(0, "Once upon"), Finished("max_tokens", USAGE)]),
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
    "stop_string": (REQUEST, [STARTED, *text(0, "One"), Finished("stop_string", USAGE, "\n")]),
    "content_filter": (REQUEST, [STARTED, *text(0, "I"), Finished("content_filter", USAGE)]),
    "failed": (
        REQUEST,
        [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hal"), Failed(Unavailable("the engine was lost"))],
    ),
    "empty": (REQUEST, [STARTED, Finished("end", USAGE)]),
}


def stream(request: Request, events: list[Event]) -> bytes:
    writer = openai_responses.writer(request, TRACE)
    return b"".join(writer.write(event) for event in events) + writer.end()


def data_of(written: bytes) -> list[dict[str, Any]]:
    """The data of every event; checks that the `event:` lines agree with it."""
    events = SseParser().feed(written)
    decoded = [msgspec.json.decode(event.data) for event in events]
    assert [event.event for event in events] == [data["type"] for data in decoded]
    return decoded


def names_of(written: bytes) -> list[str]:
    return [data["type"].removeprefix("response.") for data in data_of(written)]
