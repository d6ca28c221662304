"""Whole replies, written for clients and read from upstreams; token counts and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, Incomplete, InvalidRequest, Unavailable
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockStart,
    Event,
    Failed,
    Finished,
    Reply,
    Started,
    StopReason,
    Usage,
)
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Reasoning, Request, Text, Thinking, ToolCall
from modelyard.protocols.anthropic_messages import (
    read_reply,
    write_count,
    write_error,
    write_model,
    write_models,
    write_reply,
    writer,
)
from modelyard.protocols.common.reasoning_signature import pack_reasoning, unpack_reasoning
from modelyard.protocols.common.sse import SseParser
from tests import strategies
from tests.protocols.event_streams import call, text, thinking
from tests.protocols.golden import check_golden

REQUEST = Request(model="m")


def reply(*blocks: Block, reason: StopReason = "end", usage: Usage = Usage(), stop: str | None = None) -> Reply:
    return Reply(Started("1", "m", 7), blocks, Finished(reason, usage, stop))


def written(of: Reply, request: Request = REQUEST) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(write_reply([of], request))
    return body


_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def _readable_part(part: Any) -> Any:
    if isinstance(part, Thinking):
        return replace(part, signature=part.signature or pack_reasoning(part.text))
    return replace(part, arguments=part.arguments.translate(_LINE_BREAKS)) if isinstance(part, ToolCall) else part


def readable(reply: Reply) -> Reply:
    """What reads back: no creation time, a signature on all thinking, no incomplete call, escaped line breaks."""
    blocks = tuple(replace(block, part=_readable_part(block.part)) for block in reply.blocks if block.complete)
    return Reply(replace(reply.started, created=0), blocks or (Block(Text("")),), reply.finished)


@settings(deadline=None, max_examples=100)
@given(strategies.replies(incomplete=True, empty=True))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    assert read_reply(write_reply([reply], REQUEST)) == readable(reply)


@settings(deadline=None, max_examples=50)
@given(strategies.replies(incomplete=True, empty=True, custom=True, namespaces=True, logprobs=True))
def test_writing_a_reply_that_was_read_back_changes_nothing(reply: Reply) -> None:
    once = write_reply([reply], REQUEST)
    assert write_reply([read_reply(once)], REQUEST) == once


def test_input_tokens_count_only_uncached_tokens() -> None:
    usage = written(reply(usage=Usage(100, 60, 20, 5)))["usage"]
    assert usage == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 60,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 5},
    }


def test_every_stop_reason_has_its_name() -> None:
    names: dict[StopReason, str] = {
        "end": "end_turn",
        "tool_calls": "tool_use",
        "stop_string": "stop_sequence",
        "max_tokens": "max_tokens",
        "window": "model_context_window_exceeded",
        "content_filter": "refusal",
    }
    for reason, name in names.items():
        body = written(reply(reason=reason))
        assert body["stop_reason"] == name
        assert read_reply(msgspec.json.encode(body)).finished.reason == reason


def test_the_stop_string_is_written() -> None:
    assert written(reply(reason="stop_string", stop="END"))["stop_sequence"] == "END"
    assert written(reply())["stop_sequence"] is None


def test_an_empty_reply_is_one_empty_text() -> None:
    assert written(reply())["content"] == [{"type": "text", "text": ""}]


def test_an_incomplete_call_is_left_out() -> None:
    cut = Block(ToolCall("c", "f", '{"a'), (), complete=False)
    body = written(reply(Block(Text("so")), cut, reason="max_tokens"))
    assert body["content"] == [{"type": "text", "text": "so"}]
    assert body["stop_reason"] == "max_tokens"


def test_omitted_thinking_travels_in_its_signature() -> None:
    request = Request(model="m", reasoning=Reasoning(enabled=True, summary="omitted"))
    body = written(reply(Block(Thinking("secret"))), request)
    assert body["content"] == [{"type": "thinking", "thinking": "", "signature": pack_reasoning("secret")}]
    assert read_reply(msgspec.json.encode(body)).thinking == "secret"


def test_custom_calls_are_wrapped_in_an_object() -> None:
    body = written(reply(Block(ToolCall("c", "patch", 'a "b"', custom=True)), reason="tool_calls"))
    assert body["content"][0]["input"] == {"input": 'a "b"'}


def test_an_upstream_reply_with_unknown_values_is_read() -> None:
    body = {"id": "x", "stop_reason": "bored", "content": [{"type": "smell"}, {"type": "text", "text": "a"}]}
    assert read_reply(msgspec.json.encode(body)) == Reply(
        Started("x", "", 0), (Block(Text("a")),), Finished("end", Usage())
    )


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"content":5}'])
def test_an_unreadable_upstream_reply_is_incomplete(body: bytes) -> None:
    with pytest.raises(Incomplete, match="the upstream's reply cannot be read"):
        read_reply(body)


# --- token counts and models ----------------------------------------------------------------------------------------

CARDS = [ModelCard(name, 0, 4096) for name in "abcde"]


def page(**query: Any) -> tuple[list[str], bool]:
    body = msgspec.json.decode(write_models(CARDS, **query))
    ids = [model["id"] for model in body["data"]]
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, body["has_more"]


def test_a_token_count_is_one_number() -> None:
    assert write_count(42) == b'{"input_tokens":42}'


def test_a_model_has_its_window_state_and_creation_time() -> None:
    card = ModelCard("org/m", 1_700_000_000, 32768, 4096, "loading", "M", aliases=("x",))
    model = msgspec.json.decode(write_model(card))
    assert (model["type"], model["id"], model["display_name"]) == ("model", "org/m", "M")
    assert model["created_at"] == "2023-11-14T22:13:20Z"
    assert (model["max_input_tokens"], model["max_tokens"], model["state"]) == (32768, 4096, "loading")


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": 1000}, "abcde", False),
        ({"limit": 2}, "ab", True),
        ({"limit": 2, "after_id": "b"}, "cd", True),
        ({"limit": 2, "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": 2, "before_id": "d"}, "bc", True),
        ({"limit": 5, "before_id": "c"}, "ab", False),
    ],
)
def test_models_are_paged_by_id(query: dict[str, Any], ids: str, has_more: bool) -> None:
    assert page(**query) == (list(ids), has_more)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"after_id": "z"}, {"before_id": "z"}])
def test_an_invalid_page_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(query))):
        page(**query)


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
