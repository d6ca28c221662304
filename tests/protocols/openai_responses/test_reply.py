from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, RateLimited
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
    collect_reply,
)
from modelyard.core.protocol import EventWriter
from modelyard.core.request import Message, Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_responses
from modelyard.protocols.common.reasoning_signature import unpack_reasoning
from modelyard.protocols.openai_responses.errors import OVERFLOW
from modelyard.protocols.openai_responses.reply import ResponseObject, write_item
from tests.protocols.event_streams import call, text, thinking
from tests.protocols.golden import check_golden
from tests.protocols.openai_responses.helpers import (
    CASES,
    CODEX,
    REQUEST,
    STARTED,
    TRACE,
    USAGE,
    data_of,
    names_of,
    stream,
)
from tests.strategies import events, replies

WITH_LOGPROBS = replace(REQUEST, logprobs=2)


def expressible(reply: Reply) -> Reply:
    """The protocol has no early usage, no stop string and one name for both limits."""
    started, finished = reply.started, reply.finished
    reason: StopReason = "tool_calls" if reply.calls else "end"
    if finished.reason in ("max_tokens", "window"):
        reason = "max_tokens"
    blocks = tuple(reply.blocks) or (Block(Text("")),)
    return Reply(Started(started.id, started.model, started.created), blocks, Finished(reason, finished.usage))


EVERYTHING = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True)
EXPRESSIBLE = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True, signatures=False)


@settings(deadline=None, max_examples=100)
@given(EXPRESSIBLE.map(expressible))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    assert openai_responses.read_reply(openai_responses.write_reply([reply], WITH_LOGPROBS)) == reply


@settings(deadline=None, max_examples=100)
@given(EVERYTHING)
def test_a_second_round_trip_changes_nothing(reply: Reply) -> None:
    written = openai_responses.write_reply([reply], replace(WITH_LOGPROBS, model=reply.started.model))
    assert (
        openai_responses.write_reply(
            [openai_responses.read_reply(written)], replace(WITH_LOGPROBS, model=reply.started.model)
        )
        == written
    )


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_the_reply_matches_its_golden_file(name: str) -> None:
    request, events = CASES[name]
    check_golden("openai_responses", f"{name}.json", openai_responses.write_reply([collect_reply(events)], request))


