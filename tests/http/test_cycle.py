"""A request and its reply on a connection: what uvicorn has, with less made, and in one go where all is there."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from modelyard.http.cycle import Cycle, behind

LONG = 1 << 20


class Still(asyncio.Transport):
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.sent.append(data)


def cycle(
    body: bytes = b"{}", *, more: bool = False, waits: bool = False, stays: bool = True, method: str = "POST"
) -> Cycle:
    transport = Still()
    connection = SimpleNamespace(
        scope={"type": "http", "method": method},
        transport=transport,
        flow=FlowControl(transport),
        logger=logging.getLogger("test"),
        server_state=SimpleNamespace(default_headers=[]),
        expect_100_continue=waits,
        on_response_complete=lambda: None,
    )
    made = Cycle(cast(Any, connection), stays)
    if body:
        made.came(body)
    made.more_body = more
    return made


def uvicorns() -> RequestResponseCycle:
    transport = Still()
    return RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": "POST"}),
        transport=transport,
        flow=FlowControl(transport),
        logger=logging.getLogger("test"),
        access_logger=logging.getLogger("test"),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


# --- what comes in ----------------------------------------------------------------------------------------------------


async def test_a_whole_body_is_taken_once_and_the_connection_waits_for_a_goodbye() -> None:
    made = cycle(b'{"a": 1}')
    assert made.whole_body(LONG) == b'{"a": 1}'
    assert (bytes(made.body), made.message_event.is_set()) == (b"", False)
    made.disconnected = True
    made.tell()
    assert await made.receive() == {"type": "http.disconnect"}


async def test_whoever_waits_for_a_goodbye_already_is_not_told_of_the_body_that_was_taken() -> None:
    made = cycle()
    assert made.message_event.is_set()
    made.whole_body(LONG)
    assert not made.message_event.is_set()


def test_what_is_not_all_there_is_left_alone() -> None:
    gone, answered = cycle(), cycle()
    gone.disconnected, answered.response_complete = True, True
    for made in (cycle(more=True), cycle(waits=True), gone, answered):
        assert made.whole_body(LONG) is None
        assert (made.body, made.news) == (b"{}", True)
    assert cycle(b"12345").whole_body(4) is None


@given(st.lists(st.binary(min_size=1)))
def test_a_body_in_pieces_is_the_pieces_together(pieces: list[bytes]) -> None:
    made = cycle(b"")
    for piece in pieces:
        made.came(piece)
    assert made.whole_body(LONG) == b"".join(pieces)


DEEDS = st.lists(st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(["hear", "end", "leave"])), max_size=12)


async def _heard(made: RequestResponseCycle, deeds: list[bytes | str]) -> list[Any]:
    """What a request hears that listens now and then; «waits» where nothing is there to be heard."""
    heard: list[Any] = []
    for deed in deeds:
        if deed == "hear":
            listening = made.receive()
            try:
                listening.send(None)
            except StopIteration as told:
                heard.append(told.value)
            else:
                listening.close()
                heard.append("waits")
        elif isinstance(made, Cycle):
            if isinstance(deed, bytes):
                made.came(deed)
            else:
                made.more_body = made.more_body and deed != "end"
                made.disconnected = made.disconnected or deed == "leave"
                made.tell()
        else:
            if isinstance(deed, bytes):
                made.body += deed
            made.more_body = made.more_body and deed != "end"
            made.disconnected = made.disconnected or deed == "leave"
            made.message_event.set()
    return heard


@given(DEEDS)
def test_what_is_heard_is_what_uvicorns_own_would_tell(deeds: list[bytes | str]) -> None:
    """The event that is made only when somebody waits knows what came before it."""

    async def both() -> tuple[list[Any], list[Any]]:
        return await _heard(cycle(b"", more=True), deeds), await _heard(uvicorns(), deeds)

    ours, theirs = asyncio.run(both())
    assert ours == theirs


# --- what goes out ----------------------------------------------------------------------------------------------------


async def test_a_reply_is_one_write_and_ends_the_request() -> None:
    made = cycle()
    assert made.reply(200, b"content-type: text/plain\r\ncontent-length: 2", b"ok")
    expected = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
    assert cast(Still, made.transport).sent == [expected]
    assert await made.receive() == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    "unusual", ["disconnected", "response_started", "write_paused", "default_headers", "HEAD", "goes"]
)
def test_what_is_not_plain_is_left_to_uvicorn(unusual: str) -> None:
    made = cycle(stays=unusual != "goes", method="HEAD" if unusual == "HEAD" else "POST")
    if unusual == "write_paused":
        made.flow.pause_writing()
    elif unusual == "default_headers":
        made.default_headers = [(b"server", b"x")]
    elif unusual in ("disconnected", "response_started"):
        setattr(made, unusual, True)
    assert not made.reply(200, b"content-length: 2", b"{}")
    assert cast(Still, made.transport).sent == []


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@given(st.lists(st.binary(min_size=1), min_size=1))
def test_parts_are_written_as_uvicorn_writes_them(parts: list[bytes]) -> None:
    async def written() -> tuple[list[bytes], list[bytes]]:
        ours, theirs = cycle(), uvicorns()
        await ours.send(cast(Any, START))
        await theirs.send(cast(Any, START))
        for part in parts:
            assert ours.part(part)
            await theirs.send({"type": "http.response.body", "body": part, "more_body": True})
        return cast(Still, ours.transport).sent, cast(Still, theirs.transport).sent

    ours, theirs = asyncio.run(written())
    assert ours == theirs


@pytest.mark.parametrize("unusual", ["disconnected", "response_complete", "write_paused", "not begun", "length told"])
async def test_a_part_that_has_to_wait_or_comes_too_late_is_left_to_uvicorn(unusual: str) -> None:
    made = cycle()
    if unusual == "length told":
        await made.send(cast(Any, START | {"headers": [(b"content-length", b"9")]}))
    elif unusual != "not begun":
        await made.send(cast(Any, START))
    if unusual == "write_paused":
        made.flow.pause_writing()
    elif unusual in ("disconnected", "response_complete"):
        setattr(made, unusual, True)
    before = list(cast(Still, made.transport).sent)
    assert not made.part(b"x")
    assert cast(Still, made.transport).sent == before


def test_nobodys_messages_are_passed_over() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    made = cycle()
    assert (behind(made.receive), behind(made.send)) == (made, made)
    assert behind(receive) is None
    assert behind(SimpleNamespace().__eq__) is None
