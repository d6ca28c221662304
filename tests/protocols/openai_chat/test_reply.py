from __future__ import annotations

from math import nan
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, Incomplete, Overloaded, Unavailable
from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Reply,
    Started,
    Timings,
    TokenLogprob,
    Usage,
    collect_reply,
    reply_events,
)
from modelyard.core.protocol import EventWriter, ModelCard
from modelyard.core.request import Reasoning, Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_chat
from modelyard.protocols.common.sse import SseParser
from tests.protocols.event_streams import call, text, thinking, token
from tests.protocols.golden import check_golden
from tests.protocols.openai_chat.helpers import REQUEST, STARTED, USAGE, answer, expressible, read_stream, stream
from tests.strategies import replies

SUM = '{"a": 1, "b": 2}'
WITH_USAGE = Request(model="tiny", stream=True, include_usage=True)
ENGINE_LOST = Failed(Unavailable("the engine was lost", retry_after=2.0))
LOGPROBS_DELTA = BlockDelta(0, "Hi", (token("H", "J"), token("i")))


def chunks(data: bytes) -> list[Any]:
    return [e.data if e.data == b"[DONE]" else msgspec.json.decode(e.data) for e in SseParser().feed(data)]


CASES: dict[str, tuple[list[Event], Request]] = {
    "text": (answer(text(0, "Hello", ' "world"\n')), REQUEST),
    "thinking_and_text": (answer(thinking(0, "Let me", " see"), text(1, "Yes")), REQUEST),
    "one_tool": (answer(call(0, "call_1", "add", '{"a": 1,', ' "b": 2}'), reason="tool_calls"), REQUEST),
    "parallel_tools": (
        answer(
            text(0, "Both:"),
            call(1, "call_1", "add", SUM),
            call(2, "call_2", "patch", "*** Begin", custom=True),
            reason="tool_calls",
        ),
        REQUEST,
    ),
    "length": (answer(call(0, "call_1", "add", '{"a": 1,', complete=False), reason="max_tokens"), REQUEST),
    "window": (answer(text(0, "To be"), reason="window"), REQUEST),
    "stop_string": (answer(text(0, "One"), reason="stop_string", stop="Two"), REQUEST),
    "content_filter": (answer(text(0, "I"), reason="content_filter"), REQUEST),
    "logprobs": (
        [STARTED, BlockStart(0, "text"), LOGPROBS_DELTA, BlockEnd(0), Finished("end", USAGE)],
        Request(model="tiny", stream=True, logprobs=2),
    ),
    "include_usage": (answer(text(0, "Hello")), WITH_USAGE),
    "error_mid_stream": ([STARTED, BlockStart(0, "text"), BlockDelta(0, "Hel"), ENGINE_LOST], REQUEST),
    "empty": (answer(), REQUEST),
}


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    events, request = CASES[name]
    check_golden("openai_chat", f"stream_{name}", stream(events, request))


def test_choices_interleave_and_share_one_prompt() -> None:
    writer: EventWriter = openai_chat.writer(Request(model="tiny", stream=True, include_usage=True, n=2), "trace")
    first = [STARTED, *text(0, "One"), Finished("end", Usage(9, 4, 6, 2))]
    second = [Started("other", "tiny", 5), *text(0, "Two"), Finished("max_tokens", Usage(9, 9, 3, 1))]
    pairs = [pair for row in zip(first, second, strict=True) for pair in zip(row, (0, 1), strict=True)]
    data = b"".join(writer.write(event, choice) for event, choice in pairs) + writer.end()
    check_golden("openai_chat", "stream_two_answers", data)
    usage = chunks(data)[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 9, 18)
    assert {chunk["id"] for chunk in chunks(data)[:-1]} == {"chatcmpl-abc123"}


def test_only_the_first_chunk_has_a_role_and_only_the_last_a_finish_reason() -> None:
    sent = chunks(stream(answer(thinking(0, "a"), text(1, "b"))))
    assert ["role" in chunk["choices"][0]["delta"] for chunk in sent[:-1]] == [True, False, False, False]
    assert [chunk["choices"][0]["finish_reason"] for chunk in sent[:-1]] == [None, None, None, "stop"]
    assert sent[-2]["choices"][0]["delta"] == {}


def test_nothing_follows_an_error() -> None:
    writer = openai_chat.writer(WITH_USAGE, "trace")
    writer.write(STARTED)
    writer.write(BlockStart(0, "text"))
    error = chunks(writer.write(ENGINE_LOST))[0]["error"]
    assert error == {
        "message": "the engine was lost",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }
    assert writer.write(BlockDelta(0, "more")) == b""
    assert writer.end() == b""


