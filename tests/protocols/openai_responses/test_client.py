from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.errors import Incomplete, InvalidRequest, Overloaded, RateLimited, Unavailable
from modelyard.core.events import BlockEnd, BlockStart, Event, Failed, Finished, Started, collect_reply
from modelyard.core.request import (
    Message,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.protocols import openai_responses as wire
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.openai_responses.request import join_turns
from tests.protocols.openai_responses.helpers import ASKED, CASES, TRACE, stream
from tests.protocols.openai_responses.test_reply import expressible
from tests.strategies import chunkings, events, merged, names, requests

EVERYTHING = requests(
    custom=True, server=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True,
    broken=True, details=True, errors=True, references=True, images_in_results=True, developer=True,
)  # fmt: skip
CARRIED = requests(
    custom=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True, broken=True,
    details=True, images_in_results=True, developer=True, reasoning=False,
)  # fmt: skip


def expressible(request: Request) -> Request:
    """Neighbours that the wire cannot tell apart joined, and no signature without the text it signs."""
    turns = ((message.role, tuple(map(_expressible_part, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(join_turns(turns)))


def _expressible_part(part: Part) -> Part:
    if isinstance(part, Thinking) and part.signature and not part.text:
        return replace(part, redacted=True)
    return part


@settings(deadline=None, max_examples=100)
@given(CARRIED.map(expressible), st.booleans(), st.none() | names())
def test_an_expressible_request_reads_back_equal(request: Request, encrypted: bool, session: str | None) -> None:
    asked = replace(request, encrypted_reasoning=encrypted, session=session, previous=session, store=encrypted)
    assert wire.read_request(wire.write_request(asked), {}) == asked


@settings(deadline=None, max_examples=100)
@given(EVERYTHING, st.booleans())
def test_a_second_round_trip_changes_nothing(request: Request, instructions: bool) -> None:
    written = wire.write_request(replace(request, instructions=instructions))
    assert wire.write_request(wire.read_request(written, {})) == written


def round_trip(request: Request) -> Request:
    return wire.read_request(wire.write_request(request), {})


def test_instructions_read_back_as_instructions() -> None:
    lead, rest = Message("system", (Text("Be brief."),)), Message("user", (Text("hi"),))
    request = Request(model="m", messages=(lead, rest), instructions=True, reasoning=Reasoning(summary="auto"))
    assert msgspec.json.decode(wire.write_request(request))["instructions"] == "Be brief."
    assert round_trip(request) == request


def test_the_text_in_our_signature_wins_over_the_visible_text() -> None:
    said = Message("assistant", (Thinking("shortened", pack_reasoning("whole")),))
    request = Request(model="m", messages=(said,))
    assert round_trip(request).messages == (Message("assistant", (Thinking("whole", pack_reasoning("whole")),)),)


def test_disabled_reasoning_is_written_as_an_effort_of_none() -> None:
    request = Request(model="m", messages=(Message("user", (Text("x"),)),), reasoning=Reasoning(enabled=False))
    assert round_trip(request).reasoning == Reasoning(enabled=False, effort="none")


def test_a_tool_reference_is_written_as_its_name() -> None:
    result = Message("tool", (ToolResult("call_1", (ToolReference("grep"),)),))
    again = round_trip(Request(model="m", messages=(result,)))
    assert again.messages == (Message("tool", (ToolResult("call_1", (Text("grep"),)),)),)


SCORED = replace(ASKED, logprobs=2)


def read(*chunks: bytes) -> list[Event]:
    reader = wire.reader()
    return [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish()


def sse(*events: dict[str, Any]) -> bytes:
    """The barest of streams: no `event:` lines, no numbers."""
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


def item(index: int, kind: str, done: bool = True, **fields: Any) -> dict[str, Any]:
    name = "done" if done else "added"
    return {"type": f"response.output_item.{name}", "output_index": index, "item": {"type": kind} | fields}


def message(text: str) -> dict[str, Any]:
    return {"content": [{"type": "output_text", "text": text}]}


COMPLETED = {"type": "response.completed", "response": {"id": "resp_1"}}


@settings(deadline=None, max_examples=100)
@given(st.data(), events(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True, signatures=False))
def test_a_stream_split_anywhere_reads_back_equal(data: st.DataObject, told: list[Event]) -> None:
    started = told[0]
    assert isinstance(started, Started)
    writer = wire.writer(SCORED, started.id)
    written = b"".join(writer.write(event) for event in told)
    back = read(*data.draw(chunkings(written)))
    assert collect_reply(back) == expressible_reader(collect_reply(told))
    if any(isinstance(event, BlockStart) for event in told):
        assert merged(back)[1:-1] == merged(told)[1:-1]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed", "empty"}))
def test_every_golden_stream_reads_back(name: str) -> None:
    request, told = CASES[name]
    back = collect_reply(read(stream(request, told)))
    assert [block.complete for block in back.blocks] == [block.complete for block in collect_reply(told).blocks]
    assert (back.text, back.thinking, back.calls) == (
        collect_reply(told).text,
        collect_reply(told).thinking,
        collect_reply(told).calls,
    )


def test_items_without_deltas_are_read_from_their_final_object() -> None:
    reply = collect_reply(
        read(
            sse(
                item(0, "reasoning", summary=[{"type": "summary_text", "text": "hm"}], encrypted_content="enc"),
                item(1, "message", **message("hi")),
                item(2, "function_call", call_id="call_1", name="shell", arguments="{}", namespace="n"),
                COMPLETED,
            )
        )
    )
    assert [block.part for block in reply.blocks] == [
        Thinking("hm", "enc"),
        Text("hi"),
        ToolCall("call_1", "shell", "{}", "n"),
    ]
    assert reply.finished.reason == "tool_calls"


def test_items_without_an_index_are_read_in_order() -> None:
    bare = [item(0, "message", **message("a")), item(0, "message", **message("b"))]
    for event in bare:
        del event["output_index"]
    assert [block.part for block in collect_reply(read(sse(*bare, COMPLETED))).blocks] == [Text("a"), Text("b")]


def test_output_that_is_only_in_the_last_event_is_read() -> None:
    last = {"type": "response.completed", "response": {"id": "resp_1", "output": [{"type": "message"} | message("x")]}}
    assert collect_reply(read(sse(last))).text == "x"


def test_no_text_is_emitted_twice() -> None:
    delta = {"type": "response.output_text.delta", "output_index": 0, "delta": "he"}
    last = {"type": "response.completed", "response": {"id": "r", "output": [{"type": "message"} | message("hello")]}}
    written = sse(item(0, "message", done=False), delta, item(0, "message", **message("hello")), last)
    assert collect_reply(read(written)).text == "hello"


def test_reasoning_and_its_summary_are_not_both_emitted() -> None:
    request = replace(ASKED, reasoning=Reasoning(summary="auto"))
    told = CASES["reasoning"][1]
    assert collect_reply(read(stream(request, told))).thinking == "Thinking."


def test_summary_parts_are_separated_by_a_blank_line() -> None:
    def part(index: int, text: str) -> list[dict[str, Any]]:
        return [
            {"type": "response.reasoning_summary_part.added", "output_index": 0, "summary_index": index},
            {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": text},
        ]

    summary = [{"type": "summary_text", "text": text} for text in ("one", "two")]
    done = item(0, "reasoning", summary=summary)
    written = sse(item(0, "reasoning", done=False), *part(0, "one"), *part(1, "two"), done, COMPLETED)
    assert collect_reply(read(written)).thinking == "one\n\ntwo"


def test_interleaved_calls_are_emitted_one_after_the_other() -> None:
    def delta(index: int, text: str) -> dict[str, Any]:
        return {"type": "response.function_call_arguments.delta", "output_index": index, "delta": text}

    call: dict[str, Any] = {"name": "f", "arguments": "{}"}
    written = sse(
        item(0, "function_call", done=False, call_id="a", name="f"),
        item(1, "function_call", done=False, call_id="b", name="f"),
        delta(1, "{"),
        delta(0, "{"),
        delta(1, "}"),
        item(1, "function_call", call_id="b", **call),
        delta(0, "}"),
        item(0, "function_call", call_id="a", **call),
        COMPLETED,
    )
    back = read(written)
    assert [event.index for event in back if isinstance(event, BlockStart | BlockEnd)] == [0, 0, 1, 1]
    assert collect_reply(back).calls == (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))


def test_a_call_that_the_upstream_never_finished_is_incomplete() -> None:
    begun = item(0, "function_call", done=False, call_id="a", name="f")
    last = {"type": "response.incomplete", "response": {"incomplete_details": {"reason": "max_output_tokens"}}}
    reply = collect_reply(read(sse(begun, last)))
    assert (reply.calls, reply.finished.reason) == ((), "max_tokens")


def test_unknown_events_and_items_are_skipped() -> None:
    unknown = {"type": "response.hologram.delta", "delta": {"x": 1}, "output_index": 0}
    written = sse(item(0, "web_search_call"), unknown, item(1, "message", **message("hi")), COMPLETED)
    assert collect_reply(read(b": ping\n\n" + written + b"data: [DONE]\n\n")).text == "hi"


def test_a_content_filter_has_its_own_stop_reason() -> None:
    assert collect_reply(read(stream(*CASES["content_filter"]))).finished.reason == "content_filter"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("server_error", Unavailable),
        ("rate_limit_exceeded", RateLimited),
        ("server_is_overloaded", Overloaded),
        ("context_length_exceeded", InvalidRequest),
        ("invalid_prompt", InvalidRequest),
        ("hologram_missing", Unavailable),
    ],
)
def test_a_failed_response_reads_as_the_matching_error(code: str, kind: type) -> None:
    failed = {"type": "response.failed", "response": {"id": "r", "error": {"code": code, "message": "so it is"}}}
    (event,) = read(sse(failed))
    assert isinstance(event, Failed)
    assert (type(event.error), event.error.message) == (kind, "so it is")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "server_error", "message": "gone"},
        {"error": {"code": "server_error", "message": "gone"}},
    ],
)
def test_bare_error_events_are_failures(event: dict[str, Any]) -> None:
    assert read(sse(event, COMPLETED)) == [Failed(Unavailable("gone", code="server_error"))]


def test_an_early_end_is_a_failure() -> None:
    whole = stream(*CASES["text"])
    (*_, last) = read(whole[: whole.index(b"event: response.completed")])
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


def test_an_unreadable_event_is_a_failure_and_ends_the_stream() -> None:
    back = read(b"data: {nonsense\n\n" + sse(COMPLETED))
    assert [type(event) for event in back] == [Failed]


def test_nothing_follows_the_last_event() -> None:
    whole = stream(*CASES["text"])
    back = read(whole + whole)
    assert [type(event) for event in back].count(Finished) == 1
    assert back[0] == Started(TRACE, "tiny", 1_700_000_000)
