"""A request and its reply on a connection: uvicorn's, with less made for each, and ways past ASGI's messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

if TYPE_CHECKING:
    from modelyard.http.connection import BoundedHttp


class Cycle(RequestResponseCycle):
    """What every request begins with stands in the class. uvicorn's event is made when somebody waits for it: until
    then `news` tells that something came which nobody has received."""

    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding: bool | None = None
    expected_content_length = 0
    access_log = False
    body: Any = b""
    news = False
    _event: asyncio.Event | None = None

    def __init__(self, connection: BoundedHttp, keep_alive: bool) -> None:
        self.scope, self.transport, self.flow = connection.scope, connection.transport, connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.waiting_for_100_continue, self.keep_alive = connection.expect_100_continue, keep_alive
        self.on_response = connection.on_response_complete

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        if self._event is None:
            self._event = asyncio.Event()
            if self.news:
                self._event.set()
        return self._event

    def tell(self) -> None:
        if self._event is None:
            self.news = True
        else:
            self._event.set()

    def came(self, body: bytes) -> None:
        """Most bodies come in one piece, which is kept as it is."""
        if not self.body:
            self.body = body
        elif isinstance(self.body, bytearray):
            self.body += body
        else:
            self.body = bytearray(self.body) + body
        self.tell()

    def whole_body(self, limit: int) -> bytes | None:
        """The body, where all of it has come. None, with nothing done: it has to be received, or is longer."""
        if (
            self.more_body
            or len(self.body) > limit
            or self.waiting_for_100_continue
            or self.disconnected
            or self.response_complete
        ):
            return None
        self.flow.resume_reading()
        if self._event is not None:
            self._event.clear()
        body, self.body, self.news = bytes(self.body), b"", False  # from now on news are that the client has left
        return body

    def reply(self, status: int, head: bytes, body: bytes) -> bool:
        """Answers in one write. `head` are lines of our own, `content-length` among them.

        False, with nothing done: it is not the plain case of a client that is there, reads, and stays.
        """
        is_plain = self.keep_alive and not (self.response_started or self.disconnected or self.default_headers)
        if not is_plain or self.flow.write_paused or self.scope["method"] == "HEAD":
            return False
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        self.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n\r\n", body)))
        self.tell()  # whoever waits for a disconnect hears of the end, as in uvicorn's own way
        self.on_response()
        return True

    def part(self, data: bytes) -> bool:
        """One more piece of a body that has begun and whose length nobody told. False, with nothing done: the client
        has to be waited for, or is gone, or the reply is of another kind."""
        if self.flow.write_paused or self.disconnected or self.response_complete or not self.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def behind(channel: object) -> Cycle | None:
    """The cycle whose `receive` or `send` this is; None where somebody stands between us and the connection and has to
    see the messages, and under another server."""
    cycle = getattr(channel, "__self__", None)
    return cycle if type(cycle) is Cycle else None
