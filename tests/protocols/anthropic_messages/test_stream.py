"""The stream as clients see it, held against golden files."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.errors import ContextOverflow, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockKind,
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
from tests.protocols.golden import check_golden

REQUEST = Request(model="m")
STARTED = Started("1", "m", 1_700_000_000, Usage(prompt=30, cached=20))


def block(
    index: int, kind: BlockKind, *texts: str, name: str = "", complete: bool = True, signature: str = ""
) -> list[Event]:
    call_id = f"call_{index}" if name else ""
    deltas = [BlockDelta(index, text) for text in texts]
    return [BlockStart(index, kind, call_id, name), *deltas, BlockEnd(index, signature, complete)]


def finished(reason: StopReason = "end", stop: str | None = None) -> Finished:
    return Finished(reason, Usage(30, 20, 7, 2), stop)


CASES: dict[str, list[Event]] = {
    "text": [STARTED, *block(0, "text", "Hel", 'lo "you"\n'), finished()],
    # A signature of our own would tie the file to one version of zlib.
    "thinking_and_text": [
        STARTED,
        *block(0, "thinking", "hm", "m", signature="theirs"),
        *block(1, "text", "Yes."),
        finished(),
    ],
    "one_tool": [STARTED, *block(0, "tool_call", '{"path":', '"a"}', name="read"), finished("tool_calls")],
    "parallel_tools": [
        STARTED,
        *block(0, "text", "Both:"),
        *block(1, "tool_call", '{"path":"a"}', name="read"),
        *block(2, "tool_call", "{}", name="list"),
        finished("tool_calls"),
    ],
    "text_after_tool": [
        STARTED,
        *block(0, "text", "First"),
        *block(1, "tool_call", "{}", name="list"),
        *block(2, "text", "then"),
        finished("tool_calls"),
    ],
    "length": [
        STARTED,
        *block(0, "text", "So"),
        *block(1, "tool_call", '{"path":"a', name="read", complete=False),
        finished("max_tokens"),
    ],
    "window": [STARTED, *block(0, "text", "So"), finished("window")],
    "stop_string": [STARTED, *block(0, "text", "So"), finished("stop_string", "END")],
    "error": [STARTED, BlockStart(0, "text"), BlockDelta(0, "So"), Failed(Unavailable("the engine was lost"))],
    "empty": [STARTED, finished()],
}


def stream(events: list[Event], request: Request = REQUEST) -> bytes:
    out = writer(request, "t")
    return b"".join(out.write(event) for event in events) + out.end()


def data(events: list[Event], request: Request = REQUEST) -> list[dict[str, object]]:
    return [msgspec.json.decode(event.data) for event in SseParser().feed(stream(events, request))]


def partial_json(events: list[Event]) -> str:
    deltas = [told["delta"] for told in data(events) if told["type"] == "content_block_delta"]
    return "".join(delta["partial_json"] for delta in deltas if isinstance(delta, dict))


@pytest.mark.parametrize("name", CASES)
def test_the_stream_is_as_it_was(name: str) -> None:
    check_golden("anthropic_messages", name, stream(CASES[name]))


def test_the_overflow_error_is_as_it_was() -> None:
    error = write_error(ContextOverflow(215_692, 200_000), trace="t", streaming=True)
    check_golden("anthropic_messages", "overflow", error.body)


@settings(deadline=None, max_examples=100)
@given(strategies.events(incomplete=True, custom=True, empty=True, logprobs=True))
def test_every_stream_keeps_the_order(events: list[Event]) -> None:
    told = [(one["type"], one.get("index")) for one in data(events)]
    assert told[:2] == [("message_start", None), ("ping", None)]
    assert told[-2:] == [("message_delta", None), ("message_stop", None)]
    kinds = [told for told in told[2:-2] if told[0] != "content_block_delta"]
    blocks = len(kinds) // 2
    assert kinds == [step for i in range(blocks) for step in (("content_block_start", i), ("content_block_stop", i))]
    assert blocks >= 1


def test_every_event_has_the_name_of_its_type() -> None:
    for events in CASES.values():
        assert all(e.event == msgspec.json.decode(e.data)["type"] for e in SseParser().feed(stream(events)))


def test_omitted_thinking_is_a_block_with_a_signature_alone() -> None:
    request = Request(model="m", reasoning=Reasoning(summary="omitted"))
    told = data([STARTED, *block(0, "thinking", "hm", "m"), finished()], request)[2:5]
    assert [one["type"] for one in told] == ["content_block_start", "content_block_delta", "content_block_stop"]
    delta = told[1]["delta"]
    assert isinstance(delta, dict)
    assert unpack_reasoning(delta["signature"]) == "hmm"


def test_thinking_without_a_signature_is_sealed() -> None:
    deltas = [one.get("delta") for one in data([STARTED, *block(0, "thinking", "hm", "m"), finished()])]
    assert {"type": "signature_delta", "signature": pack_reasoning("hmm")} in deltas


def test_free_text_calls_stream_as_one_json_object() -> None:
    start = BlockStart(0, "tool_call", "c", "patch", None, True)
    deltas = [BlockDelta(0, 'a "'), BlockDelta(0, "\nb\\")]
    whole = partial_json([STARTED, start, *deltas, BlockEnd(0), finished("tool_calls")])
    assert msgspec.json.decode(whole) == {"input": 'a "\nb\\'}


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("text", ["", "{}", '{"a":1}', '{"a', " "])
def test_a_call_that_was_cut_off_never_parses(text: str, custom: bool) -> None:
    start = BlockStart(0, "tool_call", "c", "f", None, custom)
    sent = partial_json([STARTED, start, BlockDelta(0, text), BlockEnd(0, complete=False), finished("max_tokens")])
    assert sent.strip()
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(sent)


def test_keepalive_is_a_ping_event() -> None:
    assert writer(REQUEST, "t").keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
