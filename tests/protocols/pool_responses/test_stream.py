"""The stream, compared with golden files and with the whole reply."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.errors import ContextOverflow
from modelyard.core.events import Failed, Reply, reply_events
from modelyard.protocols import pool_responses
from tests.protocols.golden import check_golden
from tests.protocols.pool_responses.helpers import CASES, REQUEST, TRACE, data_of, stream
from tests.strategies import replies


@pytest.mark.parametrize("name", CASES)
def test_the_stream_matches_its_golden_file(name: str) -> None:
    check_golden("pool_responses", f"{name}.sse", stream(CASES[name]))


def test_the_events_of_a_text_are_in_order() -> None:
    names = [data["type"].removeprefix("response.") for data in data_of(stream(CASES["text"]))]
    assert names == ["created", "output_text.delta", "output_text.delta", "metrics", "completed"]


@settings(deadline=None, max_examples=100)
@given(replies(custom=True, incomplete=True, empty=True))
def test_the_last_event_contains_the_whole_reply(reply: Reply) -> None:
    writer = pool_responses.writer(REQUEST, reply.started.id)
    *deltas, metrics, completed = data_of(b"".join(writer.write(event) for event in reply_events(reply)))[1:]
    whole = msgspec.json.decode(pool_responses.write_reply([reply], REQUEST))
    assert completed["response"] == whole
    assert metrics["metrics"] == whole["metrics"]
    assert "".join(delta["delta"] for delta in deltas) == whole["output_text"] == reply.text
    assert whole["output"] == [{"type": "output_text", "text": reply.text}]


def test_an_error_before_the_first_event_has_a_created_event() -> None:
    created, failed = data_of(stream([Failed(ContextOverflow(9, 8))]))
    assert created["type"] == "response.created"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert failed["response"]["id"] == created["response"]["id"] == "resp_abc123"


def test_a_keepalive_is_a_comment() -> None:
    assert pool_responses.writer(REQUEST, TRACE).keepalive().startswith(b": ")
