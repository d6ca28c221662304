from __future__ import annotations

from math import nan
from typing import Any

import msgspec
import pytest

from modelyard.core.errors import ContextOverflow, Incomplete, InvalidRequest, Unavailable
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
from modelyard.core.request import Infill, Request, Sampling
from modelyard.protocols import openai_completions
from modelyard.protocols.common.sse import SseParser
from tests.protocols.event_streams import call, text, thinking, token
from tests.protocols.golden import check_golden
from tests.protocols.openai_chat.helpers import STARTED, USAGE, answer

REQUEST = Request(model="tiny", prompts=("Say hi",))
WITH_LOGPROBS: list[Event] = [
    STARTED,
    BlockStart(0, "text"),
    BlockDelta(0, "Hi", (token("H", "J"), token("i"))),
    BlockDelta(0, "!", (token("!", "?"),)),
    BlockEnd(0),
    Finished("end", USAGE),
]


def read(**fields: Any) -> Request:
    body = msgspec.json.encode({"model": "m", "prompt": "Say hi"} | fields)
    return openai_completions.read_request(body, {"x-session-id": "s"})


def stream(events: list[Event], request: Request) -> bytes:
    writer = openai_completions.writer(request, "trace")
    return b"".join(writer.write(event) for event in events) + writer.end()


def test_a_short_request_reads_as_its_defaults() -> None:
    assert read() == Request(model="m", prompts=("Say hi",), session="s")


def test_every_field_is_read() -> None:
    request = read(
        prompt=["a", "b"], suffix="end", n=2, best_of=2, logprobs=5, max_tokens=7, stop="x", stream=True, user="u",
        stream_options={"include_usage": True}, temperature=0.5, regex="a+", priority="batch", lora_adapter="l",
    )  # fmt: skip
    assert request.prompts == ("a", "b")
    assert (request.infill, request.n, request.logprobs, request.max_tokens) == (Infill("end"), 2, 5, 7)
    assert (request.stop, request.stream, request.include_usage, request.user) == (("x",), True, True, "u")
    assert (request.sampling, request.priority, request.lora_adapter) == (Sampling(temperature=0.5), "background", "l")
    assert request.constraint is not None


def test_unsupported_fields_are_warnings() -> None:
    assert [warning.split(":")[0] for warning in read(best_of=3).warnings] == ["best_of_ignored"]


