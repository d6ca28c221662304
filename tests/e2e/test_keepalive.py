"""Silence is broken by a sign of life: in the queue and in prefill, in the form that each protocol's clients count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.helpers import raw_request, single_slot_config, stream_events, wait_for_queued, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, RESPONSES, Protocol, ServerSentEvent, event_names
from tests.live_server import LiveServer, live_server

KEEPALIVE_EVENTS = {"messages": "ping", "chat": ":", "responses": "response.in_progress"}


@pytest.fixture(scope="module")
def keepalive_server() -> Iterator[LiveServer]:
    with live_server(single_slot_config(http={"keepalive_s": 0.05})) as running:
        yield running
        wait_until_idle(running)


def events_after_queueing(keepalive_server: LiveServer, protocol: Protocol, keepalive: str) -> list[ServerSentEvent]:
    """A stream whose place came free only after it had been pinged three times."""
    events: list[ServerSentEvent] = []
    with raw_request(keepalive_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with stream_events(keepalive_server, protocol.path, protocol.body("text", stream=True)) as stream:
            wait_for_queued(keepalive_server, 1)
            for event in stream:
                events.append(event)
                if event_names(events).count(keepalive) == 3:
                    holder.close()
    return events


def test_messages_sends_pings_before_message_start(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, MESSAGES, "ping")
    assert event_names(events)[:3] == ["ping", "ping", "ping"]
    assert {str(event.data) for event in events if event.event == "ping"} == {"{'type': 'ping'}"}
    rest = [event for event in events if event.event != "ping"]
    assert rest[0].event == "message_start"
    assert MESSAGES.parse_stream(rest).text == "Hello there, friend."


def test_chat_sends_comments_before_its_first_chunk(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, CHAT, ":")
    assert event_names(events)[:3] == [":", ":", ":"]
    assert CHAT.parse_stream([event for event in events if event.event != ":"]).text == "Hello there, friend."


def test_responses_repeats_in_progress(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, RESPONSES, "response.in_progress")
    assert event_names(events)[:4] == ["response.created", *["response.in_progress"] * 3]
    assert event_names(events).count("response.created") == 1
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event.data["response"]["id"] for event in events if "response" in event.data}) == 1
    assert RESPONSES.parse_stream(events).text == "Hello there, friend."


@pytest.mark.parametrize("name", PROTOCOLS)
def test_keepalives_are_sent_during_prefill(keepalive_server: LiveServer, name: str) -> None:
    """Behind the event that opens the answer nothing else is said; before it, only where the machine is slow."""
    protocol, events, keepalive = PROTOCOLS[name], list[ServerSentEvent](), KEEPALIVE_EVENTS[name]
    with stream_events(keepalive_server, protocol.path, protocol.body("endless prefill", stream=True)) as stream:
        for event in stream:
            events.append(event)
            if len(_after_the_first(events, keepalive)) == 4:
                break
    assert _after_the_first(events, keepalive) == [keepalive] * 4


def _after_the_first(events: list[ServerSentEvent], keepalive: str) -> list[str]:
    first = next((number for number, name in enumerate(event_names(events), 1) if name != keepalive), len(events))
    return event_names(events)[first:]


def test_an_error_after_the_first_keepalive_is_sent_in_the_stream(
    keepalive_server: LiveServer, protocol: Protocol
) -> None:
    """The status is out: only an event can still say it."""
    with raw_request(keepalive_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with raw_request(keepalive_server, protocol.path, protocol.body("error before", stream=True)) as caller:
            caller.read_until(
                b"ping" if protocol is MESSAGES else b"in_progress" if protocol is RESPONSES else b": keep-alive"
            )
            holder.close()
            caller.read_until(b"out of memory")
