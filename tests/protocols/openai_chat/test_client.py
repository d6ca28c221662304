from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import Incomplete, InvalidRequest, Overloaded
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    Usage,
    collect_reply,
)
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_chat
from modelyard.protocols.common.sse import frame
from tests.protocols.event_streams import text
from tests.protocols.openai_chat.helpers import answer, check_grammar, expressible, stream
from tests.protocols.openai_chat.helpers import read_stream as read
from tests.strategies import chunkings, events

WITH_USAGE = Request(model="m", stream=True, include_usage=True)
DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return frame(msgspec.json.encode({"id": "chatcmpl-a", "created": 1, "model": "m", "choices": [choice]} | fields))


def calling(index: int, arguments: str = "", **fields: Any) -> bytes:
    function = {"arguments": arguments} | ({"name": fields.pop("name")} if "name" in fields else {})
    return chunk({"tool_calls": [{"index": index, "function": function} | fields]})


@settings(max_examples=100, deadline=None)
@given(
    events(custom=True, logprobs=True, incomplete=True, signatures=False, empty=True),
    st.data(),
)
def test_a_stream_split_anywhere_reads_back_equal(written: list[Event], data: st.DataObject) -> None:
    found = read(*data.draw(chunkings(stream(written, WITH_USAGE))))
    check_grammar(found)
    assert collect_reply(found) == expressible(collect_reply(written))


@settings(max_examples=60, deadline=None)
@given(events(custom=True, failing=True, signatures=False))
def test_a_failure_reads_back_equal(written: list[Event]) -> None:
    last = read(stream(written, WITH_USAGE))[-1]
    assert isinstance(last, Failed) == isinstance(written[-1], Failed)
    assert not isinstance(last, Failed) or last == written[-1]


def test_text_is_emitted_at_once() -> None:
    reader = openai_chat.reader()
    assert reader.feed(chunk({"role": "assistant", "content": ""})) == [Started("a", "m", 1)]
    assert reader.feed(chunk({"content": "Hi"})) == [BlockStart(0, "text"), BlockDelta(0, "Hi")]
    assert reader.feed(chunk({"content": "!"})) == [BlockDelta(0, "!")]
    assert reader.feed(chunk(finish="stop")) == [BlockEnd(0)]
    assert reader.feed(DONE) == [Finished("end", Usage())]
    assert reader.finish() == []


def test_finished_is_emitted_with_the_usage() -> None:
    reader = openai_chat.reader()
    reader.feed(chunk({"content": "Hi"}, "stop"))
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert reader.feed(chunk(choices=[], usage=usage)) == [Finished("end", Usage(3, 1, 2, 0))]
    assert reader.feed(DONE) == []


def test_usage_in_every_chunk_does_not_end_the_answer() -> None:
    counted = {"prompt_tokens": 3, "completion_tokens": 1}
    found = read(chunk({"content": "a"}, usage=counted), chunk({"content": "b"}, "stop", usage=counted), DONE)
    assert collect_reply(found).text == "ab"


def test_interleaved_calls_are_emitted_one_after_the_other() -> None:
    reader = openai_chat.reader()
    reader.feed(calling(0, id="a", name="f"))
    assert reader.feed(calling(1, '{"y"', id="b", name="g")) == []
    assert reader.feed(calling(0, '{"x":')) == [BlockDelta(0, '{"x":')]
    assert reader.feed(calling(1, ":2}")) == []
    assert reader.feed(calling(0, "1}")) == [
        BlockDelta(0, "1}"),
        BlockEnd(0),
        BlockStart(1, "tool_call", "b", "g"),
        BlockDelta(1, '{"y":2}'),
    ]
    assert reader.feed(calling(0, "\n")) == []
    assert reader.feed(chunk(finish="tool_calls")) == [BlockEnd(1)]


def test_a_later_call_is_emitted_once_the_earlier_one_is_complete() -> None:
    reader = openai_chat.reader()
    reader.feed(calling(0, "{}", id="a", name="f"))
    assert reader.feed(calling(1, '{"y', id="b", name="g")) == [
        BlockEnd(0),
        BlockStart(1, "tool_call", "b", "g"),
        BlockDelta(1, '{"y'),
    ]


def test_more_arguments_for_a_closed_call_are_a_failure() -> None:
    found = read(calling(0, "{}", id="a", name="f"), calling(1, "{", id="b", name="g"), calling(0, "x"), DONE)
    assert isinstance(found[-1], Failed)
    assert isinstance(found[-1].error, Incomplete)


def test_text_waits_behind_an_incomplete_call() -> None:
    found = read(calling(0, "{", id="a", name="f"), chunk({"content": "Hi"}), calling(0, "}"), chunk(finish="stop"))
    check_grammar(found)
    assert [block.part for block in collect_reply(found).blocks] == [ToolCall("a", "f", "{}"), Text("Hi")]


def test_a_call_waits_for_its_name() -> None:
    reader = openai_chat.reader()
    reader.feed(chunk({"role": "assistant"}))
    assert reader.feed(calling(0, "{", id="a")) == []
    assert reader.feed(calling(0, "}", name="f")) == [
        BlockStart(0, "tool_call", "a", "f"),
        BlockDelta(0, "{"),
        BlockDelta(0, "}"),
    ]


def test_calls_with_the_same_index_are_distinguished_by_id() -> None:
    found = read(
        calling(0, "{}", id="a", name="f"), calling(0, '{"x":1}', id="b", name="f"), chunk(finish="stop"), DONE
    )
    assert [call.id for call in collect_reply(found).calls] == ["a", "b"]


