"""The Messages stream, compared with golden files."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.errors import ContextOverflow, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    StopReason,
    Usage,
)
from modelyard.core.request import Reasoning, Request
from modelyard.protocols.anthropic_messages import write_error, writer
from modelyard.protocols.common.reasoning_signature import pack_reasoning, unpack_reasoning
from modelyard.protocols.common.sse import SseParser
from tests import strategies
from tests.protocols.event_streams import call, text, thinking
from tests.protocols.golden import check_golden

REQUEST = Request(model="m")
STARTED = Started("1", "m", 1_700_000_000, Usage(prompt=30, cached=20))


def finished(reason: StopReason = "end", stop: str | None = None) -> Finished:
    return Finished(reason, Usage(30, 20, 7, 2), stop)


CASES: dict[str, list[Event]] = {
    "text": [STARTED, *text(0, "Hel", 'lo "you"\n'), finished()],
    # With a foreign signature: ours depends on the version of zlib.
    "thinking_and_text": [
        STARTED,
        *thinking(0, "hm", "m", signature="theirs"),
        *text(1, "Yes."),
        finished(),
    ],
    "one_tool": [STARTED, *call(0, "call_0", "read", '{"path":', '"a"}'), finished("tool_calls")],
    "parallel_tools": [
        STARTED,
        *text(0, "Both:"),
        *call(1, "call_1", "read", '{"path":"a"}'),
        *call(2, "call_2", "list", "{}"),
        finished("tool_calls"),
    ],
    "text_after_tool": [
        STARTED,
        *text(0, "First"),
        *call(1, "call_1", "list", "{}"),
        *text(2, "then"),
        finished("tool_calls"),
    ],
    "length": [
        STARTED,
        *text(0, "So"),
        *call(1, "call_1", "read", '{"path":"a', complete=False),
        finished("max_tokens"),
    ],
    "window": [STARTED, *text(0, "So"), finished("window")],
    "stop_string": [STARTED, *text(0, "So"), finished("stop_string", "END")],
    "error": [STARTED, BlockStart(0, "text"), BlockDelta(0, "So"), Failed(Unavailable("the engine was lost"))],
    "empty": [STARTED, finished()],
}


def stream(events: list[Event], request: Request = REQUEST) -> bytes:
    out = writer(request, "t")
    return b"".join(out.write(event) for event in events) + out.end()


def data(events: list[Event], request: Request = REQUEST) -> list[dict[str, object]]:
    return [msgspec.json.decode(event.data) for event in SseParser().feed(stream(events, request))]


def partial_json(events: list[Event]) -> str:
    deltas = [event["delta"] for event in data(events) if event["type"] == "content_block_delta"]
    return "".join(delta["partial_json"] for delta in deltas if isinstance(delta, dict))


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    check_golden("anthropic_messages", name, stream(CASES[name]))


def test_the_overflow_error_matches_its_golden_file() -> None:
    error = write_error(ContextOverflow(215_692, 200_000), trace="t", streaming=True)
    check_golden("anthropic_messages", "overflow", error.body)


@settings(deadline=None, max_examples=100)
@given(strategies.events(incomplete=True, custom=True, empty=True, logprobs=True))
def test_the_events_of_every_stream_are_in_order(events: list[Event]) -> None:
    types = [(event["type"], event.get("index")) for event in data(events)]
    assert types[:2] == [("message_start", None), ("ping", None)]
    assert types[-2:] == [("message_delta", None), ("message_stop", None)]
    blocks = [pair for pair in types[2:-2] if pair[0] != "content_block_delta"]
    count = len(blocks) // 2
    assert blocks == [pair for i in range(count) for pair in (("content_block_start", i), ("content_block_stop", i))]
    assert count >= 1


def test_every_event_has_the_name_of_its_type() -> None:
    for events in CASES.values():
        assert all(e.event == msgspec.json.decode(e.data)["type"] for e in SseParser().feed(stream(events)))


def test_omitted_thinking_is_a_block_with_only_a_signature() -> None:
    request = Request(model="m", reasoning=Reasoning(summary="omitted"))
    block = data([STARTED, *thinking(0, "hm", "m"), finished()], request)[2:5]
    assert [event["type"] for event in block] == ["content_block_start", "content_block_delta", "content_block_stop"]
    delta = block[1]["delta"]
    assert isinstance(delta, dict)
    assert unpack_reasoning(delta["signature"]) == "hmm"


def test_thinking_without_a_signature_gets_one() -> None:
    deltas = [event.get("delta") for event in data([STARTED, *thinking(0, "hm", "m"), finished()])]
    assert {"type": "signature_delta", "signature": pack_reasoning("hmm")} in deltas


def test_custom_calls_stream_as_one_json_object() -> None:
    block = call(0, "c", "patch", 'a "', "\nb\\", custom=True)
    arguments = partial_json([STARTED, *block, finished("tool_calls")])
    assert msgspec.json.decode(arguments) == {"input": 'a "\nb\\'}


@pytest.mark.parametrize("custom", [False, True])
def test_the_arguments_of_an_incomplete_call_never_parse(custom: bool) -> None:
    for arguments in ("", "{}", '{"a":1}', '{"a', " "):
        block = call(0, "c", "f", arguments, custom=custom, complete=False)
        sent = partial_json([STARTED, *block, finished("max_tokens")])
        assert sent.strip()
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(sent)


def test_keepalive_is_a_ping_event() -> None:
    assert writer(REQUEST, "t").keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
