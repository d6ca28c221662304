"""What Google's and Ollama's protocol write as a server, they read back as a client: streams split anywhere, whole
replies, errors, and streams that end early. (The other protocols express more, and have tests of their own.) And what
several protocols share: the highest temperature of an upstream, the names of fields in errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.errors import ContextOverflow, InvalidRequest, OutputOverflow
from modelyard.core.events import Block, Event, Failed, Finished, Started, Usage, collect_reply
from modelyard.core.request import Message, Request, Sampling, Text, ToolCall
from modelyard.protocols import anthropic_messages, gemini, ollama, openai_chat, openai_responses
from tests.protocols.event_streams import call, text, thinking
from tests.protocols.openai_chat.helpers import check_grammar
from tests.strategies import chunkings, events

PROTOCOLS: list[Any] = [gemini, ollama]
REQUEST = Request(model="tiny", stream=True, dialect="sse", messages=(Message("user", (Text("Hello"),)),))
SUM = '{"a": 1.0, "b": 2}'


def stream(protocol: Any, written: list[Event]) -> bytes:
    writer = protocol.writer(REQUEST, "trace")
    return b"".join(writer.write(event) for event in written) + bytes(writer.end())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=60, deadline=None)
@given(written=events(logprobs=False, incomplete=False, signatures=False), data=st.data())
def test_a_stream_split_anywhere_reads_back_equal(protocol: Any, written: list[Event], data: st.DataObject) -> None:
    reader = protocol.reader()
    chunks = data.draw(chunkings(stream(protocol, written)))
    found = [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish()
    check_grammar(found)
    before, after = collect_reply(written), collect_reply(found)
    assert (after.text, after.thinking) == (before.text, before.thinking)
    assert [(each.id, each.name) for each in after.calls] == [(each.id, each.name) for each in before.calls]
    if protocol is gemini:  # Ollama's has two counts only
        assert after.finished.usage == before.finished.usage


@pytest.mark.parametrize(("protocol", "usage"), [(gemini, Usage(9, 4, 6, 2)), (ollama, Usage(9, 0, 6))])
def test_a_whole_reply_reads_back_equal(protocol: Any, usage: Usage) -> None:
    blocks = [*thinking(0, "hm"), *text(1, "Hi"), *call(2, "c1", "add", SUM)]
    started = Started("abc123", "tiny", 1_700_000_000, Usage(9, 4))
    reply = collect_reply([started, *blocks, Finished("tool_calls", Usage(9, 4, 6, 2))])
    found = protocol.read_reply(protocol.write_reply([reply], REQUEST))
    assert found.blocks[1:] == (Block(Text("Hi")), Block(ToolCall("c1", "add", SUM)))
    assert found.thinking == "hm"
    assert (found.finished.reason, found.finished.usage) == ("tool_calls", usage)


@pytest.mark.parametrize(
    ("protocol", "cut"),
    [
        *((gemini, cut) for cut in (b"", b"data: {}\n\n", b'data: {"cand', b"data: null\n\n")),
        *((ollama, cut) for cut in (b"", b'{"model":"m"}\n', b'{"mod', b"null\n")),
    ],
)
def test_a_stream_that_ends_early_fails(protocol: Any, cut: bytes) -> None:
    reader = protocol.reader()
    assert isinstance((reader.feed(cut) + reader.finish())[-1], Failed)


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


@pytest.mark.parametrize(("protocol", "highest"), [(anthropic_messages, 1.0), (gemini, 2.0)])
def test_a_temperature_that_an_upstream_does_not_take_is_refused_in_one_sentence(protocol: Any, highest: float) -> None:
    protocol.write_request(replace(REQUEST, max_tokens=9, sampling=Sampling(temperature=highest)))
    with pytest.raises(InvalidRequest, match=f"temperature must be between 0 and {highest:g} for this model") as caught:
        protocol.write_request(replace(REQUEST, max_tokens=9, sampling=Sampling(temperature=highest + 0.5)))
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("error", [ContextOverflow(12, 8), OutputOverflow(5, 6, 8)])
def test_an_overflow_keeps_its_numbers(protocol: Any, error: Exception) -> None:
    written = protocol.write_error(error, trace="t")
    assert protocol.read_error(400, {}, written.body) == error
