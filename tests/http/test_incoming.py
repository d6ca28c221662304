"""A body that is there is taken at once; everything else is received in ASGI's way."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from modelyard.http.incoming import whole_body


class Still(asyncio.Transport):
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def cycle(body: bytes = b"{}", *, more: bool = False, waits: bool = False) -> RequestResponseCycle:
    made = RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": "POST"}),
        transport=Still(),
        flow=FlowControl(Still()),
        logger=logging.getLogger("test"),
        access_logger=logging.getLogger("test"),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=waits,
        keep_alive=True,
        on_response=lambda: None,
    )
    made.body, made.more_body = bytearray(body), more
    made.message_event.set()
    return made


async def test_a_whole_body_is_taken_once_and_the_connection_waits_for_a_goodbye() -> None:
    made = cycle(b'{"a": 1}')
    assert whole_body(cast(Any, made.receive)) == b'{"a": 1}'
    assert (bytes(made.body), made.message_event.is_set()) == (b"", False)
    made.disconnected = True
    made.message_event.set()
    assert await made.receive() == {"type": "http.disconnect"}


def test_what_is_not_all_there_is_left_alone() -> None:
    gone, answered = cycle(), cycle()
    gone.disconnected, answered.response_complete = True, True
    for made in (cycle(more=True), cycle(waits=True), gone, answered):
        assert whole_body(cast(Any, made.receive)) is None
        assert (bytes(made.body), made.message_event.is_set()) == (b"{}", True)


def test_nobodys_messages_are_passed_over() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    assert whole_body(cast(Any, receive)) is None
