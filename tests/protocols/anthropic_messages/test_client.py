"""The client role: requests to upstreams, and their streams back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.errors import Incomplete, InvalidRequest, Overloaded
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    Usage,
    collect_reply,
    reply_events,
)
from modelyard.core.request import Message, Reasoning, Request, Text, Thinking, Tool, ToolCall, ToolChoice
from modelyard.protocols.anthropic_messages import read_reply, read_request, reader, write_reply, write_request, writer
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.common.sse import frame
from tests import strategies
from tests.strategies import merged


def _cooled(request: Request) -> Request:
    """Anthropic's highest temperature is 1."""
    sampling = request.sampling
    if sampling.temperature is None:
        return request
    return replace(request, sampling=replace(sampling, temperature=sampling.temperature / 2))


ANYTHING = strategies.requests(
    redacted=True,
    custom=True,
    server=True,
    deferred=True,
    namespaces=True,
    broken=True,
    details=True,
    errors=True,
    references=True,
    images_in_results=True,
    developer=True,
    named_constraints=True,
    logprobs=True,
    n=True,
).map(_cooled)
EXPRESSIBLE = strategies.requests(
    redacted=True,
    server=True,
    deferred=True,
    broken=True,
    errors=True,
    references=True,
    images_in_results=True,
    json_object=False,
).map(_cooled)


def expressible(request: Request) -> Request:
    """Without the fields that this protocol lacks, and with those that reading adds."""
    messages, reasoning = request.messages, request.reasoning
    if messages[0].role == "system" and all(part == Text("") for part in messages[0].parts):
        messages = messages[1:]
    if not reasoning.enabled:
        reasoning = replace(reasoning, budget=None)
    return replace(
        request,
        messages=messages,
        reasoning=reasoning,
        parallel_tool_calls=None if request.tool_choice.mode == "none" else request.parallel_tool_calls,
        metadata={"user_id": request.user} if request.user else None,
        session=request.user,
    )


@settings(deadline=None, max_examples=100)
@given(EXPRESSIBLE)
def test_an_expressible_request_reads_back_equal(request: Request) -> None:
    expected = expressible(request)
    assert read_request(write_request(expected), {}) == expected


@settings(deadline=None, max_examples=100)
@given(ANYTHING)
def test_writing_a_request_that_was_read_back_changes_nothing(request: Request) -> None:
    written = write_request(request)
    assert write_request(read_request(written, {})) == written


def test_an_empty_system_message_is_not_written() -> None:
    messages = (
        Message("system"),
        Message("system", (Text(""),)),
        Message("developer", (Text("a"),)),
        Message("user", (Text("b"),)),
    )
    body = msgspec.json.decode(write_request(Request(model="m", messages=messages)))
    assert body == {"model": "m", "system": "a", "messages": [{"role": "user", "content": "b"}]}


def test_custom_tools_become_functions_with_one_string() -> None:
    call = Message("assistant", (ToolCall("c", "patch", "*** Begin", custom=True),))
    request = Request(model="m", messages=(call,), tools=(Tool("patch", kind="custom"),))
    body = msgspec.json.decode(write_request(request))
    assert body["tools"][0]["input_schema"]["required"] == ["input"]
    assert body["messages"][0]["content"][0]["input"] == {"input": "*** Begin"}


def test_values_of_other_protocols_are_translated() -> None:
    reasoning = Reasoning(enabled=True, effort="minimal", summary="detailed")
    request = Request(model="m", messages=(Message("user"),), reasoning=reasoning, tool_choice=ToolChoice("required"))
    body = msgspec.json.decode(write_request(request))
    assert body["thinking"] == {"type": "adaptive"}
    assert body["output_config"] == {"effort": "low"}
    assert body["tool_choice"] == {"type": "any"}


# --- the stream -----------------------------------------------------------------------------------------------------

REQUEST = Request(model="m")


def written(events: list[Event], request: Request = REQUEST) -> bytes:
    out = writer(request, "t")
    return b"".join(out.write(event) for event in events)


def read(*chunks: bytes) -> list[Event]:
    into = reader()
    events = [event for chunk in chunks for event in into.feed(chunk)]
    return [*events, *into.finish()]


def expected(events: list[Event]) -> list[Event]:
    """All thinking reads back with a signature; the protocol has no creation time."""
    out: list[Event] = []
    for event in merged(events):
        if isinstance(event, Started):
            event = replace(event, created=0)
        elif isinstance(event, BlockEnd) and isinstance(before := out[-1], BlockDelta):
            start = out[-2]
            if isinstance(start, BlockStart) and start.kind == "thinking":
                event = replace(event, signature=event.signature or pack_reasoning(before.text))
        out.append(event)
    return out


@settings(deadline=None, max_examples=100)
@given(st.data(), strategies.events(failing=True, incomplete=True))
def test_a_stream_split_anywhere_reads_back_equal(data: st.DataObject, events: list[Event]) -> None:
    chunks = data.draw(strategies.chunkings(written(events)))
    assert merged(read(*chunks)) == expected(events)


