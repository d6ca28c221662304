"""Mistral's fill-in-the-middle: requests of editors, replies in the shape of Chat Completions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
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
from modelyard.protocols import mistral_fim

EVENTS: list[Event] = [
    Started("id", "m", 7),
    BlockStart(0, "text"),
    BlockDelta(0, "ret"),
    BlockDelta(0, "urn 1"),
    BlockEnd(0),
    Finished("max_tokens", Usage(20, 5, 3)),
]


def read(**fields: Any) -> Request:
    return mistral_fim.read_request(msgspec.json.encode({"model": "m", "prompt": "def f():"} | fields), {})


def chunks(events: list[Event]) -> list[Any]:
    writer = mistral_fim.writer(read(stream=True), "trace")
    data = b"".join(writer.write(event) for event in events) + writer.end()
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [None if part == b"[DONE]" else msgspec.json.decode(part) for part in parts]


def test_a_request_always_has_a_gap() -> None:
    assert read() == Request(model="m", prompts=("def f():",), infill=Infill(""))
    request = read(suffix="\n", max_completion_tokens=5, temperature=0.1, random_seed=4, stop=["x"], stream=True)
    assert (request.infill, request.max_tokens, request.stop, request.stream) == (Infill("\n"), 5, ("x",), True)
    assert request.sampling == Sampling(temperature=0.1, seed=4)


@pytest.mark.parametrize(("fields", "param"), [({"prompt": None}, "prompt"), ({"max_tokens": 0}, "max_tokens")])
def test_a_bad_body_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_the_reply_is_a_chat_completion() -> None:
    reply = msgspec.json.decode(mistral_fim.write_reply([collect_reply(EVENTS)], read()))
    assert reply["object"] == "chat.completion"
    expected = {"index": 0, "message": {"role": "assistant", "content": "return 1"}, "finish_reason": "length"}
    assert reply["choices"] == [expected]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (20, 3)


def test_every_chunk_of_a_stream_has_a_choice_with_content() -> None:
    *written, done = chunks(EVENTS)
    assert done is None
    assert [chunk["choices"][0]["delta"]["content"] for chunk in written] == ["ret", "urn 1", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in written] == [None, None, "length"]
    assert written[-1]["usage"]["total_tokens"] == 23


def test_an_unfinished_stream_does_not_look_complete() -> None:
    assert "error" in chunks(EVENTS[:-1])[-1]
    assert chunks([*EVENTS[:3], Failed(Unavailable("gone"))])[-1]["error"]["message"] == "gone"