def test_echo_with_logprobs_asks_for_those_of_the_prompt_and_may_generate_nothing() -> None:
    request = read(prompt=[1, 2], echo=True, logprobs=1, max_tokens=0)
    assert (request.echo, request.prompt_logprobs, request.max_tokens, request.warnings) == (True, 1, 0, ())
    assert read(echo=True).prompt_logprobs is None
    assert read(echo=True, logprobs=1, suffix="x").prompt_logprobs is None
    with pytest.raises(InvalidRequest, match="max_tokens"):
        read(max_tokens=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": -5}, "max_tokens"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_the_reply_matches_its_golden_file() -> None:
    events = answer(text(0, "Hi"), reason="stop_string", stop="END")
    check_golden("openai_completions", "reply_text", openai_completions.write_reply([collect_reply(events)], REQUEST))


def test_the_stream_matches_its_golden_file() -> None:
    request = Request(model="tiny", prompts=("Say hi",), stream=True, include_usage=True, echo=True)
    events = answer(text(0, "Hi", "!"), reason="max_tokens")
    events[0] = msgspec.structs.replace(STARTED, prompt="Say hi")
    check_golden("openai_completions", "stream_text", stream(events, request))


def test_logprob_offsets_start_after_the_echo() -> None:
    request = Request(model="tiny", prompts=("abc",), echo=True, logprobs=2)
    events = [msgspec.structs.replace(STARTED, prompt="abc"), *WITH_LOGPROBS[1:]]
    choice = msgspec.json.decode(openai_completions.write_reply([collect_reply(events)], request))["choices"][0]
    assert choice["text"] == "abcHi!"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [-0.25, -0.25, -0.25],
        "top_logprobs": [{"H": -1.5, "J": -1.5}, {"i": -0.25}, {"!": -1.5, "?": -1.5}],
        "text_offset": [3, 4, 5],
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_the_logprobs_of_an_echo_come_first_and_begin_with_null(streamed: bool) -> None:
    request = Request(model="tiny", prompts=("abc",), echo=True, logprobs=2, prompt_logprobs=2, stream=streamed)
    first = msgspec.structs.replace(token("ab"), logprob=nan)
    events = [msgspec.structs.replace(STARTED, prompt="abc", prompt_logprobs=(first, token("c", "d")))]
    events += WITH_LOGPROBS[1:]
    if streamed:
        chunks = [msgspec.json.decode(e.data)["choices"][0] for e in SseParser().feed(stream(events, request))[:-1]]
        found = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    else:
        body = msgspec.json.decode(openai_completions.write_reply([collect_reply(events)], request))
        chunks, found = body["choices"], [body["choices"][0]["logprobs"]]
    assert "".join(chunk["text"] for chunk in chunks) == "abcHi!"
    joined = {key: [entry for part in found for entry in part[key]] for key in found[0]}
    assert joined == {
        "tokens": ["ab", "c", "H", "i", "!"],
        "token_logprobs": [None, -0.25, -0.25, -0.25, -0.25],
        "top_logprobs": [None, {"c": -1.5, "d": -1.5}, {"H": -1.5, "J": -1.5}, {"i": -0.25}, {"!": -1.5, "?": -1.5}],
        "text_offset": [0, 2, 3, 4, 5],
    }


def test_streamed_logprob_offsets_continue() -> None:
    data = stream(WITH_LOGPROBS, Request(model="tiny", prompts=("abc",), stream=True, logprobs=0))
    chunks = [msgspec.json.decode(e.data)["choices"][0] for e in SseParser().feed(data)[:-1]]
    assert [choice["logprobs"] and choice["logprobs"]["text_offset"] for choice in chunks] == [[0, 1], [2], None]
    assert chunks[0]["logprobs"]["top_logprobs"] is None


def test_choices_are_indexed_over_prompts_and_answers() -> None:
    request = Request(model="tiny", prompts=("a", "b"), n=2, echo=True)
    prompts = (Usage(1, 0, 5), Usage(1, 0, 6), Usage(10, 0, 7), Usage(10, 0, 8))
    started = [msgspec.structs.replace(STARTED, prompt=prompt) for prompt in "aabb"]
    replies = [collect_reply([started[i], *text(0, str(i)), Finished("end", usage)]) for i, usage in enumerate(prompts)]
    body = msgspec.json.decode(openai_completions.write_reply(replies, request))
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b2", "b3"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (11, 26)


def test_choices_share_one_id_and_their_usage_is_added() -> None:
    request = Request(model="tiny", prompts=("a", "b"), stream=True, include_usage=True)
    writer = openai_completions.writer(request, "trace")
    data = b""
    for choice in (1, 0):
        events = [Started(f"id{choice}", "tiny", 1), *text(0, "x"), Finished("end", Usage(5 + choice, 0, 2))]
        data += b"".join(writer.write(event, choice) for event in events)
    chunks = [msgspec.json.decode(e.data) for e in SseParser().feed(data + writer.end())[:-1]]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-id1"}
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (11, 4)


def test_the_text_of_every_block_kind_is_part_of_the_answer() -> None:
    events = answer(thinking(0, "hm "), text(1, "Hi "), call(2, "a", "f", "{}"), reason="tool_calls")
    choice = msgspec.json.decode(openai_completions.write_reply([collect_reply(events)], REQUEST))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hm Hi {}", "stop")
    chunks = [msgspec.json.decode(e.data)["choices"][0] for e in SseParser().feed(stream(events, REQUEST))[:-1]]
    assert "".join(part["text"] for part in chunks) == "hm Hi {}"


def test_nothing_follows_an_error() -> None:
    data = stream([STARTED, BlockStart(0, "text"), Failed(Unavailable("lost")), BlockDelta(0, "x")], REQUEST)
    assert [msgspec.json.decode(e.data)["error"]["code"] for e in SseParser().feed(data)] == ["engine_unavailable"]


def test_an_incomplete_stream_ends_with_an_error() -> None:
    assert b"incomplete_stream" in stream([STARTED], REQUEST)
    assert b"incomplete_stream" in stream([], REQUEST)
    assert b"[DONE]" not in stream([STARTED], REQUEST)


def test_a_keepalive_is_a_comment() -> None:
    assert openai_completions.writer(REQUEST, "t").keepalive().startswith(b": ")


def test_an_overflow_names_the_prompt_field() -> None:
    written = openai_completions.write_error(ContextOverflow(40, 32), trace="t")
    assert written.status == 400
    assert msgspec.json.decode(written.body)["error"]["param"] == "prompt"


# --- the client role --------------------------------------------------------------------------------------------------


def test_a_suffix_makes_a_gap_and_an_empty_one_does_not() -> None:
    assert read(suffix="").infill is None
    with pytest.raises(InvalidRequest) as caught:
        read(prompt=[1, 2], suffix="end")
    assert caught.value.param == "prompt"


def test_a_request_for_an_upstream_has_only_fields_that_are_set() -> None:
    request = read(suffix="end", max_tokens=7, stop="x", logprobs=2, temperature=0.5, echo=True)
    assert msgspec.json.decode(openai_completions.write_request(request)) == {
        "model": "m",
        "prompt": "Say hi",
        "suffix": "end",
        "max_tokens": 7,
        "stop": ["x"],
        "logprobs": 2,
        "temperature": 0.5,
        "prompt_cache_key": "s",
    }
    assert b'"echo":true' in openai_completions.write_request(read(logprobs=1, echo=True))


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_a_written_stream_reads_back_as_its_events(size: int) -> None:
    request = read(logprobs=1, stream=True, stream_options={"include_usage": True})
    written, reader = stream(WITH_LOGPROBS, request), openai_completions.reader()
    events = [event for at in range(0, len(written), size) for event in reader.feed(written[at : at + size])]
    reply, expected = collect_reply([*events, *reader.finish()]), collect_reply(WITH_LOGPROBS)
    assert (reply.text, reply.finished) == (expected.text, expected.finished)
    assert [token.token for block in reply.blocks for token in block.logprobs] == ["H", "i", "!"]


def test_a_whole_reply_reads_back() -> None:
    reply, request = collect_reply(WITH_LOGPROBS), read(logprobs=1)
    again = openai_completions.read_reply(openai_completions.write_reply([reply], request))
    assert (again.text, again.finished) == (reply.text, reply.finished)


@pytest.mark.parametrize("data", [b"", b"data: [DONE]\n\n", b"data: {\n\n", b'data: {"choices": [{"text": "a"}]}\n\n'])
def test_a_broken_stream_of_an_upstream_fails(data: bytes) -> None:
    reader = openai_completions.reader()
    last = [*reader.feed(data), *reader.finish()][-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


def test_an_error_of_an_upstream_is_read() -> None:
    reader = openai_completions.reader()
    (failed,) = reader.feed(b'data: {"error": {"message": "full", "type": "overloaded_error"}}\n\n')
    assert isinstance(failed, Failed)
    assert failed.error.message == "full"
    with pytest.raises(Incomplete):
        openai_completions.read_reply(b"{}")
