"""llama-server's /infill: requests, replies, streams, and both roles against each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import Incomplete, InvalidRequest, Unavailable, Unsupported
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
from modelyard.core.request import Constraint, Infill, Request, Sampling
from modelyard.protocols import llama_infill

EVENTS: list[Event] = [
    Started("id", "m", 7),
    BlockStart(0, "text"),
    BlockDelta(0, "ret"),
    BlockDelta(0, "urn 1"),
    BlockEnd(0),
    Finished("stop_string", Usage(20, 5, 3), "\n"),
]


def read(**fields: Any) -> Request:
    body = {"input_prefix": "def f():", "input_suffix": "\n"} | fields
    return llama_infill.read_request(msgspec.json.encode(body), {})


def stream(events: list[Event], request: Request) -> bytes:
    writer = llama_infill.writer(request, "trace")
    return b"".join(writer.write(event) for event in events) + writer.end()


def chunks(data: bytes) -> list[Any]:
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


def test_a_short_body_reads_as_its_defaults() -> None:
    assert read() == Request(model="default", prompts=("def f():",), infill=Infill("\n", "", ()))


def test_every_field_is_read() -> None:
    request = read(
        model="m", prompt="re", input_extra=[{"filename": "a.py", "text": "A"}, {"text": "B"}], n_predict=9, top_k=5,
        repeat_penalty=1.5, stop=["x"], stream=True, grammar="root ::= [a]", response_fields=["content"],
    )  # fmt: skip
    assert request.infill == Infill("\n", "re", (("a.py", "A"), ("tmp", "B")))
    assert request.sampling == Sampling(top_k=5, repetition_penalty=1.5)
    assert (request.max_tokens, request.stop, request.stream) == (9, ("x",), True)
    assert request.constraint == Constraint("gbnf", "root ::= [a]")
    assert request.reply_fields == ("content",)


@pytest.mark.parametrize(("limit", "expected"), [(-1, None), (0, 1), (5, 5)])
def test_the_limit_may_be_open_or_zero(limit: int, expected: int | None) -> None:
    assert read(n_predict=limit).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{"text": 5}]}, "input_extra[0]"),
        ({"n_predict": -2}, "n_predict"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_a_bad_body_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_the_reply_is_llama_servers() -> None:
    reply = msgspec.json.decode(llama_infill.write_reply([collect_reply(EVENTS)], read()))
    assert (reply["content"], reply["stop"], reply["stop_type"]) == ("return 1", True, "word")
    assert (reply["tokens_evaluated"], reply["tokens_predicted"], reply["stopping_word"]) == (20, 3, "\n")
    assert (reply["timings"]["cache_n"], reply["timings"]["prompt_n"]) == (5, 15)


def test_fields_can_be_selected_also_inside_objects() -> None:
    request = read(response_fields=["content", "timings/cache_n", "timings/none", "content/x"])
    reply = msgspec.json.decode(llama_infill.write_reply([collect_reply(EVENTS)], request))
    assert reply == {"content": "return 1", "timings/cache_n": 5}


def test_the_stream_ends_with_the_counts_and_reads_back() -> None:
    written = stream(EVENTS, read(stream=True))
    first, second, last = chunks(written)
    assert (first["content"], second["content"], last["content"]) == ("ret", "urn 1", "")
    assert ([first["stop"], last["stop"]], last["tokens_predicted"]) == ([False, True], 3)
    for size in (1, 7, len(written)):
        reader = llama_infill.reader()
        events = [event for at in range(0, len(written), size) for event in reader.feed(written[at : at + size])]
        assert [*events, *reader.finish()] == [Started("", "", 0), *EVENTS[1:]]


def test_an_unfinished_stream_does_not_look_complete() -> None:
    assert "error" in chunks(stream(EVENTS[:-1], read()))[-1]
    failed = stream([*EVENTS[:3], Failed(Unavailable("gone"))], read())
    assert chunks(failed)[-1]["error"]["message"] == "gone"
    reader = llama_infill.reader()
    events = reader.feed(failed)
    assert isinstance(events[-1], Failed)
    assert reader.finish() == []
    reader = llama_infill.reader()
    reader.feed(stream(EVENTS[:3], read()).partition(b'data: {"error"')[0])
    (last,) = reader.finish()
    assert isinstance(last, Failed)
    assert isinstance(last.error, Incomplete)


def test_a_request_is_written_for_an_upstream() -> None:
    request = read(
        prompt="re", input_extra=[{"filename": "a", "text": "A"}], n_predict=4, repeat_penalty=1.5, stream=True
    )
    written = msgspec.json.decode(llama_infill.write_request(request))
    assert written == {
        "input_prefix": "def f():",
        "input_suffix": "\n",
        "prompt": "re",
        "input_extra": [{"filename": "a", "text": "A"}],
        "repeat_penalty": 1.5,
        "n_predict": 4,
        "stream": True,
    }
    with pytest.raises(Unsupported):
        llama_infill.write_request(msgspec.structs.replace(request, logprobs=1))


def test_numbers_that_an_upstream_did_not_measure_may_be_null() -> None:
    timings = dict.fromkeys(("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"))
    body = {"content": "return 1", "stop": True, "tokens_evaluated": 9, "tokens_predicted": 2, "timings": timings}
    assert llama_infill.read_reply(msgspec.json.encode(body)).finished.usage == Usage(9, 0, 2)


def test_a_whole_reply_of_an_upstream_is_read() -> None:
    reply = llama_infill.read_reply(b'{"content": "x", "stop": true, "stop_type": "eos", "tokens_evaluated": 4}')
    assert (reply.text, reply.finished) == ("x", Finished("end", Usage(4)))
    with pytest.raises(Incomplete):
        llama_infill.read_reply(b"[")
