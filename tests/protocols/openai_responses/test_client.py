"""The client role: requests to upstreams, and their replies and streams back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.errors import Incomplete, InvalidRequest, Overloaded, RateLimited, Unavailable
from modelyard.core.events import (
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
    collect_reply,
)
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
from modelyard.protocols import openai_responses
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.openai_responses.request import join_turns
from tests.protocols.openai_responses.helpers import CASES, REQUEST, TRACE, stream
from tests.protocols.openai_responses.test_reply import expressible as expressible_reply
from tests.strategies import chunkings, events, merged, names, requests

EVERYTHING = requests(
    custom=True, server=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True,
    broken=True, details=True, errors=True, references=True, images_in_results=True, developer=True,
)  # fmt: skip
EXPRESSIBLE = requests(
    custom=True, deferred=True, namespaces=True, named_constraints=True, logprobs=True, redacted=True, broken=True,
    details=True, images_in_results=True, developer=True, reasoning=False,
)  # fmt: skip


def expressible(request: Request) -> Request:
    """Neighbours that the protocol cannot distinguish are joined; a signature without text is redacted."""
    turns = ((message.role, tuple(map(_expressible_part, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(join_turns(turns)))


def _expressible_part(part: Part) -> Part:
    if isinstance(part, Thinking) and part.signature and not part.text:
        return replace(part, redacted=True)
    return part


@settings(deadline=None, max_examples=100)
@given(EXPRESSIBLE.map(expressible), st.booleans(), st.none() | names())
def test_an_expressible_request_reads_back_equal(request: Request, encrypted: bool, session: str | None) -> None:
    request = replace(request, encrypted_reasoning=encrypted, session=session, previous=session, store=encrypted)
    if session is not None:
        repeated = {"safety_identifier": None, "prompt_cache_key": session, "prompt_cache_retention": None}
        request = replace(request, repeated={**repeated, "max_tool_calls": None})
    assert openai_responses.read_request(openai_responses.write_request(request), {}) == request


@settings(deadline=None, max_examples=100)
@given(EVERYTHING, st.booleans())
def test_a_second_round_trip_changes_nothing(request: Request, instructions: bool) -> None:
    written = openai_responses.write_request(replace(request, instructions=instructions))
    assert openai_responses.write_request(openai_responses.read_request(written, {})) == written


def round_trip(request: Request) -> Request:
    return openai_responses.read_request(openai_responses.write_request(request), {})


def test_instructions_read_back_as_instructions() -> None:
    lead, rest = Message("system", (Text("Be brief."),)), Message("user", (Text("hi"),))
    request = Request(model="m", messages=(lead, rest), instructions=True, reasoning=Reasoning(summary="auto"))
    assert msgspec.json.decode(openai_responses.write_request(request))["instructions"] == "Be brief."
    assert round_trip(request) == request


def test_the_text_in_our_signature_wins_over_the_visible_text() -> None:
    message = Message("assistant", (Thinking("shortened", pack_reasoning("whole")),))
    request = Request(model="m", messages=(message,))
    assert round_trip(request).messages == (Message("assistant", (Thinking("whole", pack_reasoning("whole")),)),)


def test_disabled_reasoning_is_written_as_an_effort_of_none() -> None:
    request = Request(model="m", messages=(Message("user", (Text("x"),)),), reasoning=Reasoning(enabled=False))
    assert round_trip(request).reasoning == Reasoning(enabled=False, effort="none")


def test_a_tool_reference_is_written_as_its_name() -> None:
    result = Message("tool", (ToolResult("call_1", (ToolReference("grep"),)),))
    again = round_trip(Request(model="m", messages=(result,)))
    assert again.messages == (Message("tool", (ToolResult("call_1", (Text("grep"),)),)),)


WITH_LOGPROBS = replace(REQUEST, logprobs=2)


def read(*chunks: bytes) -> list[Event]:
    reader = openai_responses.reader()
    return [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish()


def sse(*events: dict[str, Any]) -> bytes:
    """A minimal stream: no `event:` lines, no sequence numbers."""
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


def item(index: int, kind: str, done: bool = True, **fields: Any) -> dict[str, Any]:
    name = "done" if done else "added"
    return {"type": f"response.output_item.{name}", "output_index": index, "item": {"type": kind} | fields}


def message(text: str) -> dict[str, Any]:
    return {"content": [{"type": "output_text", "text": text}]}


COMPLETED = {"type": "response.completed", "response": {"id": "resp_1"}}


@settings(deadline=None, max_examples=100)
@given(st.data(), events(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True, signatures=False))
def test_a_stream_split_anywhere_reads_back_equal(data: st.DataObject, sent: list[Event]) -> None:
    started = sent[0]
    assert isinstance(started, Started)
    writer = openai_responses.writer(WITH_LOGPROBS, started.id)
    written = b"".join(writer.write(event) for event in sent)
    back = read(*data.draw(chunkings(written)))
    assert collect_reply(back) == expressible_reply(collect_reply(sent))
    if any(isinstance(event, BlockStart) for event in sent):
        assert merged(back)[1:-1] == merged(sent)[1:-1]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed", "empty"}))
def test_every_golden_stream_reads_back(name: str) -> None:
    request, sent = CASES[name]
    back, reply = collect_reply(read(stream(request, sent))), collect_reply(sent)
    assert [block.complete for block in back.blocks] == [block.complete for block in reply.blocks]
    assert (back.text, back.thinking, back.calls) == (reply.text, reply.thinking, reply.calls)


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
    request = replace(REQUEST, reasoning=Reasoning(summary="auto"))
    assert collect_reply(read(stream(request, CASES["reasoning"][1]))).thinking == "Thinking."


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
    failed = {"type": "response.failed", "response": {"id": "r", "error": {"code": code, "message": "no"}}}
    (event,) = read(sse(failed))
    assert isinstance(event, Failed)
    assert (type(event.error), event.error.message) == (kind, "no")


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
    written = stream(*CASES["text"])
    (*_, last) = read(written[: written.index(b"event: response.completed")])
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


def test_an_unreadable_event_is_a_failure_and_ends_the_stream() -> None:
    back = read(b"data: {nonsense\n\n" + sse(COMPLETED))
    assert [type(event) for event in back] == [Failed]


@pytest.mark.parametrize("body", [b"", b"{nonsense", b"[]", b'{"output": 5}', b"\xff"])
def test_an_unreadable_reply_is_the_upstreams_fault(body: bytes) -> None:
    with pytest.raises(Incomplete):
        openai_responses.read_reply(body)


def test_nothing_follows_the_last_event() -> None:
    written = stream(*CASES["text"])
    back = read(written + written)
    assert [type(event) for event in back].count(Finished) == 1
    assert back[0] == Started(TRACE, "tiny", 1_700_000_000)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": "completed"}, "end"),
        ({"status": "incomplete"}, "max_tokens"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "max_tokens"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
    ],
)
def test_the_status_of_a_reply_gives_the_stop_reason(response: dict[str, Any], reason: str) -> None:
    assert openai_responses.read_reply(msgspec.json.encode(response)).finished.reason == reason


def test_missing_usage_fields_read_as_zero() -> None:
    body = msgspec.json.encode({"usage": {"input_tokens": 3, "output_tokens": 4}})
    assert openai_responses.read_reply(body).finished.usage == Usage(prompt=3, output=4)
    assert openai_responses.read_reply(b'{"usage":{}}').finished.usage == Usage()


def test_the_bytes_of_a_token_default_to_its_text_and_must_be_bytes() -> None:
    def reply(**token: Any) -> bytes:
        part = {"type": "output_text", "text": "é", "logprobs": [{"token": "é", "logprob": -1.0} | token]}
        return msgspec.json.encode({"output": [{"type": "message", "content": [part]}]})

    assert openai_responses.read_reply(reply()).blocks[0].logprobs == (TokenLogprob("é", -1.0, "é".encode()),)
    with pytest.raises(Incomplete, match="bytes"):
        openai_responses.read_reply(reply(bytes=[300]))


def test_items_of_the_final_output_that_were_never_announced_are_ignored() -> None:
    output = [{"type": "message"} | message("one"), {"type": "message"} | message("two")]
    last = {"type": "response.completed", "response": {"id": "resp_1", "output": output}}
    assert collect_reply(read(sse(item(0, "message", **message("one")), last))).text == "one"