def test_a_failed_reply_raises_its_error() -> None:
    failed = {"id": "resp_1", "status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}}
    with pytest.raises(RateLimited, match="slow"):
        openai_responses.read_reply(msgspec.json.encode(failed))


def test_a_bare_reply_is_read() -> None:
    bare = {"id": "resp_1", "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]}
    reply = openai_responses.read_reply(msgspec.json.encode(bare))
    assert (reply.text, reply.finished.reason) == ("hi", "end")


def test_the_request_is_echoed() -> None:
    request = Request(model="m", tools=CASES["one_tool"][0].tools, max_tokens=5, metadata={"a": "b"})
    body = msgspec.json.decode(openai_responses.write_reply([collect_reply(CASES["text"][1])], request))
    assert (body["max_output_tokens"], body["metadata"], len(body["tools"])) == (5, {"a": "b"}, 3)
    assert (body["object"], body["status"], body["output_text"]) == ("response", "completed", "Hello.")


def test_every_stop_reason_has_its_status() -> None:
    reasons: list[StopReason] = ["end", "tool_calls", "stop_string", "max_tokens", "window", "content_filter"]
    replies = [Reply(STARTED, (), Finished(reason, Usage())) for reason in reasons]
    bodies = [msgspec.json.decode(openai_responses.write_reply([reply], REQUEST)) for reply in replies]
    details = [body["incomplete_details"] and body["incomplete_details"]["reason"] for body in bodies]
    assert details == [None, None, None, "max_output_tokens", "max_output_tokens", "content_filter"]
    assert [body["status"] for body in bodies] == ["completed"] * 3 + ["incomplete"] * 3


def test_item_ids_have_a_prefix_for_the_kind_and_the_index() -> None:
    parts: list[Text | Thinking | ToolCall] = [
        Text("a"),
        Thinking("b"),
        ToolCall("c", "f", "{}"),
        ToolCall("d", "g", "x", custom=True),
    ]
    ids = [write_item(Block(part), "key", index, REQUEST)["id"] for index, part in enumerate(parts)]
    assert ids == ["msg_key_0", "rs_key_1", "fc_key_2", "ctc_key_3"]


def test_an_upstreams_signature_is_written_instead_of_ours() -> None:
    assert write_item(Block(Thinking("b", "theirs")), "key", 0, CODEX)["encrypted_content"] == "theirs"
    assert "encrypted_content" not in write_item(Block(Thinking("b", "theirs")), "key", 0, REQUEST)


def in_progress(request: Request) -> Any:
    return msgspec.json.decode(ResponseObject(request, "k").at("in_progress", STARTED))


def test_instructions_are_echoed_only_if_the_request_has_them() -> None:
    request = replace(REQUEST, messages=(Message("system", (Text("orders"),)), *REQUEST.messages))
    assert in_progress(request)["instructions"] is None
    request = replace(request, instructions=True)
    assert in_progress(request)["instructions"] == "orders"


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    check_golden("openai_responses", f"{name}.sse", stream(*CASES[name]))


def test_every_event_is_numbered_and_every_lifecycle_event_has_the_same_response_id() -> None:
    for case in CASES.values():
        written = data_of(stream(*case))
        assert [data["sequence_number"] for data in written] == list(range(len(written)))
        assert {data["response"]["id"] for data in written if "response" in data} == {f"resp_{TRACE}"}
        assert all("output_index" in data for data in written if "response" not in data)


def test_the_response_has_all_its_fields_from_the_first_event() -> None:
    written = [data["response"] for data in data_of(stream(*CASES["one_tool"])) if "response" in data]
    assert [set(response) - {"output_text", "metrics"} for response in written] == [set(written[0])] * len(written)


def test_a_text_has_all_its_events_in_order() -> None:
    assert names_of(stream(*CASES["text"])) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_only_the_last_text_or_reasoning_is_incomplete_if_a_limit_cuts_the_response() -> None:
    cut = Finished("max_tokens", USAGE)
    for blocks, statuses in (
        ([*text(0, "Hel")], ["incomplete"]),
        ([*thinking(0, "Hm")], ["incomplete"]),
        ([*thinking(0, "Hm"), *text(1, "Hel")], ["completed", "incomplete"]),
        ([*text(0, "Hi."), *call(1, "call_1", "shell", "{}")], ["completed", "completed"]),
        ([], ["incomplete"]),
    ):
        events: list[Event] = [STARTED, *blocks, cut]
        written = data_of(stream(REQUEST, events))
        done = [data["item"] for data in written if data["type"] == "response.output_item.done"]
        assert [item["status"] for item in done] == statuses
        whole = msgspec.json.decode(openai_responses.write_reply([collect_reply(events)], REQUEST))
        assert whole["output"] == written[-1]["response"]["output"] == done


def test_summaries_are_written_only_if_the_request_wants_them() -> None:
    assert not any("summary" in name for name in names_of(stream(*CASES["reasoning"])))
    names = names_of(stream(*CASES["reasoning_for_codex"]))
    assert names.count("reasoning_summary_text.delta") == names.count("reasoning_text.delta") == 2
    assert "reasoning_summary_part.done" in names


def test_encrypted_reasoning_contains_the_text() -> None:
    data = data_of(stream(*CASES["reasoning_for_codex"]))
    items = [event["item"] for event in data if event["type"] == "response.output_item.done"]
    assert unpack_reasoning(items[0]["encrypted_content"]) == "Hmm."


def test_a_delta_is_valid_json_with_its_position_and_number() -> None:
    writer = openai_responses.writer(REQUEST, "k")
    writer.write(STARTED)
    writer.write(BlockStart(0, "text"))
    (delta,) = data_of(writer.write(BlockDelta(0, 'a "%d" \n\n é')))
    assert delta == {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        "item_id": "msg_k_0",
        "output_index": 0,
        "content_index": 0,
        "delta": 'a "%d" \n\n é',
        "logprobs": [],
    }


def test_an_incomplete_call_is_never_written_as_completed() -> None:
    written = data_of(stream(*CASES["cut_call"]))
    done = [data["item"]["status"] for data in written if data["type"] == "response.output_item.done"]
    assert done == ["incomplete"]
    assert written[-1]["response"]["output"][0]["status"] == "incomplete"
    assert "response.function_call_arguments.done" not in [data["type"] for data in written]


def test_an_incomplete_custom_call_has_no_done_event() -> None:
    written = data_of(stream(*CASES["cut_custom_call"]))
    assert "response.output_item.done" not in [data["type"] for data in written]
    assert written[-1]["response"]["output"][0]["status"] == "incomplete"


def test_usage_has_every_field() -> None:
    assert data_of(stream(*CASES["text"]))[-1]["response"]["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 27,
    }


def test_a_keepalive_before_the_start_has_the_same_response_id() -> None:
    writer: EventWriter = openai_responses.writer(REQUEST, TRACE)
    written = writer.keepalive() + writer.keepalive() + writer.write(STARTED) + writer.keepalive()
    assert names_of(written) == ["created", *["in_progress"] * 4]
    assert {data["response"]["id"] for data in data_of(written)} == {f"resp_{TRACE}"}
    assert [data["sequence_number"] for data in data_of(written)] == list(range(5))


def test_an_overflow_in_a_stream_has_the_message_that_codex_acts_on() -> None:
    request = msgspec.structs.replace(CODEX, tools=())
    written = data_of(openai_responses.writer(request, TRACE).write(Failed(ContextOverflow(40123, 32768))))
    assert [data["type"] for data in written] == ["response.created", "response.failed"]
    assert written[1]["response"]["error"] == {"code": "context_length_exceeded", "message": OVERFLOW}


def test_a_rate_limit_message_has_the_retry_delay() -> None:
    written = data_of(
        openai_responses.writer(CODEX, TRACE).write(Failed(RateLimited("Too many requests.", retry_after=1.5)))
    )
    assert written[-1]["response"]["error"]["message"].endswith("try again in 1.5s.")


def test_an_empty_delta_writes_nothing() -> None:
    request, events = CASES["text"]
    longer: list[Event] = [*events[:2], BlockDelta(0, ""), *events[2:]]
    assert stream(request, longer) == stream(request, events)


@settings(deadline=None, max_examples=60)
@given(events(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True))
def test_the_last_event_contains_the_whole_reply(stream_events: list[Event]) -> None:
    started = stream_events[0]
    assert isinstance(started, Started)
    writer = openai_responses.writer(CODEX, started.id)
    last = data_of(b"".join(writer.write(event) for event in stream_events))[-1]
    assert last["response"] == msgspec.json.decode(openai_responses.write_reply([collect_reply(stream_events)], CODEX))