def test_legacy_function_calls_get_an_id() -> None:
    old = chunk({"function_call": {"name": "f", "arguments": "{}"}})
    assert collect_reply(read(old, chunk(finish="function_call"), DONE)).calls == (ToolCall("call_a_0", "f", "{}"),)


def test_after_a_limit_only_calls_with_complete_arguments_are_complete() -> None:
    cut = collect_reply(read(calling(0, '{"x":', id="a", name="f"), chunk(finish="length"), DONE))
    assert (cut.finished.reason, cut.calls) == ("max_tokens", ())
    complete = collect_reply(read(calling(0, '{"x":1}', id="a", name="f"), chunk(finish="length"), DONE))
    assert len(complete.calls) == 1


def test_a_turn_with_calls_that_finishes_with_stop_is_tool_calls() -> None:
    found = collect_reply(read(calling(0, "{}", id="a", name="f"), chunk(finish="stop"), DONE))
    assert found.finished.reason == "tool_calls"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_thinking(field: str) -> None:
    found = collect_reply(read(chunk({field: "hm"}), chunk({field: "m", "content": "Hi"}), chunk(finish="stop"), DONE))
    assert [block.part for block in found.blocks] == [Thinking("hmm"), Text("Hi")]


def test_other_choices_are_ignored() -> None:
    other = [{"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}]
    assert collect_reply(read(chunk({"content": "Hi"}), chunk(choices=other), chunk(finish="stop"), DONE)).text == "Hi"


def test_an_early_end_is_a_failure() -> None:
    for data in (b"", chunk({"content": "Hi"}), stream(answer(text(0, "Hi")))[:-100]):
        last = read(data)[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Incomplete)


def test_done_ends_an_answer_but_not_an_empty_stream() -> None:
    assert read(chunk({"content": "Hi"}), DONE)[-1] == Finished("end", Usage())
    assert isinstance(read(DONE)[-1], Failed)


def test_a_finish_reason_without_done_is_a_complete_answer() -> None:
    assert read(chunk({"content": "Hi"}, "length"))[-1] == Finished("max_tokens", Usage())


def test_error_chunks_fail_and_end_the_stream() -> None:
    busy = frame(b'{"error":{"message":"busy","code":"server_is_overloaded","queue_position":3}}')
    found = read(chunk({"content": "Hi"}), busy, chunk(finish="stop"), DONE)
    assert found[-1] == Failed(Overloaded("busy", position=3))
    assert read(frame(b'{"error":{"message":"bad","type":"invalid_request_error","code":400}}')) == [
        Failed(InvalidRequest("bad"))
    ]
    assert isinstance(read(frame(b'{"error":"broken"}'))[-1], Failed)
    assert isinstance(read(chunk(finish="error"))[-1], Failed)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices":5}', b"\xff", b"[" * 5000])
def test_an_unreadable_chunk_fails(data: bytes) -> None:
    found = read(frame(data), chunk({"content": "Hi"}), DONE)
    assert len(found) == 1
    assert isinstance(found[0], Failed)


def test_the_matched_stop_string_reads_back() -> None:
    written = answer(text(0, "Hi"), reason="stop_string", stop="END")
    assert collect_reply(read(stream(written, WITH_USAGE))).finished == collect_reply(written).finished


# --- chunks that differ in their text only ----------------------------------------------------------------------------


def test_text_that_arrives_together_is_one_event() -> None:
    reader = openai_chat.reader()
    reader.feed(chunk({"role": "assistant", "content": ""}) + chunk({"content": "Hi"}))
    assert reader.feed(chunk({"content": " there"}) + chunk({"content": ","}) + chunk({"content": " you"})) == [
        BlockDelta(0, " there, you")
    ]
    assert reader.feed(chunk({"content": "."}, "stop") + DONE)[-1] == Finished("end", Usage())


@pytest.mark.parametrize("extra", [{}, {"system_fingerprint": "x"}, {"echo": {"content": "a"}}])
@pytest.mark.parametrize("spaces", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6), min_size=2, max_size=12))
def test_no_text_is_taken_for_something_else(spaces: bool, extra: dict[str, Any], texts: list[str]) -> None:
    """Quotes, escapes and what looks like JSON, in chunks as different servers write them."""
    separators = (", ", ": ") if spaces else (",", ":")
    parts = ["a", *texts, '"},"finish_reason":"stop"}]}', "\\", "é\n", "b"]
    bodies = [{"choices": [{"index": 0, "delta": {"content": part}}], **extra, "id": "a"} for part in parts]
    written = [frame(json.dumps(body, separators=separators, ensure_ascii=spaces).encode()) for body in bodies]
    found = collect_reply(read(b"".join(written), chunk(finish="stop"), DONE))
    assert found.blocks[0].part == Text("".join(parts))
    assert collect_reply(read(*written, chunk(finish="stop"), DONE)) == found


def test_a_chunk_with_more_than_text_is_read_in_full() -> None:
    other = {"content": "c", "tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]}
    found = read(chunk({"content": "a"}), chunk({"content": "b"}) + chunk(other), chunk(finish="tool_calls"), DONE)
    assert [block.part for block in collect_reply(found).blocks] == [Text("abc"), ToolCall("x", "f", "{}")]


def test_an_error_between_texts_ends_the_answer() -> None:
    failed = frame(b'{"error":{"message":"out of memory"}}')
    found = read(chunk({"content": "a"}) + chunk({"content": "b"}) + failed + chunk({"content": "c"}))
    assert isinstance(found[-1], Failed)
    assert "".join(event.text for event in found if isinstance(event, BlockDelta)) == "ab"