def test_an_incomplete_stream_ends_with_an_error() -> None:
    writer = openai_chat.writer(REQUEST, "trace")
    writer.write(STARTED)
    ending = chunks(writer.end())
    assert ending[0]["error"]["code"] == "incomplete_stream"
    assert b"[DONE]" not in ending
    assert chunks(openai_chat.writer(REQUEST, "trace").end())[0]["error"]["code"] == "incomplete_stream"


def test_logprobs_stay_with_text_and_empty_deltas_are_not_sent() -> None:
    writer = openai_chat.writer(REQUEST, "trace")
    writer.write(STARTED)
    writer.write(BlockStart(0, "thinking"))
    assert b'"logprobs":null' in writer.write(BlockDelta(0, "hm", (token("hm"),)))
    assert writer.write(BlockDelta(0, "")) == b""
    writer.write(BlockStart(1, "text"))
    half = chunks(writer.write(BlockDelta(1, "", (token("x"),))))[0]["choices"][0]
    assert half["delta"] == {"content": ""}
    assert half["logprobs"]["content"][0]["token"] == "x"


def test_a_keepalive_is_a_comment() -> None:
    assert openai_chat.writer(REQUEST, "trace").keepalive().startswith(b": ")


def test_an_overflow_before_the_stream_is_an_http_error() -> None:
    written = openai_chat.write_error(ContextOverflow(40123, 32768), trace="t1", streaming=True, request=REQUEST)
    assert (written.status, written.headers["x-request-id"], written.content_type) == (400, "t1", "application/json")
    check_golden("openai_chat", "overflow", written.body)


@pytest.mark.parametrize("arguments", ["", "{}", '{"a":1}', '{"a', " "])
def test_the_arguments_of_an_incomplete_call_never_parse(arguments: str) -> None:
    events = answer(call(0, "c", "f", arguments, complete=False), reason="max_tokens")
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in chunks(stream(events, REQUEST)) if c != b"[DONE]"]
    sent = "".join(given[0]["function"]["arguments"] for given in deltas if given)
    assert sent.strip()
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(sent)


def test_a_custom_call_is_written_only_if_it_is_complete() -> None:
    blocks = [call(0, "c", "patch", "*** Beg", custom=True, complete=False), call(1, "d", "f", "{}")]
    written = chunks(stream(answer(*blocks, reason="max_tokens"), REQUEST))
    calls = [c["choices"][0]["delta"]["tool_calls"] for c in written[:-1] if "tool_calls" in c["choices"][0]["delta"]]
    assert [given[0]["index"] for given in calls] == [0, 0]
    assert calls[0][0]["id"] == "d"


READ = [PromptRead(9, 4, 4), PromptRead(9, 4, 9, 0.25)]
FIRST = Measured(Usage(9, 4, 1), Timings(first_token=0.25, decode=0.0))
SECOND = Measured(Usage(9, 4, 2), Timings(first_token=0.25, decode=0.5))


def test_progress_and_times_are_in_the_chunks_that_llama_server_puts_them_in() -> None:
    request = Request(model="tiny", stream=True, include_usage=True, progress=True, timings="all")
    deltas = [FIRST, BlockStart(0, "text"), BlockDelta(0, "a"), SECOND, BlockDelta(0, "b"), BlockEnd(0)]
    last = Finished("end", Usage(9, 4, 2), timings=Timings(first_token=0.25, decode=1.0))
    sent = chunks(stream([STARTED, *READ, *deltas, last], request))[:-1]
    assert [chunk.get("prompt_progress") for chunk in sent[1:3]] == [
        {"total": 9, "cache": 4, "processed": 4, "time_ms": 0},
        {"total": 9, "cache": 4, "processed": 9, "time_ms": 250},
    ]
    assert sent[2]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    times = [(chunk["timings"]["predicted_n"], chunk["timings"]["predicted_ms"]) for chunk in sent[3:]]
    assert times == [(1, 0), (2, 500), (2, 1000), (2, 1000)]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in sent[3:5]] == ["a", "b"]
    assert sent[-1]["choices"] == []


def test_times_at_the_end_only() -> None:
    sent = chunks(stream(answer(text(0, "Hello")), Request(model="tiny", stream=True, timings="last")))[:-1]
    assert ["timings" in chunk for chunk in sent] == [False, False, True]