@settings(deadline=None, max_examples=50)
@given(strategies.replies())
def test_the_collected_stream_equals_the_reply(reply: Reply) -> None:
    """The arguments as values: line breaks in them are escaped in a whole reply."""

    def with_values(found: Reply) -> Reply:
        calls = [
            replace(b, part=replace(b.part, arguments=_value(b.part.arguments))) if isinstance(b.part, ToolCall) else b
            for b in found.blocks
        ]
        return replace(found, blocks=tuple(calls))

    streamed = collect_reply(read(written(list(reply_events(reply)))))
    assert with_values(streamed) == with_values(read_reply(write_reply([reply], REQUEST)))


def _value(arguments: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments)).decode()
    except msgspec.DecodeError:
        return arguments


def sse(*bodies: dict[str, Any], named: bool = True) -> bytes:
    return b"".join(frame(msgspec.json.encode(body), body["type"] if named else None) for body in bodies)


START = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": {"input_tokens": 3}}}
END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
STOP = {"type": "message_stop"}


def start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


TEXT = [start(0, type="text", text=""), delta(0, type="text_delta", text="hi"), stop(0)]


def test_pings_event_lines_and_message_stop_are_optional() -> None:
    expected_events: list[Event] = [
        Started("1", "m", 0, Usage(3)),
        BlockStart(0, "text"),
        BlockDelta(0, "hi"),
        BlockEnd(0),
        Finished("end", Usage(3, 0, 2)),
    ]
    assert read(sse(START, *TEXT, END, STOP)) == expected_events
    assert read(sse(START, *TEXT, END, STOP, named=False)) == expected_events
    assert read(sse(START, *TEXT, END)) == expected_events


def test_unknown_events_and_blocks_are_skipped() -> None:
    odd = [start(0, type="server_tool_use", id="s"), delta(0, type="input_json_delta", partial_json="{}"), stop(0)]
    text = [start(1, type="text", text=""), delta(1, type="text_delta", text="hi"), delta(1, type="smell"), stop(1)]
    reply = collect_reply(read(sse(START, {"type": "news", "index": "x"}, *odd, *text, END, STOP)))
    assert [block.part for block in reply.blocks] == [Text("hi")]


def test_interleaved_calls_are_emitted_one_after_the_other() -> None:
    calls = [start(i, type="tool_use", id=f"c{i}", name=f"f{i}", input={}) for i in (0, 1, 2)]
    pieces = [delta(i, type="input_json_delta", partial_json=text) for text in ('{"a":', "1}") for i in (0, 1, 2)]
    events = read(sse(START, *calls, *pieces, stop(1), stop(0), stop(2), END, STOP))
    assert [type(event) for event in merged(events)[1:-1]] == [BlockStart, BlockDelta, BlockEnd] * 3
    assert collect_reply(events).calls == tuple(ToolCall(f"c{i}", f"f{i}", '{"a":1}') for i in (0, 1, 2))


def test_blocks_that_were_never_closed_end_with_the_message() -> None:
    open_blocks = [TEXT[0], TEXT[1], start(1, type="tool_use", id="c", name="f", input={})]
    reply = collect_reply(read(sse(START, *open_blocks, END, STOP)))
    assert reply.text == "hi"
    assert reply.calls == ()


def test_a_call_with_its_input_in_the_first_event_is_complete() -> None:
    reply = collect_reply(
        read(sse(START, start(0, type="tool_use", id="c", name="f", input={"a": 1}), stop(0), END, STOP))
    )
    assert reply.calls == (ToolCall("c", "f", '{"a":1}'),)


def test_a_call_without_input_has_empty_arguments() -> None:
    reply = collect_reply(read(sse(START, start(0, type="tool_use", id="c", name="f", input={}), stop(0), END, STOP)))
    assert reply.calls == (ToolCall("c", "f", "{}"),)


def test_omitted_thinking_is_unpacked_from_our_signature() -> None:
    request = Request(model="m", reasoning=Reasoning(summary="omitted"))
    events: list[Event] = [
        Started("1", "m", 0),
        BlockStart(0, "thinking"),
        BlockDelta(0, "hm"),
        BlockEnd(0),
        Finished("end", Usage()),
    ]
    assert collect_reply(read(written(events, request))).blocks[0].part == Thinking("hm", pack_reasoning("hm"))


def test_usage_keeps_counts_that_a_later_event_omits() -> None:
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 5}
    first = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": usage}}
    assert collect_reply(read(sse(first, *TEXT, END, STOP))).finished.usage == Usage(12, 4, 2)


# --- broken streams -------------------------------------------------------------------------------------------------


def test_an_error_event_is_a_failure() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    assert read(sse(START, error, END, STOP))[1:] == [Failed(Overloaded("Overloaded"))]
    refused = {"type": "error", "error": {"type": "invalid_request_error", "message": "no", "param": "x"}}
    assert read(sse(refused)) == [Failed(InvalidRequest("no", param="x"))]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_stream_that_ends_early_is_a_failure(count: int) -> None:
    last = read(sse(*[START, *TEXT][:count]))[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


@pytest.mark.parametrize("bad", [b"{", b"[]", b'{"index":"x","delta":{}}', b'{"delta":{"text":"\xff"}}'])
def test_an_unreadable_stream_fails_once(bad: bytes) -> None:
    broken = sse(START, TEXT[0]) + frame(bad, "content_block_delta") + sse(*TEXT[1:], END, STOP)
    assert [type(event) for event in read(broken)] == [Started, BlockStart, Failed]
