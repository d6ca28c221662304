"""Server-sent events, split anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.protocols.common.sse import SseEvent, SseParser, comment, frame
from tests.strategies import chunkings

LINES = st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))
EVENTS = st.builds(SseEvent, st.text("abc_.", max_size=6), LINES)


def parsed(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


@settings(deadline=None, max_examples=100)
@given(st.data(), st.lists(EVENTS, max_size=4), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_survive_any_split_and_any_line_ending(data: st.DataObject, events: list[SseEvent], end: bytes) -> None:
    sent = b"".join(frame(event.data, event.event or None) for event in events).replace(b"\n", end)
    assert parsed(*data.draw(chunkings(sent))) == events


def test_a_frame_without_a_name_has_only_a_data_line() -> None:
    assert frame(b"x") == b"data: x\n\n"
    assert frame(b"x", "ping") == b"event: ping\ndata: x\n\n"


def test_comments_and_unknown_fields_are_dropped() -> None:
    assert parsed(comment() + b"id: 7\nretry: 5\nodd\ndata: x\n\n" + comment("still here")) == [SseEvent("", b"x")]


@pytest.mark.parametrize(
    ("sent", "data"),
    [(b"data: a\ndata: b\n\n", b"a\nb"), (b"data:a\n\n", b"a"), (b"data:  a\n\n", b" a"), (b"data\n\n", b"")],
)
def test_data_lines_are_joined_and_lose_one_leading_space(sent: bytes, data: bytes) -> None:
    assert parsed(sent) == [SseEvent("", data)]


def test_an_event_without_data_is_dropped() -> None:
    assert parsed(b"event: ping\n\ndata: x\n\n") == [SseEvent("", b"x")]


def test_a_stream_without_its_last_blank_line_is_complete() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x") == []
    assert parser.finish() == [SseEvent("", b"x")]