def test_streamed_reasoning_has_both_names_on_request() -> None:
    request = Request(model="tiny", stream=True, reasoning=Reasoning(both_names=True))
    sent = chunks(stream(answer(thinking(0, "Let", " me"), text(1, "Yes")), request))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in sent[1:4]]
    assert deltas == [
        {"reasoning_content": "Let", "reasoning": "Let"},
        {"reasoning_content": " me", "reasoning": " me"},
        {"content": "Yes"},
    ]


@pytest.mark.parametrize("in_text", ["only", "too"])
def test_reasoning_is_in_the_text_on_request(in_text: Literal["only", "too"]) -> None:
    request = Request(model="tiny", stream=True, reasoning=Reasoning(in_text=in_text))
    events = answer(thinking(0, "Let", " me"), text(1, "Yes"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(stream(events, request))[1:-1]]
    streamed = "".join(delta.get("content", "") for delta in deltas)
    message = msgspec.json.decode(openai_chat.write_reply([collect_reply(events)], request))["choices"][0]["message"]
    assert streamed == message["content"] == "<think>\nLet me\n</think>\n\nYes"
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == message.get("reasoning_content", "") == ("Let me" if in_text == "too" else "")


def test_the_progress_and_times_of_an_upstream_are_read() -> None:
    request = Request(model="tiny", stream=True, progress=True, timings="all")
    events = [STARTED, *READ, FIRST, *text(0, "Hello"), Finished("end", USAGE)]
    read = read_stream(stream(events, request))
    assert [event for event in read if isinstance(event, PromptRead)] == READ
    assert next(event for event in read if isinstance(event, Measured)) == FIRST


FINISHED_CASES = {name: case for name, case in CASES.items() if name != "error_mid_stream"}


def written(reply: Reply, request: Request = Request(model="tiny")) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(openai_chat.write_reply([reply], request))
    return out


@pytest.mark.parametrize("name", FINISHED_CASES)
def test_the_reply_matches_its_golden_file(name: str) -> None:
    events, request = FINISHED_CASES[name]
    check_golden("openai_chat", f"reply_{name}", openai_chat.write_reply([collect_reply(events)], request))


def test_several_replies_are_several_choices() -> None:
    one, two = collect_reply(CASES["text"][0]), collect_reply(CASES["length"][0])
    check_golden("openai_chat", "reply_two_answers", openai_chat.write_reply([one, two], Request(model="tiny", n=2)))


def test_content_is_null_only_beside_calls() -> None:
    assert written(collect_reply(CASES["one_tool"][0]))["choices"][0]["message"]["content"] is None
    assert written(collect_reply(CASES["empty"][0]))["choices"][0]["message"]["content"] == ""


def test_an_incomplete_call_is_left_out() -> None:
    choice = written(collect_reply(CASES["length"][0]))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


def test_a_probability_of_zero_has_a_finite_logprob() -> None:
    reply = collect_reply(CASES["text"][0])
    impossible = TokenLogprob("x", float("-inf"))
    reply = replace(reply, blocks=(Block(Text("x"), (impossible,)),))
    logprobs = written(reply, Request(model="tiny", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["content"][0] == {"token": "x", "logprob": -9999.0, "bytes": None, "top_logprobs": []}


def test_an_upstream_reply_is_read_in_many_dialects() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "hmm",
        "refusal": "no",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        "function_call": {"name": "g", "arguments": "{}"},
    }
    body = {"id": "x", "model": "m", "created": 5.5, "choices": [{"message": message, "finish_reason": "stop"}]}
    reply = openai_chat.read_reply(msgspec.json.encode(body))
    assert [block.part for block in reply.blocks] == [
        Thinking("hmm"),
        Text("no"),
        ToolCall("call_x_0", "f", '{"a":1}'),
        ToolCall("call_x_1", "g", "{}"),
    ]
    assert (reply.finished.reason, reply.started.created) == ("tool_calls", 5)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices":[]}', b'{"choices":[{"index":0}]}', b"\xff"])
def test_an_unreadable_upstream_reply_is_incomplete(body: bytes) -> None:
    with pytest.raises(Incomplete):
        openai_chat.read_reply(body)


def test_an_error_field_in_a_reply_is_raised() -> None:
    with pytest.raises(Overloaded, match="busy"):
        openai_chat.read_reply(b'{"error":{"message":"busy","code":"server_is_overloaded"}}')


def in_chats_order(reply: Reply) -> Reply:
    """A whole reply has one reasoning, one text and then the complete calls."""
    thinking = "".join(b.part.text for b in reply.blocks if isinstance(b.part, Thinking))
    texts = [b for b in reply.blocks if isinstance(b.part, Text)]
    text = Block(Text(reply.text), tuple(t for b in texts for t in b.logprobs))
    calls = [b for b in reply.blocks if isinstance(b.part, ToolCall) and b.complete]
    blocks = [*([Block(Thinking(thinking))] if thinking else []), *([text] if texts else []), *calls]
    limited = reply.finished.reason == "window"
    finished = replace(reply.finished, reason="max_tokens") if limited else reply.finished
    return Reply(replace(reply.started, usage=Usage()), tuple(blocks), finished)


@settings(max_examples=100, deadline=None)
@given(replies(custom=True, logprobs=True, incomplete=True, signatures=False, empty=True))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    request = Request(model="m", logprobs=2)
    once = openai_chat.write_reply([reply], request)
    found = openai_chat.read_reply(once)
    assert found == in_chats_order(reply)
    assert openai_chat.write_reply([found], request) == once


@settings(max_examples=60, deadline=None)
@given(replies(custom=True, incomplete=True, signatures=False, empty=True))
def test_a_stream_and_the_whole_reply_agree(reply: Reply) -> None:
    events: list[Event] = read_stream(stream(reply_events(reply), Request(model="m", stream=True, include_usage=True)))
    whole = openai_chat.read_reply(openai_chat.write_reply([expressible(reply)], Request(model="m")))
    assert in_chats_order(collect_reply(events)) == whole


CARD = ModelCard("tiny", 17, 4096, state="loading", aliases=("gpt-small",))


def test_a_model_has_its_window_and_state() -> None:
    body = msgspec.json.decode(openai_chat.write_model(CARD))
    assert body["object"] == "model"
    assert (body["id"], body["name"], body["created"], body["owned_by"]) == ("tiny", "tiny", 17, "modelyard")
    assert (body["context_length"], body["max_model_len"], body["state"]) == (4096, 4096, "loading")
    assert body["aliases"] == ["gpt-small"]


def test_the_list_has_every_model_in_order() -> None:
    body = msgspec.json.decode(openai_chat.write_models([CARD, ModelCard("other", 1, None)]))
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny", "other"]


PROMPT = (
    TokenLogprob("<s>", nan, id=1),
    TokenLogprob("the", -2.0, id=7, top=(TokenLogprob("a", -1.0, id=9), TokenLogprob("the", -2.0, id=7)), rank=2),
    TokenLogprob("cat", -5.0, id=8, top=(TokenLogprob("dog", -1.0, id=3), TokenLogprob("fox", -2.0, id=4)), rank=17),
)


def test_log_probabilities_of_the_prompt_have_the_form_of_vllm() -> None:
    reply = collect_reply(CASES["text"][0])
    reply = replace(reply, started=replace(reply.started, prompt_logprobs=PROMPT))
    whole = written(reply, Request(model="tiny", prompt_logprobs=2))
    assert whole["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -2.0, "rank": 2, "decoded_token": "the"},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
        },
        {
            "8": {"logprob": -5.0, "rank": 17, "decoded_token": "cat"},
            "3": {"logprob": -1.0, "rank": 1, "decoded_token": "dog"},
            "4": {"logprob": -2.0, "rank": 2, "decoded_token": "fox"},
        },
    ]
    back = openai_chat.read_reply(msgspec.json.encode(whole))
    again = written(back, Request(model="tiny", prompt_logprobs=2))
    assert again["prompt_logprobs"] == whole["prompt_logprobs"]


def test_reasoning_has_both_names_on_request() -> None:
    reply = collect_reply(CASES["thinking_and_text"][0])
    both = written(reply, Request(model="tiny", reasoning=Reasoning(both_names=True)))["choices"][0]["message"]
    assert both["reasoning"] == both["reasoning_content"] == "Let me see"
    assert "reasoning" not in written(reply)["choices"][0]["message"]


def test_times_are_those_of_llama_server() -> None:
    reply = collect_reply(CASES["text"][0])
    finished = replace(reply.finished, usage=Usage(9, 4, 6), timings=Timings(first_token=0.5, decode=2.0))
    timings = written(replace(reply, finished=finished), Request(model="tiny", timings="last"))["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"], timings["predicted_n"]) == (4, 5, 500, 6)
    assert timings["predicted_per_second"] == 3.0
    assert "timings" not in written(reply)
