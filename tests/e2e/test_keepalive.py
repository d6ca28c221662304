"""Silence is broken by a sign of life: in the queue and in prefill, in the form that each protocol's clients count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.helpers import raw_request, single_slot_config, stream_events, wait_for_queued, wait_until_idle
from tests.e2e.protocols import PROTOCOLS, Protocol, ServerSentEvent, event_names
from tests.live_server import LiveServer, live_server

MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()
SIGN = {"messages": "ping", "chat": ":", "responses": "response.in_progress"}


@pytest.fixture(scope="module")
def quick() -> Iterator[LiveServer]:
    with live_server(single_slot_config(http={"keepalive_s": 0.05})) as running:
        yield running
        wait_until_idle(running)


def waited_in_the_queue(quick: LiveServer, wire: Protocol, sign: str) -> list[ServerSentEvent]:
    """A stream whose place came free only after it had been pinged three times."""
    got: list[ServerSentEvent] = []
    with raw_request(quick, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        with stream_events(quick, wire.path, wire.body("text", stream=True)) as stream:
            wait_for_queued(quick, 1)
            for frame in stream:
                got.append(frame)
                if event_names(got).count(sign) == 3:
                    holder.leaves()
    return got


def test_messages_pings_even_before_the_message_starts(quick: LiveServer) -> None:
    got = waited_in_the_queue(quick, MESSAGES, "ping")
    assert event_names(got)[:3] == ["ping", "ping", "ping"]
    assert {str(frame.data) for frame in got if frame.event == "ping"} == {"{'type': 'ping'}"}
    rest = [frame for frame in got if frame.event != "ping"]
    assert rest[0].event == "message_start"
    assert MESSAGES.streamed(rest).text == "Hello there, friend."


def test_chat_sends_comments_before_its_first_chunk(quick: LiveServer) -> None:
    got = waited_in_the_queue(quick, CHAT, ":")
    assert event_names(got)[:3] == [":", ":", ":"]
    assert CHAT.streamed([frame for frame in got if frame.event != ":"]).text == "Hello there, friend."


def test_responses_repeats_that_it_is_in_progress(quick: LiveServer) -> None:
    got = waited_in_the_queue(quick, RESPONSES, "response.in_progress")
    assert event_names(got)[:4] == ["response.created", *["response.in_progress"] * 3]
    assert event_names(got).count("response.created") == 1
    assert [frame.data["sequence_number"] for frame in got] == list(range(len(got)))
    assert len({frame.data["response"]["id"] for frame in got if "response" in frame.data}) == 1
    assert RESPONSES.streamed(got).text == "Hello there, friend."


@pytest.mark.parametrize("name", PROTOCOLS)
def test_prefill_is_not_silent(quick: LiveServer, name: str) -> None:
    """Behind the event that opens the answer nothing else is said; before it, only where the machine is slow."""
    wire, got, sign = PROTOCOLS[name], list[ServerSentEvent](), SIGN[name]
    with stream_events(quick, wire.path, wire.body("endless prefill", stream=True)) as stream:
        for frame in stream:
            got.append(frame)
            if len(_behind_the_opening(got, sign)) == 4:
                break
    assert _behind_the_opening(got, sign) == [sign] * 4


def _behind_the_opening(got: list[ServerSentEvent], sign: str) -> list[str]:
    opened = next((number for number, name in enumerate(event_names(got), 1) if name != sign), len(got))
    return event_names(got)[opened:]


def test_a_refusal_after_the_first_sign_of_life_is_told_in_the_stream(quick: LiveServer, wire: Protocol) -> None:
    """The status is out: only an event can still say it."""
    with raw_request(quick, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.reads(b"so far")
        with raw_request(quick, wire.path, wire.body("error before", stream=True)) as caller:
            caller.reads(b"ping" if wire is MESSAGES else b"in_progress" if wire is RESPONSES else b": keep-alive")
            holder.leaves()
            caller.reads(b"out of memory")
