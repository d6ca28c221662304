"""What Google's and Ollama's protocols write keeps every text, thought and call. (The protocols with a client role
read back what they write, in tests of their own.) And what several protocols share: the highest temperature of an
upstream, the names of fields in errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Event, Finished, Started, Usage, collect_reply
from modelyard.core.request import Message, Request, Sampling, Text
from modelyard.protocols import anthropic_messages, gemini, ollama, openai_chat, openai_responses
from modelyard.protocols.common.call_arguments import write_arguments
from modelyard.protocols.common.json import encode
from tests.protocols.event_streams import call, text, thinking
from tests.strategies import events

PROTOCOLS: list[Any] = [gemini, ollama]
REQUEST = Request(model="tiny", stream=True, dialect="sse", messages=(Message("user", (Text("Hello"),)),))
SUM = '{"a": 1.0, "b": 2}'


Contents = tuple[str, str, list[tuple[str, str, Any]]]  # text, thinking, calls


def read_gemini(bodies: list[Any]) -> Contents:
    parts = [part for body in bodies for part in body["candidates"][0]["content"]["parts"]]
    texts = [(part["text"], part.get("thought", False)) for part in parts if "text" in part]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return (
        "".join(text for text, thought in texts if not thought),
        "".join(text for text, thought in texts if thought),
        [(each["id"], each["name"], each["args"]) for each in calls],
    )


def read_ollama(bodies: list[Any]) -> Contents:
    messages = [body["message"] for body in bodies]
    calls = [each for message in messages for each in message.get("tool_calls", ())]
    return (
        "".join(message["content"] for message in messages),
        "".join(message.get("thinking", "") for message in messages),
        [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls],
    )


READERS: dict[str, Callable[[list[Any]], Contents]] = {"gemini": read_gemini, "ollama": read_ollama}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=60, deadline=None)
@given(written=events(logprobs=False, incomplete=False, signatures=False))
def test_a_stream_has_every_text_thought_and_call(protocol: Any, written: list[Event]) -> None:
    writer = protocol.writer(REQUEST, "trace")
    stream = b"".join(writer.write(event) for event in written) + bytes(writer.end())
    bodies = [json.loads(line.removeprefix(b"data: ")) for line in stream.split(b"\n") if line]
    reply = collect_reply(written)
    calls = [(each.id, each.name, json.loads(encode(write_arguments(each.arguments)))) for each in reply.calls]
    assert READERS[protocol.NAME](bodies) == (reply.text, reply.thinking, calls)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_whole_reply_has_what_the_stream_has(protocol: Any) -> None:
    blocks = [*thinking(0, "hm"), *text(1, "Hi"), *call(2, "c1", "add", SUM)]
    started = Started("abc123", "tiny", 1_700_000_000, Usage(9, 4))
    written = [started, *blocks, Finished("tool_calls", Usage(9, 4, 6, 2))]
    body = json.loads(protocol.write_reply([collect_reply(written)], REQUEST))
    assert READERS[protocol.NAME]([body]) == ("Hi", "hm", [("c1", "add", {"a": 1.0, "b": 2})])


@pytest.mark.parametrize(
    ("protocol", "field"),
    [
        (openai_chat, "response_format"),
        (openai_responses, "text.format"),
        (anthropic_messages, "output_config.format"),
        (gemini, "responseSchema"),
    ],
)
def test_an_error_of_the_schema_names_the_clients_own_field(protocol: Any, field: str) -> None:
    error = InvalidRequest("the schema describes no value", code="bad_schema", param="response_format")
    assert f'"{field}"'.encode() in protocol.write_error(error, trace="t").body


@pytest.mark.parametrize(("protocol", "highest"), [(anthropic_messages, 1.0)])
def test_a_temperature_that_an_upstream_does_not_take_is_refused_in_one_sentence(protocol: Any, highest: float) -> None:
    protocol.write_request(replace(REQUEST, max_tokens=9, sampling=Sampling(temperature=highest)))
    with pytest.raises(InvalidRequest, match=f"temperature must be between 0 and {highest:g} for this model") as caught:
        protocol.write_request(replace(REQUEST, max_tokens=9, sampling=Sampling(temperature=highest + 0.5)))
    assert caught.value.param == "temperature"
